"""Two-block attention against a plain softmax over concatenated keys with repeated heads."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bridge_jax.models.attention import attend, causal_mask

U, G, T, S, P, N, K, H = 2, 3, 4, 6, 5, 4, 2, 8
B = U * G


def naive(q, k, v, mask, shared_k, shared_v, shared_valid):
    """float64, one row and head at a time."""
    out = np.zeros(q.shape)
    for b in range(B):
        keys, values = np.concatenate([shared_k[b // G], k[b]]), np.concatenate([shared_v[b // G], v[b]])
        visible = np.concatenate([np.broadcast_to(shared_valid[b // G], (T, P)), mask[b]], axis=1)
        for n in range(N):
            logits = q[b, :, n].astype(np.float64) @ keys[:, n // (N // K)].T / np.sqrt(H)
            logits = np.where(visible, logits, -np.inf)
            weights = np.exp(logits - logits.max(-1, keepdims=True))
            out[b, :, n] = (weights / weights.sum(-1, keepdims=True)) @ values[:, n // (N // K)]
    return out


@pytest.fixture
def blocks():
    r = np.random.default_rng(0)
    f = lambda *shape: 2 * r.normal(size=shape).astype(np.float32)  # noqa: E731
    mask = r.random((B, T, S)) < 0.5
    mask[..., 0] = True
    valid = np.array([[True] * P, [True, False, True, False, False]])
    return f(B, T, N, H), f(B, S, K, H), f(B, S, K, H), mask, f(U, P, K, H), f(U, P, K, H), valid


def test_two_blocks_are_one_softmax(blocks):
    np.testing.assert_allclose(jax.jit(attend)(*blocks), naive(*blocks), atol=2e-6)


def test_large_logits_of_either_block_do_not_overflow(blocks):
    q, k, v, mask, shared_k, shared_v, valid = blocks
    for grow, grow_shared in ((60, 1), (1, 60)):
        out = attend(q, k * grow, v, mask, shared_k * grow_shared, shared_v, valid)
        want = naive(q, k * grow, v, mask, shared_k * grow_shared, shared_v, valid)
        np.testing.assert_allclose(out, want, atol=1e-4)


def test_invisible_columns_do_not_matter(blocks):
    q, k, v, mask, shared_k, shared_v, valid = blocks
    base = attend(*blocks)
    dirty = attend(
        q,
        np.where(mask.any(1)[..., None, None], k, 1e9),
        v,
        mask,
        np.where(valid[..., None, None], shared_k, -1e9),
        shared_v,
        valid,
    )
    np.testing.assert_array_equal(base, dirty)


def test_nothing_visible_is_finite_with_finite_gradients(blocks):
    q, k, v, mask, shared_k, shared_v, valid = blocks
    loss = lambda *x: attend(x[0], x[1], x[2], mask & False, x[3], x[4], valid & False).sum()  # noqa: E731
    value, grads = jax.value_and_grad(loss, argnums=(0, 1, 2, 3, 4))(q, k, v, shared_k, shared_v)
    assert np.isfinite(value) and all(np.isfinite(g).all() for g in grads)


def test_gradient_is_that_of_the_naive_softmax(blocks):
    q, k, v, mask, shared_k, shared_v, valid = blocks
    probe = np.random.default_rng(1).normal(size=(B, T, N, H)).astype(np.float32)

    def by_concatenation(q, k, v, shared_k, shared_v):
        keys, values = (
            jnp.repeat(jnp.concatenate([jnp.repeat(s, G, 0), x], 1), N // K, 2) for s, x in ((shared_k, k), (shared_v, v))
        )
        logits = jnp.einsum("btnh,bsnh->bnts", q, keys) / np.sqrt(H)
        visible = jnp.concatenate([jnp.broadcast_to(jnp.repeat(valid, G, 0)[:, None], (B, T, P)), mask], -1)
        return (jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(jnp.where(visible[:, None], logits, -jnp.inf)), values) * probe).sum()

    def ours(q, k, v, shared_k, shared_v):
        return (attend(q, k, v, mask, shared_k, shared_v, valid) * probe).sum()

    got, want = (jax.jit(jax.grad(f, argnums=range(5)))(q, k, v, shared_k, shared_v) for f in (ours, by_concatenation))
    for g, w in zip(got, want, strict=True):
        np.testing.assert_allclose(g, w, atol=2e-5)


def test_shared_keys_and_heads_are_never_repeated():
    """No intermediate of the computation, nor a copy in the compiled program, has the size of the shared block repeated."""
    group, columns = 16, 256
    shapes = (
        (group, 1, 4, 64),
        (group, 8, 1, 64),
        (group, 8, 1, 64),
        (group, 1, 8),
        (1, columns, 1, 64),
        (1, columns, 1, 64),
        (1, columns),
    )
    args = [jax.ShapeDtypeStruct(s, bool if i in (3, 6) else jnp.float32) for i, s in enumerate(shapes)]
    repeated = columns * 64 * 4  # one key/value head copied for its four query heads; by group it would be 16 times
    for equation in jax.make_jaxpr(attend)(*args).eqns:
        assert all(v.aval.size < repeated for v in equation.outvars), equation
    memory = jax.jit(attend).lower(*args).compile().memory_analysis()
    assert memory.temp_size_in_bytes < 4 * repeated


def test_causal_mask():
    mask = causal_mask(2, 4, jnp.array([[1, 1, 2, 2], [0, 0, 1, 1]]))
    want = [[1, 0, 0, 0], [1, 1, 0, 0], [0, 0, 1, 0], [0, 0, 1, 1]]
    np.testing.assert_array_equal(mask, np.array([want, want], bool))
    np.testing.assert_array_equal(causal_mask(2, 3), np.tril(np.ones((1, 3, 3), bool)))
