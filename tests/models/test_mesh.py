"""Meshes: rules, fall-backs, and the same numbers on 8 virtual devices as on one."""

from pathlib import Path

import jax
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P
from virtual_devices import run_on_devices

from bridge_jax import mesh as meshes
from bridge_jax.errors import UserError
from bridge_jax.training.publish import publish_mesh


def abstract(data, fsdp, tensor):
    return AbstractMesh((data, fsdp, tensor), meshes.AXES, axis_types=(AxisType.Auto,) * 3)


def test_rules():
    mesh = abstract(2, 4, 2)
    spec = lambda path, shape, **kw: meshes.param_sharding(mesh, tuple(path.split("/")), shape, **kw).spec  # noqa: E731
    assert spec("embed/embedding", (151936, 896)) == P(("fsdp", "tensor"), None)
    assert spec("layers/q_proj/kernel", (24, 896, 896)) == P(None, "fsdp", "tensor")
    assert spec("layers/q_proj/bias", (24, 896)) == P(None, "tensor")
    assert spec("layers/o_proj/kernel", (24, 896, 896)) == P(None, "tensor", "fsdp")
    assert spec("lm_head/kernel", (896, 151936)) == P(None, ("fsdp", "tensor"))
    assert spec("layers/input_norm/scale", (24, 896)) == P(None, None)
    assert spec("layers/q_proj/a", (24, 896, 16)) == P(None, ("fsdp", "tensor"), None)
    assert spec("layers/q_proj/b", (24, 16, 896)) == P(None, None, ("tensor", "fsdp"))
    assert spec("layers/q_proj/b", (24, 16, 896), units={"q_proj": 7}) == P(None, None, "fsdp")  # heads are not split
    assert spec("layers/o_proj/a", (24, 896, 16)) == P(None, ("tensor", "fsdp"), None)
    assert spec("head/kernel", (896,)) == P(None)
    # Two models in one tree: a way that splits the heads of both.
    units = meshes.common_units({"q_proj": 28, "k_proj": 4}, {"q_proj": 16, "k_proj": 8, "query": 12})
    assert units == {"q_proj": 4, "k_proj": 4, "query": 12}
    # An optimiser's moments are where their parameter is, whatever they hang on.
    assert spec("policy_opt/1/0/mu/layers/up_proj/kernel", (24, 896, 4864)) == P(None, "fsdp", "tensor")


class Chip:
    """As much of a device as a mesh asks for."""

    def __init__(self, number, host):
        self.id, self.process_index = number, host
        self.platform, self.device_kind = "cpu", "cpu"

    def __repr__(self):
        return f"Chip({self.id})"


def test_devices_of_a_process_stand_together_and_are_its_rollout_mesh():
    chips = [Chip(number, host) for number, host in enumerate((0, 1, 0, 1, 1, 0, 1, 0))]
    mesh = meshes.make_mesh(fsdp=4, tensor=2, devices=chips)
    assert [chip.process_index for chip in mesh.devices.flat] == [0] * 4 + [1] * 4
    for host in (0, 1):
        local = meshes.rollout_mesh(mesh, 2, host)
        assert dict(local.shape) == {"data": 2, "fsdp": 1, "tensor": 2}
        assert list(local.devices.flat) == list(mesh.devices.flat)[4 * host : 4 * host + 4]
    both = publish_mesh(mesh, meshes.rollout_mesh(mesh, 2, 0))
    assert dict(both.shape) == {"process": 2, "data": 2, "fsdp": 1, "tensor": 2}
    assert list(both.devices.flat) == list(mesh.devices.flat)
    with pytest.raises(UserError, match="rollout_tensor=3: does not divide the 4 devices of a process"):
        meshes.rollout_mesh(mesh, 3, 0)
    with pytest.raises(UserError, match="there is one device"):
        meshes.rollout_mesh(None, 2)
    alone = meshes.make_mesh(devices=[Chip(0, 0), Chip(1, 1)])
    assert meshes.rollout_mesh(alone, 1, 1) is None  # a process of one device plays without a mesh


