"""Chunked log-probabilities: same values and gradients as the direct form, a fraction of its memory."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from virtual_devices import run_on_devices

from bridge_jax.objectives import logprobs
from bridge_jax.objectives.logprobs import steps_of, token_logps


def direct(hidden, kernel, targets):
    logits = jax.nn.log_softmax((hidden @ kernel).astype(jnp.float32))
    logp = jnp.take_along_axis(logits, targets[..., None], -1)[..., 0]
    return logp, -(jnp.exp(logits) * logits).sum(-1)


def inputs(B=3, T=13, D=16, V=101):
    keys = jax.random.split(jax.random.key(0), 3)
    return jax.random.normal(keys[0], (B, T, D)), jax.random.normal(keys[1], (D, V)), jax.random.randint(keys[2], (B, T), 0, V)


IN_COLUMNS = [(3, 1, 1), (3, 6, 1), (3, 12, 1), (3, 39, 1), (3, 4096, 1)]
IN_ROWS = [(12, 5, 1), (12, 9, 2)]


@pytest.mark.parametrize(("B", "chunk", "ways"), IN_COLUMNS + IN_ROWS)
def test_values_and_gradients(B, chunk, ways):
    hidden, kernel, targets = inputs(B)
    weight = jax.random.normal(jax.random.key(1), targets.shape)

    def chunked(h, k):
        logp, entropy = token_logps(h, lambda x: x @ k, targets, chunk, ways)
        return (logp * weight).sum(), (logp, entropy)

    (_, (logp, entropy)), grads = jax.value_and_grad(chunked, (0, 1), has_aux=True)(hidden, kernel)
    expected = direct(hidden, kernel, targets)
    np.testing.assert_allclose(logp, expected[0], atol=1e-5)
    np.testing.assert_allclose(entropy, expected[1], atol=1e-5)
    expected_grads = jax.grad(lambda h, k: (direct(h, k, targets)[0] * weight).sum(), (0, 1))(hidden, kernel)
    for got, want in zip(grads, expected_grads):
        np.testing.assert_allclose(got, want, atol=4e-5)


def test_steps_are_few_and_equal():
    assert [steps_of(12, most) for most in (0, 1, 2, 5, 6, 11, 12, 99)] == [12, 12, 6, 3, 2, 2, 1, 1]
    assert steps_of(7, 5) == 7 and steps_of(1, 0) == 1


SHAPES = [(3, 50, 30, 1), (96, 5, 30, 1), (1000, 3, 4096, 1), (96, 5, 30, 8), (64, 2, 16, 32)]


@pytest.mark.parametrize(("B", "T", "chunk", "ways"), SHAPES)
def test_logits_at_once(monkeypatch, B, T, chunk, ways):
    """No more than `chunk` tokens and `LOGITS` logits a device, unless a row already is more."""
    monkeypatch.setattr(logprobs, "LOGITS", 64 * 101)
    seen = []
    hidden, kernel, targets = inputs(B, T)
    jax.eval_shape(lambda h: token_logps(h, lambda x: seen.append(x.shape) or x @ kernel, targets, chunk, ways), hidden)
    rows, columns, _ = seen[-1]
    assert rows * columns <= min(chunk, 64) * ways and rows % ways == 0
    assert rows * columns >= min(min(chunk, 64) * ways // 4, B * T)  # nor needlessly few


SHARDED = """
import jax, numpy as np
from bridge_jax.mesh import batch_sharding, make_mesh
from bridge_jax.objectives.logprobs import token_logps

mesh = make_mesh(data=2, fsdp=2, tensor=1)
keys = jax.random.split(jax.random.key(0), 3)
hidden, kernel = jax.random.normal(keys[0], (96, 5, 16)), jax.random.normal(keys[1], (16, 3001))
targets = jax.random.randint(keys[2], (96, 5), 0, 3001)
fn = jax.jit(lambda h, k, t, ways, mesh=None: token_logps(h, lambda x: x @ k, t, 8, ways, mesh)[0], static_argnums=(3, 4))
placed = [jax.device_put(x, batch_sharding(mesh)) for x in (hidden, targets)]
compiled = fn.lower(placed[0], kernel, placed[1], 4).compile()
text = compiled.as_text()
assert "all-gather" not in text and "all-to-all" not in text and "collective-permute" not in text, "rows moved between devices"
assert "f32[8,1,3001]" in text, "a device has its share of the 32 rows of a step"
want = fn(hidden, kernel, targets, 1)
np.testing.assert_allclose(compiled(placed[0], kernel, placed[1]), want, atol=1e-5)

# Where the vocabulary divides over fsdp: half of it on a device, for the 16 rows of its data half; kernel and gradient stay split.
kernel = kernel[:, :3000]
want = fn(hidden, kernel, targets, 1)
split = jax.device_put(kernel, jax.NamedSharding(mesh, jax.P(None, ("fsdp", "tensor"))))
compiled = fn.lower(placed[0], split, placed[1], 4, mesh).compile()
assert "f32[16,1,1500]" in compiled.as_text()
np.testing.assert_allclose(compiled(placed[0], split, placed[1]), want, atol=1e-5)
total = lambda k, *given: fn(given[0], k, *given[1:]).sum()
gradient = jax.jit(jax.grad(total), static_argnums=(3, 4), out_shardings=split.sharding)
text = gradient.lower(split, placed[0], placed[1], 4, mesh).compile().as_text()
assert "f32[16,3000]" not in text, "the kernel, or its gradient, is whole on a device"
got, want = gradient(split, placed[0], placed[1], 4, mesh), jax.grad(total)(kernel, hidden, targets, 1)
np.testing.assert_allclose(got, want, atol=1e-4)
"""


def test_rows_split_over_devices_stay_there():
    done = run_on_devices(4, SHARDED, Path(__file__).parent)
    assert done.returncode == 0, done.stderr


def test_entropy_is_only_a_metric():
    hidden, kernel, targets = inputs()
    grad = jax.grad(lambda h: token_logps(h, lambda x: x @ kernel, targets, 8)[1].sum())(hidden)
    assert not np.asarray(grad).any()


def test_memory_is_that_of_a_chunk():
    B, T, D, V = 2, 256, 8, 20_000
    shapes = [jax.ShapeDtypeStruct(*x) for x in (((B, T, D), jnp.float32), ((D, V), jnp.float32), ((B, T), jnp.int32))]

    def temporaries(fn):
        return jax.jit(jax.grad(fn, (0, 1))).lower(*shapes).compile().memory_analysis().temp_size_in_bytes

    chunked = temporaries(lambda h, k, t: token_logps(h, lambda x: x @ k, t, 32)[0].sum())
    whole = temporaries(lambda h, k, t: direct(h, k, t)[0].sum())
    assert whole >= B * T * V * 4  # the direct form does build [B, T, V]
    assert chunked < B * T * V * 4 / 4
