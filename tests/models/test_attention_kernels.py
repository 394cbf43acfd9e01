"""Attention backends against a plain softmax over repeated heads; the kernels' programs for TPU and GPU without either."""

import functools
import importlib.util
import math
import os
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from virtual_devices import run_on_devices

from bridge_jax import config as configuration
from bridge_jax.errors import UserError
from bridge_jax.mesh import batch_sharding, make_mesh, param_sharding, tree_path
from bridge_jax.models import attention_kernels
from bridge_jax.models.attention_kernels import attend_sequences, choose_backend, cudnn_attend, splash_attend, splash_block
from bridge_jax.models.cache import KVBlock
from bridge_jax.models.qwen2 import Qwen2, Qwen2Config, abstract_params
from bridge_jax.training import assets

B, T, N, K, H = 2, 205, 6, 2, 8  # three query heads read one key/value head; T is odd and no multiple of a block
BACKENDS = {
    "xla": jax.jit(attend_sequences),
    "cudnn": jax.jit(functools.partial(cudnn_attend, implementation="xla")),
    "splash": jax.jit(functools.partial(splash_attend, interpret=True)),
}


def packed(lengths, length=T):
    """One row of segment ids 1, 2, ..., then padding."""
    ids = np.repeat(np.arange(1, len(lengths) + 1), lengths)
    return np.pad(ids, (0, length - len(ids))).astype(np.int32)


SEGMENTS = np.stack([packed([70, 1, 90]), packed([T])])


@pytest.fixture(scope="module")
def qkv():
    r = np.random.default_rng(0)
    return tuple(2 * r.normal(size=(B, T, heads, H)).astype(np.float32) for heads in (N, K, K))


