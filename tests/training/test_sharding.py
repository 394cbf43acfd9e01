"""Every leaf of a run's state has a declared place, and nothing large is a copy on every device; published weights are local."""

import functools
import math
from pathlib import Path

import jax
import pytest
from jax.sharding import AbstractMesh, AxisType
from virtual_devices import run_on_devices

from bridge_jax import config as configuration
from bridge_jax import mesh as meshes
from bridge_jax.models import e5, known, qwen2
from bridge_jax.objectives.bilevel import Modules, make_optimizers
from bridge_jax.training.state import make_state, step_config

ROOT = Path(__file__).parents[2]
LARGE = 1 << 20
QWEN_3B = qwen2.Qwen2Config(151936, 2048, 11008, 36, 16, 2, 128, tie_embeddings=True)
E5_BASE = e5.BertConfig(30522, 768, 3072, 12, 12, 512)
# Frozen, and read by the retriever's update alone: 94 MB whose rows (2 x 3 x 5087) no mesh divides by four; 1.6 MB of positions.
EXCEPTIONS = {("embed", "embedding"), ("positions",)}


def replicated(mesh, tree, units):
    """Paths of the leaves above 1 MiB of which every device has all."""
    places = jax.tree.leaves(meshes.shardings(mesh, tree, units))
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    assert len(leaves) == len(places)
    return {
        meshes.tree_path(path)
        for (path, x), place in zip(leaves, places)
        if place.shard_shape(x.shape) == x.shape and math.prod(x.shape) * x.dtype.itemsize > LARGE
    }


@pytest.mark.parametrize(
    "overrides, tower",
    [
        ((), E5_BASE),
        (("policy.trainable=lora",), known.encoder_config("Qwen/Qwen3-Embedding-4B")),
        (("method.name=search_r1", "policy.algorithm=ppo"), E5_BASE),
    ],
)
def test_no_large_leaf_of_a_3b_state_is_replicated(overrides, tower):
    config = configuration.load(ROOT / "configs" / "qwen2_5_3b.py", overrides)
    settings = step_config(config)
    modules = Modules(qwen2.Qwen2(QWEN_3B), e5.make_module(tower, "mean"), *make_optimizers(settings))
    policy, encoder = qwen2.abstract_params(QWEN_3B), e5.abstract_params(tower)
    state = jax.eval_shape(functools.partial(make_state, config, settings, modules), policy, encoder)
    moments = [leaf for leaf in jax.tree.leaves(state.policy_opt) if leaf.ndim]
    assert len(moments) == 2 * len(jax.tree.leaves(state.policy)) and (state.critic is not None) == bool(
        config.policy.algorithm == "ppo"
    )
    for shape in ((1, 8, 1), (2, 2, 2), (1, 4, 2), (1, 2, 4)):
        mesh = AbstractMesh(shape, meshes.AXES, axis_types=(AxisType.Auto,) * 3)
        both = meshes.common_units(QWEN_3B.units, tower.units)
        assert replicated(mesh, state, both) == set()
        assert replicated(mesh, policy, QWEN_3B.units) == set()
        assert replicated(mesh, encoder, tower.units) <= EXCEPTIONS


