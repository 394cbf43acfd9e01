"""Chunked log-probabilities: same values and gradients as the direct form, a fraction of its memory."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bridge_jax.objectives.logprobs import token_logps


def direct(hidden, kernel, targets):
    logits = jax.nn.log_softmax((hidden @ kernel).astype(jnp.float32))
    logp = jnp.take_along_axis(logits, targets[..., None], -1)[..., 0]
    return logp, -(jnp.exp(logits) * logits).sum(-1)


def inputs(B=3, T=13, D=16, V=101):
    keys = jax.random.split(jax.random.key(0), 3)
    return jax.random.normal(keys[0], (B, T, D)), jax.random.normal(keys[1], (D, V)), jax.random.randint(keys[2], (B, T), 0, V)


@pytest.mark.parametrize("chunk", [1, 6, 12, 39, 4096])
def test_values_and_gradients(chunk):
    hidden, kernel, targets = inputs()
    weight = jax.random.normal(jax.random.key(1), targets.shape)

    def chunked(h, k):
        logp, entropy = token_logps(h, lambda x: x @ k, targets, chunk)
        return (logp * weight).sum(), (logp, entropy)

    (_, (logp, entropy)), grads = jax.value_and_grad(chunked, (0, 1), has_aux=True)(hidden, kernel)
    expected = direct(hidden, kernel, targets)
    np.testing.assert_allclose(logp, expected[0], atol=1e-5)
    np.testing.assert_allclose(entropy, expected[1], atol=1e-5)
    expected_grads = jax.grad(lambda h, k: (direct(h, k, targets)[0] * weight).sum(), (0, 1))(hidden, kernel)
    for got, want in zip(grads, expected_grads):
        np.testing.assert_allclose(got, want, atol=2e-5)


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