def naive(q, k, v, segments):
    k, v = (jnp.repeat(x, q.shape[2] // x.shape[2], 2) for x in (k, v))
    logits = jnp.einsum("btnh,bsnh->bnts", q, k, precision="highest") / math.sqrt(q.shape[-1])
    seen = np.tril(np.ones(logits.shape[-2:], bool))
    if segments is not None:
        seen = seen & (segments[:, None, :, None] == segments[:, None, None, :])
    return jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(jnp.where(seen, logits, -jnp.inf)), v, precision="highest")


def with_gradients(attend, q, k, v, segments):
    """Output, and the gradients of a random combination of its entries."""
    probe = np.random.default_rng(1).normal(size=q.shape).astype(np.float32)

    def total(q, k, v):
        out = attend(q, k, v, segments)
        return (out * probe).sum(), out

    (_, out), gradients = jax.jit(jax.value_and_grad(total, argnums=(0, 1, 2), has_aux=True))(q, k, v)
    return out, *gradients


@pytest.mark.parametrize("segments", [SEGMENTS, None], ids=["packed", "whole"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_output_and_gradients_are_those_of_a_plain_softmax(qkv, backend, segments):
    got, want = (with_gradients(f, *qkv, segments) for f in (BACKENDS[backend], naive))
    for g, w in zip(got, want, strict=True):
        np.testing.assert_allclose(g, w, atol=3e-5)


@pytest.mark.parametrize("backend", BACKENDS)
def test_rollouts_of_one_row_do_not_see_each_other(qkv, backend):
    q, k, v = qkv
    inside = (SEGMENTS == 1)[..., None, None]
    base, dirty = (BACKENDS[backend](*x, SEGMENTS) for x in (qkv, [np.where(inside, x, 100 * x) for x in qkv]))
    np.testing.assert_array_equal(np.where(inside, base, 0), np.where(inside, dirty, 0))
    alone = BACKENDS[backend](q[:1, 71:161], k[:1, 71:161], v[:1, 71:161], None)  # the third segment of row 0, in a row of its own
    np.testing.assert_allclose(base[0, 71:161], alone[0], atol=1e-5)


@pytest.mark.parametrize("backend", BACKENDS)
def test_padding_is_finite(qkv, backend):
    empty = np.zeros((B, T), np.int32)
    assert all(np.isfinite(x).all() for x in with_gradients(BACKENDS[backend], *qkv, empty))


def test_block_rule():
    assert [splash_block(n) for n in (128, 256, 384, 512, 640, 8192)] == [128, 256, 128, 512, 128, 512]


# The programs, for hardware that is not here.


def lowered(attend, platform, dim, segments=True):
    args = [jax.ShapeDtypeStruct((2, 1024, heads, dim), jnp.bfloat16) for heads in (4, 2, 2)]
    ids = jax.ShapeDtypeStruct((2, 1024), jnp.int32) if segments else None
    gradient = jax.jit(jax.grad(lambda *x: attend(*x).astype(jnp.float32).sum(), argnums=(0, 1, 2)))
    return gradient.trace(*args, ids).lower(lowering_platforms=(platform,)).as_text()


@pytest.mark.parametrize("dim", [64, 128])
def test_splash_becomes_three_tpu_kernels_without_logits_in_memory(dim):
    text = lowered(splash_attend, "tpu", dim)
    for phase in ("fwd", "dq", "dkv"):
        assert f"splash_mha_{phase}_segmented" in text
    assert text.count("@tpu_custom_call") == 3
    assert "1024x1024" not in text


@pytest.mark.parametrize("segments", [True, False])
def test_cudnn_becomes_its_two_calls(monkeypatch, segments):
    from jax._src.cudnn import fused_attention_stablehlo

    monkeypatch.setattr(fused_attention_stablehlo, "check_cudnn_version", lambda: 91000)  # the library is not here
    text = lowered(cudnn_attend, "cuda", 64, segments)
    call = "@__cudnn$fmhaScaleBiasSoftmax" if segments else "@__cudnn$fmhaSoftmax"
    assert f"{call}(" in text and f"{call}Backward(" in text
    assert "2x4x1024x1024" not in text  # logits of every head
    assert ("2x1x1024x1024xbf16" in text) == segments  # the one mask


def v5e():
    if importlib.util.find_spec("libtpu") is None:
        pytest.skip("needs libtpu (the tpu extra)")
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    from jax.experimental import topologies

    return topologies.get_topology_desc(platform="tpu", topology_name="v5e:2x2").devices


def test_a_sharded_training_step_compiles_for_tpus():
    mesh = make_mesh(fsdp=2, tensor=2, devices=v5e())
    config = Qwen2Config(512, 256, 512, 2, 4, 2, 64)
    model = Qwen2(config, jnp.bfloat16, remat=True, mesh=mesh, attention="splash")

    def place(path, x):
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=param_sharding(mesh, tree_path(path), x.shape, config.units))

    def loss(params, tokens, ids):
        return jnp.square(model.apply({"params": params}, tokens, segment_ids=ids, output="hidden").astype(jnp.float32)).mean()

    params = jax.tree_util.tree_map_with_path(place, abstract_params(config))
    tokens = jax.ShapeDtypeStruct((4, 2048), jnp.int32, sharding=batch_sharding(mesh))
    memory = jax.jit(jax.value_and_grad(loss)).lower(params, tokens, tokens).compile().memory_analysis()
    assert memory.temp_size_in_bytes < 2 * 2 * 2048 * 2048 * 4  # a device's logits: two rows, two heads


# In the model.


TINY = Qwen2Config(97, 32, 48, 2, 4, 2, 8, tie_embeddings=True)


@pytest.fixture(scope="module")
def params():
    return jax.jit(Qwen2(TINY).init)(jax.random.key(0), jnp.zeros((1, 2), jnp.int32))["params"]


def test_model_runs_whole_sequences_through_its_backend(params):
    tokens = np.random.default_rng(0).integers(1, 97, (2, 40))
    segments = np.stack([packed([11, 20], 40), packed([40], 40)])
    for given in ({"segment_ids": segments}, {}):
        want, got = (jax.jit(Qwen2(TINY, attention=x).apply)({"params": params}, tokens, **given) for x in ("xla", "splash"))
        real = segments > 0
        np.testing.assert_allclose(got[real], want[real], atol=2e-5)


def test_caches_and_blocks_stay_on_xla(params, monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError("a kernel")

    monkeypatch.setattr(attention_kernels, "splash_attend", refuse)
    model, tokens = Qwen2(TINY, attention="splash"), jnp.ones((2, 6), jnp.int32)

    def run(**given):
        static = {"output": given.pop("output", "logits")}
        return jax.eval_shape(lambda given: model.apply({"params": params}, tokens, **given, **static), given)

    private = {"private": KVBlock.empty(TINY, 2, 6), "write_at": jnp.int32(0)}
    shared = run(output="block")
    run(shared=shared)
    run(**private)
    run(shared=shared, **private)
    with pytest.raises(AssertionError, match="a kernel"):
        run()


PROGRAM = """
import jax, jax.numpy as jnp, numpy as np, optax
from bridge_jax.mesh import batch_sharding, make_mesh, shard_tree
from bridge_jax.models import attention_kernels
from bridge_jax.models.attention_kernels import attend_sequences
from bridge_jax.models.qwen2 import Qwen2, Qwen2Config

assert jax.device_count() == 4
r = np.random.default_rng(0)
ids = np.repeat([[1, 2, 0]], 4, 0).repeat([50, 60, 20], 1).astype(np.int32)
close = lambda a, b: np.testing.assert_allclose(np.asarray(a), np.asarray(b), atol=3e-5)

# Query over key/value heads: 8 over 2, 4 ways (two devices read one key/value head), 6 over 3, 2 ways (the heads of one are split),
# 3 over 1 (no head divides); 3 rows do not divide. The training step below has 4 over 2, 2 ways (both divide).
for rows, heads, kv_heads, shape in ((4, 8, 2, (1, 4)), (4, 6, 3, (2, 2)), (3, 3, 1, (2, 2))):
    mesh = make_mesh(fsdp=shape[0], tensor=shape[1])
    qkv = [r.normal(size=(rows, 130, n, 8)).astype(np.float32) for n in (heads, kv_heads, kv_heads)]
    probe = r.normal(size=qkv[0].shape).astype(np.float32)
    def total(q, k, v, backend, mesh):
        out = attend_sequences(q, k, v, ids[:rows], backend, mesh)
        return (out * probe).sum(), out
    run = jax.jit(jax.value_and_grad(total, argnums=(0, 1, 2), has_aux=True), static_argnums=(3, 4))
    (_, want), gradients = run(*qkv, "xla", None)
    (_, got), sharded = run(*qkv, "splash", mesh)
    assert got.sharding.spec[2:3] == (("tensor",) if heads % shape[1] == 0 else ()), got.sharding
    jax.tree.map(close, (want, gradients), (got, sharded))

# A training step: packed rows, scan over layers, rematerialised, two key/value heads over two devices.
mesh = make_mesh(fsdp=2, tensor=2)
config = Qwen2Config(96, 32, 48, 2, 4, 2, 8)
params = jax.jit(Qwen2(config).init)(jax.random.key(0), np.zeros((1, 2), np.int32))["params"]
tokens = r.integers(1, 96, ids.shape)
def loss(params, tokens, ids, model):
    logits = model.apply({"params": params}, tokens, segment_ids=ids)[:, :-1]
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])
    return losses.mean(where=(ids[:, 1:] > 0) & (ids[:, 1:] == ids[:, :-1]))
step = jax.jit(jax.value_and_grad(loss), static_argnums=3)
want = step(params, tokens, ids, Qwen2(config))
model = Qwen2(config, remat=True, mesh=mesh, attention="splash")
placed = shard_tree(mesh, params, config.units)
batch = [jax.device_put(x, batch_sharding(mesh)) for x in (tokens, ids)]
got = step(placed, *batch, model)
jax.tree.map(close, want, got)

# The same step's program for TPUs: forward, forward again, two backward kernels, in the bodies of two scans.
attention_kernels._platform = lambda mesh: "tpu"
step = jax.jit(jax.value_and_grad(lambda *x: loss(*x, model)))
text = step.trace(placed, *batch).lower(lowering_platforms=("tpu",)).as_text()
assert text.count("@tpu_custom_call") == 4, text.count("@tpu_custom_call")
print("parity")
"""


def test_four_devices_compute_the_same():
    done = run_on_devices(4, PROGRAM, Path(__file__).parent)
    assert done.returncode == 0 and "parity" in done.stdout, done.stderr[-3000:]


# The choice.


CPU, TPU = SimpleNamespace(platform="cpu"), SimpleNamespace(platform="tpu")


def gpu(capability):
    return SimpleNamespace(platform="gpu", compute_capability=capability)


def test_choice():
    assert {choose_backend("auto", device, jnp.bfloat16, 128) for device in (CPU, TPU, gpu("9.0"))} == {"xla"}
    assert choose_backend("xla", CPU, jnp.float32, 12) == "xla"
    assert choose_backend("splash", TPU, jnp.float32, 64) == "splash"
    assert choose_backend("cudnn", gpu("10.0"), jnp.bfloat16, 128) == "cudnn"


@pytest.mark.parametrize(
    ("choice", "why"),
    [
        (("splash", CPU, jnp.bfloat16, 64), "TPU kernel, and this is cpu"),
        (("splash", gpu("9.0"), jnp.bfloat16, 64), "TPU kernel, and this is gpu"),
        (("splash", TPU, jnp.bfloat16, 12), "multiple of 8 columns, and this model's have 12"),
        (("cudnn", TPU, jnp.bfloat16, 64), "needs an NVIDIA GPU .* this is tpu"),
        (("cudnn", gpu("7.5"), jnp.bfloat16, 64), "8.0 or later, and this is gpu 7.5"),
        (("cudnn", gpu("gfx90a"), jnp.bfloat16, 64), "NVIDIA"),
        (("cudnn", gpu("9.0"), jnp.float32, 64), "not in float32: set config.policy.compute_dtype=bfloat16"),
        (("cudnn", gpu("9.0"), jnp.bfloat16, 256), "at most 128 columns, and this model's have 256"),
    ],
)
def test_wrong_choice_names_field_and_mend(choice, why):
    with pytest.raises(UserError, match=why) as error:
        choose_backend(*choice)
    assert str(error.value).startswith(f"config.policy.attention={choice[0]}: ")
    assert "config.policy.attention=auto" in str(error.value)


def test_a_run_refuses_before_it_loads_weights(tmp_path, monkeypatch):
    monkeypatch.setattr(assets.qwen2, "load", None)
    config = configuration.load(Path(__file__).parents[2] / "configs" / "mini.py", ["policy.attention=cudnn"])
    with pytest.raises(UserError, match=r"config\.policy\.attention=cudnn: needs an NVIDIA GPU"):
        assets.load_assets(config, tmp_path)


def test_config_knows_the_backends():
    c = configuration.default()
    for name in ("auto", "xla", "cudnn", "splash"):
        c.policy.attention = name
        configuration.validate(c)
    c.policy.attention = "flash"
    with pytest.raises(UserError, match=r"config.policy.attention='flash'.*splash"):
        configuration.validate(c)
