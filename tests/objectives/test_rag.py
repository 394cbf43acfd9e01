"""The retriever's loss against its closed form and against a direct transcription of the formulas."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bridge_jax.objectives.rag import RetrieverLossConfig, responsibilities, retriever_loss, score_loss

U, C, D = 5, 8, 6


def inputs(seed=0):
    keys = jax.random.split(jax.random.key(seed), 4)
    queries = jax.random.normal(keys[0], (U, D))
    docs = jax.random.normal(keys[1], (U, C, D))
    likelihood = -jnp.abs(jax.random.normal(keys[2], (U, C))) * 4
    advantages = jnp.array([1.2, -0.8, 0.0, 0.0, 2.0])
    return queries, docs, likelihood, advantages, jnp.array([True, True, True, False, True])


@pytest.mark.parametrize("tau", [1.0, 0.05])
@pytest.mark.parametrize("gamma", [0.02, 1.0])
def test_closed_form_against_autograd(tau, gamma):
    queries, docs, likelihood, advantages, mask = inputs()
    scores = jnp.einsum("ud,ucd->uc", queries, docs)
    config = RetrieverLossConfig(tau=tau, gamma=gamma)
    grad = jax.grad(lambda s: score_loss(s, likelihood, advantages, mask, config)[0])(scores)
    p = np.exp(np.asarray(scores, np.float64) / tau)
    p /= p.sum(-1, keepdims=True)
    w = p * np.exp(np.asarray(likelihood, np.float64))
    w /= w.sum(-1, keepdims=True)
    expected = np.where(mask[:, None], -(np.asarray(advantages)[:, None] + gamma) * (w - p) / tau, 0.0)
    np.testing.assert_allclose(grad, expected, atol=2e-6 / tau)
    np.testing.assert_allclose((w - p).sum(-1), 0, atol=1e-12)
    np.testing.assert_allclose(np.asarray(grad).sum(-1), 0, atol=1e-5 / tau)
    log_p, weights = responsibilities(scores, likelihood, tau)
    np.testing.assert_allclose(jnp.exp(log_p), p, atol=1e-6)
    np.testing.assert_allclose(weights, w, atol=1e-6)


def test_value_is_the_formula():
    queries, docs, likelihood, advantages, mask = inputs()
    total, count, sums = retriever_loss(queries, docs, likelihood, advantages, mask, RetrieverLossConfig(gamma=0.3))
    expected = rag_total = 0.0
    for u in range(U):
        if not mask[u]:
            continue
        s = np.asarray(docs[u] @ queries[u], np.float64)
        log_p = s - np.log(np.exp(s).sum())
        joint = log_p + np.asarray(likelihood[u], np.float64)
        rag = -np.log(np.exp(joint).sum())
        w = np.exp(joint + rag)
        expected += -float(advantages[u]) * (w * log_p).sum() + 0.3 * rag
        rag_total += rag
    assert count == 4
    assert float(total) == pytest.approx(expected, rel=1e-5)
    assert float(sums["retriever/rag_nll"]) == pytest.approx(rag_total, rel=1e-5)
    assert sums["credit/zero_advantage_turns"] == 1  # the masked one does not count


def gradient(config, queries, docs, likelihood, advantages, mask):
    return jax.grad(lambda q: retriever_loss(q, docs, likelihood, advantages, mask, config)[0])(queries)


def test_a_zero_advantage_group_is_trained_by_gamma_rag_alone():
    queries, docs, likelihood, _, mask = inputs()
    both = gradient(RetrieverLossConfig(gamma=0.02), queries, docs, likelihood, jnp.zeros(U), mask)
    rag = gradient(RetrieverLossConfig(gamma=1.0, use_outcome=False), queries, docs, likelihood, jnp.zeros(U), mask)
    np.testing.assert_allclose(both, 0.02 * rag, atol=1e-8)
    assert np.abs(rag).max() > 1e-3
    outcome = gradient(RetrieverLossConfig(use_rag=False), queries, docs, likelihood, jnp.zeros(U), mask)
    assert not np.asarray(outcome).any()


def test_decoupled_terms_add_up_to_bridge():
    arrays = inputs()
    parts = [RetrieverLossConfig(gamma=0.4, use_rag=False), RetrieverLossConfig(gamma=0.4, use_outcome=False)]
    both = gradient(RetrieverLossConfig(gamma=0.4), *arrays)
    np.testing.assert_allclose(both, sum(gradient(part, *arrays) for part in parts), atol=1e-6)
    # decoupled_rag is A := 0
    zeroed = gradient(RetrieverLossConfig(gamma=0.4), *arrays[:3], jnp.zeros(U), arrays[4])
    np.testing.assert_allclose(gradient(parts[1], *arrays), zeroed, atol=1e-7)


def test_clamped_advantages():
    queries, docs, likelihood, advantages, mask = inputs()
    config = RetrieverLossConfig(clamp_negative=True)
    got = gradient(config, queries, docs, likelihood, advantages, mask)
    want = gradient(RetrieverLossConfig(), queries, docs, likelihood, jnp.maximum(advantages, 0), mask)
    np.testing.assert_array_equal(got, want)
    assert np.abs(got - gradient(RetrieverLossConfig(), queries, docs, likelihood, advantages, mask)).max() > 1e-3


def test_credit_for_the_shown_documents_only():
    queries, docs, likelihood, advantages, mask = inputs()
    scores = jnp.einsum("ud,ucd->uc", queries, docs)
    config = RetrieverLossConfig(gamma=0.02, credit_shown=3)
    grad = jax.grad(lambda s: score_loss(s, likelihood, advantages, mask, config)[0])(scores)
    log_p, w = (np.asarray(x) for x in responsibilities(scores, likelihood, 1.0))
    shown = np.where(np.arange(C) < 3, w, 0)
    shown /= shown.sum(-1, keepdims=True)
    p, A = np.exp(log_p), np.asarray(advantages)[:, None]
    np.testing.assert_allclose(grad, np.where(mask[:, None], -A * (shown - p) - 0.02 * (w - p), 0), atol=2e-6)
    everything = dataclasses.replace(config, credit_shown=C)
    np.testing.assert_allclose(gradient(everything, *inputs()), gradient(RetrieverLossConfig(gamma=0.02), *inputs()), atol=1e-6)


def test_padding_is_inert_even_when_it_is_not_a_number():
    queries, docs, likelihood, advantages, mask = inputs()
    want = retriever_loss(queries, docs, likelihood, advantages, mask, RetrieverLossConfig())
    want_grad = gradient(RetrieverLossConfig(), queries, docs, likelihood, advantages, mask)
    bad = (docs.at[3].set(0), likelihood.at[3].set(-jnp.inf), advantages.at[3].set(jnp.nan), mask)
    jax.tree.map(np.testing.assert_array_equal, want, retriever_loss(queries, *bad, RetrieverLossConfig()))
    np.testing.assert_array_equal(want_grad, gradient(RetrieverLossConfig(), queries, *bad))
    empty = retriever_loss(queries, docs, likelihood, advantages, jnp.zeros(U, bool), RetrieverLossConfig())
    assert all(float(x) == 0.0 for x in jax.tree.leaves(empty))


@pytest.mark.parametrize("config", [RetrieverLossConfig(), RetrieverLossConfig(credit_shown=3)])
def test_missing_candidates_are_as_if_absent(config):
    queries, docs, likelihood, advantages, mask = inputs()
    present = jnp.arange(C)[None] < jnp.array([8, 5, 6, 8, 4])[:, None]
    junk_docs, junk_l = jnp.where(present[..., None], docs, 7.0), jnp.where(present, likelihood, jnp.nan)
    grad = jax.grad(lambda q: retriever_loss(q, junk_docs, junk_l, advantages, mask, config, present)[0])(queries)
    total = 0.0
    for u, n in enumerate([8, 5, 6, 8, 4]):
        args = (docs[u : u + 1, :n], likelihood[u : u + 1, :n], advantages[u : u + 1], mask[u : u + 1], config)
        alone = jax.grad(lambda q, args=args: retriever_loss(q, *args)[0])(queries[u : u + 1])
        np.testing.assert_allclose(grad[u], alone[0], atol=1e-6)
        total += float(retriever_loss(queries[u : u + 1], *args)[0])
    got, _, sums = retriever_loss(queries, junk_docs, junk_l, advantages, mask, config, present)
    assert float(got) == pytest.approx(total, rel=1e-5)
    assert all(np.isfinite(x) for x in sums.values())


def test_the_anchor_pulls_towards_the_base_vector():
    """dL/dq gets - anchor f_0(q) on real turns and nothing on padding; without its weight the distance is only reported."""
    keys = jax.random.split(jax.random.key(5), 4)
    queries, base = (jax.random.normal(key, (4, 8)) for key in keys[:2])
    queries, base = (x / jnp.linalg.norm(x, axis=-1, keepdims=True) for x in (queries, base))
    docs, likelihood = jax.random.normal(keys[2], (4, 5, 8)), jax.random.normal(keys[3], (4, 5))
    advantages, mask = jnp.array([1.0, 0.0, -1.0, 2.0]), jnp.array([True, True, True, False])

    def loss(queries, anchor, base):
        config = RetrieverLossConfig(gamma=0.1, anchor=anchor)
        return retriever_loss(queries, docs, likelihood, advantages, mask, config, base_vectors=base)[0]

    free = jax.grad(loss)(queries, 0.0, None)
    np.testing.assert_array_equal(jax.grad(loss)(queries, 0.0, base), free)
    anchored = jax.grad(loss)(queries, 5.0, base.at[3].set(jnp.nan))
    np.testing.assert_allclose(anchored, free - jnp.where(mask[:, None], 5.0 * base, 0.0), atol=1e-6)
    config = RetrieverLossConfig(gamma=0.1, anchor=5.0)
    value, _, sums = retriever_loss(queries, docs, likelihood, advantages, mask, config, base_vectors=base)
    distance = float((1 - (queries * base).sum(-1))[:3].sum())
    assert float(sums["retriever/drift"]) == pytest.approx(distance, rel=1e-5)
    assert float(value) == pytest.approx(float(loss(queries, 0.0, None)) + 5.0 * distance, rel=1e-5)


def test_a_sharp_likelihood_moves_mass_where_p_is_flat():
    """The audited pattern: p nearly uniform, w on the favoured document."""
    scores = jnp.full((1, 40), 0.8) + 0.02 * jax.random.normal(jax.random.key(0), (1, 40))
    likelihood = jnp.full((1, 40), -9.0).at[0, 17].set(-3.0)
    log_p, w = responsibilities(scores, likelihood, 1.0)
    assert float(jnp.exp(log_p).max()) < 0.03
    assert int(w.argmax()) == 17
    assert float(w.max()) > 0.85


def divergence(scores, likelihood, tau, beta, how):
    """(KL [U], its gradient to the scores [U, C]) in float64, as the papers write them."""
    s, logs = np.asarray(scores, np.float64) / tau, np.asarray(likelihood, np.float64)
    p = np.exp(s - s.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    q = np.exp(np.exp(logs) / beta) if how == "replug" else np.exp(logs)
    q /= q.sum(-1, keepdims=True)
    if how == "replug":
        kl = (p * np.log(p / q)).sum(-1)
        return kl, p * (np.log(p / q) - kl[:, None]) / tau
    return (q * np.log(q / p)).sum(-1), (p - q) / tau


@pytest.mark.parametrize("how", ["replug", "replug_pdist"])
@pytest.mark.parametrize(("tau", "beta"), [(1.0, 0.1), (0.1, 0.5)])
def test_distillation_against_its_closed_form(how, tau, beta):
    queries, docs, likelihood, advantages, mask = inputs()
    likelihood = likelihood / 4  # answers of some probability: REPLUG's softmax is over those, not over their logarithms
    scores = jnp.einsum("ud,ucd->uc", queries, docs) / 4
    config = RetrieverLossConfig(tau=tau, use_outcome=False, use_rag=False, distil=how, likelihood_tau=beta)
    (total, sums), grad = jax.value_and_grad(
        lambda s: (lambda out: (out[0], out[2]))(score_loss(s, likelihood, advantages, mask, config)), has_aux=True
    )(scores)
    kl, expected = divergence(scores, likelihood, tau, beta, how)
    real = np.asarray(mask)
    assert float(total) == pytest.approx(kl[real].sum(), rel=1e-4) and kl.min() > 1e-3
    assert float(sums["retriever/distil_kl"]) == pytest.approx(float(total), rel=1e-6)
    np.testing.assert_allclose(grad, np.where(real[:, None], expected, 0), atol=1e-5 / tau)
    # The outcome does not enter, and a retriever that ranks as the language model does has nothing to learn.
    np.testing.assert_array_equal(jax.grad(lambda s: score_loss(s, likelihood, advantages * 0, mask, config)[0])(scores), grad)
    done = tau * (jnp.exp(likelihood) / beta if how == "replug" else likelihood)
    settled = score_loss(done, likelihood, advantages, mask, config)
    assert float(settled[0]) == pytest.approx(0, abs=1e-5)


@pytest.mark.parametrize("how", ["replug", "replug_pdist"])
def test_distillation_leaves_out_what_is_no_candidate(how):
    queries, docs, likelihood, advantages, mask = inputs()
    present = jnp.arange(C)[None] < jnp.array([8, 5, 6, 8, 1])[:, None]
    config = RetrieverLossConfig(use_outcome=False, use_rag=False, distil=how)
    junk = jnp.where(present, likelihood, jnp.nan), jnp.where(present[..., None], docs, 7.0)

    def loss(queries, docs, likelihood, rows=slice(None), doc_mask=None):
        return retriever_loss(queries[rows], docs[rows], likelihood[rows], advantages[rows], mask[rows], config, doc_mask)[0]

    grad = jax.grad(loss)(queries, junk[1], junk[0], doc_mask=present)
    for u, n in enumerate([8, 5, 6, 8, 1]):
        alone = jax.grad(loss)(queries, docs[:, :n], likelihood[:, :n], slice(u, u + 1))
        np.testing.assert_allclose(grad[u], alone[u], atol=1e-6)
    assert np.abs(grad).max() > 1e-3 and not np.asarray(grad[3]).any()


def test_bad_options_are_refused():
    with pytest.raises(ValueError, match="likelihood_tau"):
        RetrieverLossConfig(likelihood_tau=0.0)
    with pytest.raises(ValueError, match="distil 'kl'"):
        RetrieverLossConfig(distil="kl")
    with pytest.raises(ValueError, match="tau"):
        RetrieverLossConfig(tau=0.0)
    with pytest.raises(ValueError, match="switch the retriever update off"):
        RetrieverLossConfig(use_outcome=False, use_rag=False)