def test_what_does_not_divide_is_replicated_and_said_once(caplog):
    mesh = abstract(1, 3, 4)
    meshes._said.clear()
    units = {"k_proj": 2}
    for _ in range(2):  # 2 heads of 64 columns over 4 devices: the columns divide, the heads do not
        assert meshes.param_sharding(mesh, ("layers", "k_proj", "kernel"), (24, 900, 128), units).spec == P(None, "fsdp", None)
    assert [r.message for r in caplog.records] == [
        "layers/k_proj/kernel: 2 heads cannot be split 4 ways over tensor; replicated there"
    ]
    assert meshes.param_sharding(mesh, ("layers", "up_proj", "kernel"), (24, 896, 128)).spec == P(None, None, "tensor")
    assert "size 896 cannot be split 3 ways over fsdp" in caplog.records[-1].message


def test_sizes():
    devices = jax.devices()[:1]
    assert dict(meshes.make_mesh(devices=devices).shape) == {"data": 1, "fsdp": 1, "tensor": 1}
    for bad in ({"data": 2}, {"data": -1}, {"tensor": 0}, {"fsdp": 3}):
        with pytest.raises(UserError, match="mesh"):
            meshes.make_mesh(devices=devices, **bad)


def test_without_a_mesh():
    x = np.ones(3)
    assert meshes.shard_tree(None, x) is x and meshes.constrain(x, None, P("data")) is x


PROGRAM = """
import sys
import jax, jax.numpy as jnp, numpy as np, optax
from jax.sharding import NamedSharding, PartitionSpec as P
from bridge_jax.mesh import batch_sharding, make_mesh, shard_tree
from bridge_jax.models import lora, qwen2
from bridge_jax.models.cache import KVBlock

folder, out = sys.argv[1:]
assert jax.device_count() == 8
tokens = np.random.default_rng(0).integers(1, 97, (8, 12))
config = lora.LoRAConfig(4, 8.0)

def loss(params, adapter, tokens, model):
    logits = model.apply({"params": params, "lora": adapter}, tokens)
    return optax.softmax_cross_entropy_with_integer_labels(logits[:, :-1], tokens[:, 1:]).mean()

def decode(params, tokens, model):
    prompts, cache = model.apply({"params": params}, tokens[::4, :6], private=KVBlock.empty(model.config, 2, 6), write_at=0)
    return model.apply({"params": params}, tokens[:, 6:], shared=cache, private=KVBlock.empty(model.config, 8, 8), write_at=1)[0]

def everything(mesh):
    model, params = qwen2.load(folder, mesh=mesh, lora=config, remat=True)
    adapter = lora.init_lora(jax.random.key(0), params, config)
    adapter = jax.tree.map(lambda x: x + 0.1, shard_tree(mesh, adapter))
    batch = tokens if mesh is None else jax.device_put(tokens, batch_sharding(mesh))
    grads = jax.jit(jax.grad(loss, argnums=(0, 1)), static_argnums=3)(params, adapter, batch, model)
    if mesh is not None:
        for leaf, grad in zip(jax.tree.leaves(params), jax.tree.leaves(grads[0])):
            assert len(leaf.sharding.device_set) == 8
        qwen2.save(out, model, params)
        saved = qwen2.load(out)[1]
        jax.tree.map(lambda a, b: np.testing.assert_array_equal(np.asarray(a), np.asarray(b)), params, saved)
    return params, grads, jax.jit(decode, static_argnums=2)(params, batch, model)

want = everything(None)
for shape in ({"data": 2, "fsdp": 2, "tensor": 2}, {"tensor": 4, "fsdp": 2}):
    got = everything(make_mesh(**shape))
    up = got[0]["layers"]["up_proj"]["kernel"]
    assert up.sharding.spec == P(None, "fsdp", "tensor")
    assert up.addressable_shards[0].data.size == up.size // (shape["fsdp"] * shape["tensor"])
    jax.tree.map(lambda a, b: np.testing.assert_allclose(np.asarray(a), np.asarray(b), atol=3e-5), want, got)
print("parity")
"""


@pytest.mark.parametrize("kind", ["untied"])
def test_eight_devices_compute_the_same(kind, tmp_path, tiny_model):
    model = tiny_model(kind)
    model.save_pretrained(tmp_path / "model")
    done = run_on_devices(8, PROGRAM, Path(__file__).parent, str(tmp_path / "model"), str(tmp_path / "out"))
    assert done.returncode == 0 and "parity" in done.stdout, done.stderr[-3000:]
    assert "k_proj/kernel: 2 heads cannot be split 4 ways" in done.stderr