# A momentum is the first step's gradient, and lies like an optimiser's moments.
SCRIPT = """
import dataclasses, functools, sys
import jax, numpy as np, optax
sys.path.append(PATH)
import rollout_tiny as tiny
from test_bilevel import CONFIG, world
from tiny_world import cut
from bridge_jax.mesh import make_mesh, rollout_mesh, shard_tree, shardings
from bridge_jax.objectives.bilevel import init_state, policy_step
from bridge_jax.rollout import sampler as device
from bridge_jax.rollout.stopping import stop_table
from bridge_jax.training.batch import place
from bridge_jax.training.publish import Publisher, bytes_per_device

config = dataclasses.replace(CONFIG, trainable="full", grpo=dataclasses.replace(CONFIG.grpo, kl_coef=0.0))
modules, frozen, fresh, batch = world(config)
modules = dataclasses.replace(modules, policy_optimizer=optax.sgd(1e-2, momentum=0.9))
rollouts, units = cut(batch.rollouts, 8, 8), modules.policy.config.units
table = stop_table(tiny.word_tokenizer(), modules.policy.config.vocab_size)
policy, retriever, frozen = fresh().policy, fresh().retriever, frozen.replace(policy=None, encoder=None)


def stepped(modules, mesh):
    make = functools.partial(init_state, modules)
    abstract = jax.eval_shape(make, policy, retriever, jax.random.key(0))
    declared = None if mesh is None else shardings(mesh, abstract, units)
    state = jax.jit(make, out_shardings=declared)(policy, retriever, jax.random.key(0))
    step = jax.jit(functools.partial(policy_step, config, modules), donate_argnums=1, out_shardings=(declared, None))
    state, metrics = step(frozen, state, place(rollouts, mesh))
    first = jax.tree.map(np.asarray, state.policy_opt)
    state, _ = step(frozen, state, place(rollouts, mesh))
    assert step._cache_size() == 1
    for (path, x), where in zip(jax.tree_util.tree_leaves_with_path(state), jax.tree.leaves(declared)):
        assert x.sharding.is_equivalent_to(where, x.ndim), (path, x.sharding, where)
        assert not x.ndim or x.nbytes <= 4096 or x.sharding.shard_shape(x.shape) != x.shape, path
    return first, jax.device_get(metrics)


def sampled(model, params):
    sampler = device.Sampler(model, table, [])
    prompts = np.random.default_rng(0).integers(3, 64, (8, 6)).astype(np.int32)
    ids = np.arange(16, dtype=np.int32)
    arrays = prompts, np.full(8, 6, np.int32), np.arange(8, dtype=np.int32), ids, ids * 0 + 20
    state = sampler.start({"params": params}, *arrays, groups=8, prompt_width=8, width=32)
    state, tokens, logps, counts = sampler.decode_chunk({"params": params}, state, jax.random.key(1), 1.0, steps=16)
    return [np.asarray(tokens)[row, :n].tolist() for row, n in enumerate(np.asarray(counts))]


gradient, metrics = stepped(modules, None)
tokens = sampled(modules.policy, policy)
assert sum(map(len, tokens)) > 100 and metrics["policy/grad_norm"] > 0
for shape in ((1, 8, 1), (2, 2, 2), (1, 4, 2)):
    mesh = make_mesh(*shape)
    local = rollout_mesh(mesh, shape[2])
    found, measured = stepped(dataclasses.replace(modules, policy=modules.policy.clone(mesh=mesh)), mesh)
    for name, value in metrics.items():
        np.testing.assert_allclose(measured[name], value, rtol=1e-4, atol=1e-4, err_msg=name)
    for a, b in zip(jax.tree.leaves(gradient), jax.tree.leaves(found), strict=True):
        assert np.abs(a - b).max() < 1e-4 * max(np.abs(a).max(), 1e-3)

    published = Publisher(mesh, local, units)(shard_tree(mesh, policy, units))
    for path, x in jax.tree_util.tree_leaves_with_path(published):
        assert x.sharding.mesh == local
        np.testing.assert_array_equal(np.asarray(x), np.asarray(functools.reduce(lambda t, k: t[k.key], path, policy)))
    whole = sum(x.nbytes for x in jax.tree.leaves(policy))
    assert bytes_per_device(published) < whole if shape[2] > 1 else bytes_per_device(published) == whole
    if shape != (1, 4, 2):  # whose rollout mesh is that of (2, 2, 2)
        assert sampled(modules.policy.clone(mesh=local), published) == tokens
half = Publisher(mesh, local, units)(shard_tree(mesh, policy, units), np.dtype("bfloat16"))
assert half["embed"]["embedding"].dtype == "bfloat16" and half["norm"]["scale"].dtype == "float32"
print("equal")
"""


def test_eight_devices_in_three_meshes_equal_one():
    script = SCRIPT.replace("PATH", repr(str(ROOT / "tests" / "rollout")))
    done = run_on_devices(8, script, ROOT / "tests" / "objectives")
    assert done.stdout.strip().endswith("equal"), done.stderr[-3000:]
    assert "rematerialization" not in done.stderr
