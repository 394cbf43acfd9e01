"""The RAG terms of the policy's gradient against autograd and finite differences of L_RAG itself, written with full forwards."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from rounding import SPREAD
from tiny_world import cut, make_batch, make_encoder, make_policy, nudged

from bridge_jax.objectives import two_state
from bridge_jax.objectives.bilevel import (
    Frozen,
    Modules,
    OptimizerConfig,
    StepConfig,
    init_state,
    make_optimizers,
    policy_update,
    retriever_step,
)
from bridge_jax.objectives.credit import document_log_likelihood
from bridge_jax.objectives.grpo import GRPOConfig
from bridge_jax.objectives.rag import RetrieverLossConfig

GAMMA, TAU = 0.3, 0.5
U, C, K, P, T = 4, 6, 2, 7, 6
CONFIG = StepConfig(
    grpo=GRPOConfig(kl_coef=0.0),
    policy_optimizer=OptimizerConfig(lr=1e-2),
    retriever=RetrieverLossConfig(gamma=GAMMA, tau=TAU),
    retriever_optimizer=OptimizerConfig(lr=1e-2),
    turn_minibatch=2,
    estimator="two_state",
)


@functools.cache
def scoring_arrays():
    """U turns of C documents with K targets each, of which one turn has a single one."""
    rng = np.random.default_rng(3)
    valid = np.arange(P) < rng.integers(4, P + 1, U)[:, None]
    lengths = rng.integers(4, T + 1, (U, C * K))
    column = np.arange(T)
    continuation_valid = column < lengths[..., None]
    answer = continuation_valid & (column >= 2)
    continuation_valid[1, 1::2] = answer[1, 1::2] = False
    return {
        "history": rng.integers(1, 64, (U, P)).astype(np.int32),
        "history_valid": valid,
        "continuation": rng.integers(1, 64, (U, C * K, T)).astype(np.int32),
        "continuation_valid": continuation_valid,
        "answer_mask": answer,
    }


@functools.cache
def world():
    """(modules, frozen, state with both retrievers, rollouts, turns whose l is the policy's)."""
    model, params, adapter = make_policy()
    encoder, encoder_params, eta = make_encoder()
    modules = Modules(model, encoder, *make_optimizers(CONFIG))
    policy = nudged(adapter, 7)
    batch = make_batch(model, {"params": params, "lora": policy}, U=U)
    arrays = scoring_arrays()
    flat = document_log_likelihood(model, {"params": params, "lora": policy}, **arrays)
    exists = arrays["answer_mask"].any(-1).reshape(U, C, K)
    likelihood = np.log((np.exp(np.asarray(flat, np.float64).reshape(U, C, K)) * exists).sum(-1) / exists.sum(-1))
    doc_mask = jnp.ones((U, C), bool).at[0, 4].set(False)
    turns = batch.turns.replace(log_likelihood=jnp.asarray(likelihood, jnp.float32), doc_mask=doc_mask, mask=jnp.arange(U) != 2)
    state = two_state.with_star(modules, init_state(modules, policy, nudged(eta, 8, 0.5), jax.random.key(4)))
    return modules, Frozen(params, encoder_params), state.replace(star=nudged(eta, 9, 0.5)), batch.rollouts, turns


def batches(order=(3, 0, 1, 2), size=3):
    """Batches of `size` rows; the last has one that stands for two equal requests, 2 and 4, and padding."""
    out = []
    for at in range(0, U, size):
        chosen = order[at : at + size]
        arrays = {name: np.zeros((size, *x.shape[1:]), x.dtype) for name, x in scoring_arrays().items()}
        for row, u in enumerate(chosen):
            for name, x in scoring_arrays().items():
                arrays[name][row] = x[u]
        out.append(([[u] if u != 1 else [1, 4] for u in chosen], arrays, T))
    return out


OWNERS = [0, 1, 2, 3, 1]  # request 4 is request 1 over again: turn 1 counts double in the sum


def log_p(lora):
    modules, frozen, _, _, turns = world()
    queries = modules.encoder.apply({"params": frozen.encoder, "lora": lora}, turns.query_tokens, turns.query_mask)
    scores = jnp.einsum("ud,ucd->uc", queries, turns.doc_vectors) / TAU
    return jax.nn.log_softmax(jnp.where(turns.doc_mask, scores, -1e30), -1)


def rag(policy, lora, double=True):
    """L_RAG(theta, eta) over the real turns by a plain forward for every continuation."""
    modules, frozen, _, _, turns = world()
    arrays = scoring_arrays()
    variables = {"params": frozen.policy, "lora": policy}
    tokens, mask = np.zeros((U * C * K, P + T), np.int32), np.zeros((U * C * K, P + T), bool)
    for row, (u, c) in enumerate(np.ndindex(U, C * K)):
        history = arrays["history"][u][arrays["history_valid"][u]]
        real = arrays["continuation"][u, c][arrays["continuation_valid"][u, c]]
        tokens[row, : len(history) + len(real)] = np.concatenate([history, real])
        mask[row, len(history) + 2 : len(history) + len(real)] = len(real) > 0
    logps = jax.nn.log_softmax(modules.policy.apply(variables, tokens))
    logp = jnp.take_along_axis(logps[:, :-1], tokens[:, 1:, None], -1)[..., 0]
    l_dk = jnp.where(mask[:, 1:], logp, 0.0).sum(-1).reshape(U, C, K)
    exists = mask.any(-1).reshape(U, C, K)
    l_d = jax.nn.logsumexp(jnp.where(exists, l_dk, -jnp.inf), -1) - jnp.log(exists.sum(-1))
    nll = -jax.nn.logsumexp(jnp.where(turns.doc_mask, log_p(lora) + l_d, -jnp.inf), -1)
    times = jnp.where(turns.mask, 1.0, 0.0) * jnp.array([1.0, 2.0 if double else 1.0, 1.0, 1.0])
    return (nll * times).sum() / turns.mask.sum()


def close(a, b, rtol=5e-5):
    size = max(float(jnp.abs(x).max()) for x in jax.tree.leaves(b))
    assert size > 0
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=rtol * size), a, b)


def corrected(estimator):
    modules, frozen, state, _, turns = world()
    config = dataclasses.replace(CONFIG, estimator=estimator)
    weights = two_state.correction_weights(config, modules, frozen, state, turns)
    return two_state.correction(config, modules, frozen, state.policy, weights, OWNERS, 3, batches())


@pytest.mark.parametrize("estimator", ["two_state", "drop"])
def test_the_correction_is_the_gradient_of_the_rag_losses(estimator):
    _, _, state, _, _ = world()

    @jax.jit
    def direct(policy):
        pair = rag(policy, state.retriever)
        return GAMMA * (pair - rag(policy, state.star) if estimator == "two_state" else pair)

    got, expected = corrected(estimator), jax.grad(direct)(state.policy)
    close(got, expected)
    # and a finite difference along a direction
    direction = jax.tree.map(lambda x: x / optax.tree.norm(expected), expected)
    at = [float(direct(jax.tree.map(lambda x, d, s=s: x + s * 0.0005 * d, state.policy, direction))) for s in (1, -1)]
    assert float(optax.tree.vdot(got, direction)) == pytest.approx((at[0] - at[1]) / 0.001, rel=1e-3)


def test_the_three_gradients_differ_by_the_rag_terms_and_update_nothing():
    modules, frozen, state, rollouts, turns = world()
    got = two_state.policy_gradients(CONFIG, modules, frozen, state, cut(rollouts), turns, OWNERS, batches())
    sgd = dataclasses.replace(modules, policy_optimizer=optax.sgd(1.0))
    new, _, _ = jax.jit(lambda p: policy_update(CONFIG, sgd, frozen.policy, p, sgd.policy_optimizer.init(p), cut(rollouts, 8, 4)))(
        state.policy
    )
    close(got["one_state"], jax.tree.map(jnp.subtract, state.policy, new), 2e-4)
    for estimator in ("two_state", "drop"):
        close(jax.tree.map(jnp.subtract, got[estimator], got["one_state"]), corrected(estimator), 2e-4)


def test_a_correction_is_added_to_every_minibatch():
    """Plain gradient descent on two minibatches with no advantage: two steps along the correction and nothing else."""
    modules, frozen, state, rollouts, _ = world()
    modules = dataclasses.replace(modules, policy_optimizer=optax.sgd(0.1))
    added = jax.tree.map(jnp.ones_like, state.policy)
    zero = cut(rollouts.replace(advantages=jnp.zeros(8)))
    new, _, _ = jax.jit(lambda p, c: policy_update(CONFIG, modules, frozen.policy, p, modules.policy_optimizer.init(p), zero, c))(
        state.policy, added
    )
    close(jax.tree.map(jnp.subtract, state.policy, new), jax.tree.map(lambda x: 0.2 * x, added))


@functools.cache
def lower(estimator, use_outcome=True):
    modules = world()[0]
    loss = dataclasses.replace(CONFIG.retriever, use_outcome=use_outcome)
    return jax.jit(functools.partial(retriever_step, dataclasses.replace(CONFIG, estimator=estimator, retriever=loss), modules))


def test_the_second_retriever_descends_the_rag_loss_alone_on_the_same_minibatches():
    modules, frozen, state, _, turns = world()
    start = two_state.with_star(modules, state)
    both, metrics = lower("two_state")(frozen, start, turns)
    bridge, _ = lower("one_state")(frozen, start.replace(star=None, star_opt=None), turns)
    rag_only, alone = lower("one_state", use_outcome=False)(frozen, start.replace(star=None, star_opt=None), turns)
    close(both.retriever, bridge.retriever, 1e-5 * SPREAD)
    close(both.star, rag_only.retriever, 1e-5)
    assert metrics["two_state/star_rag_nll"] == pytest.approx(float(alone["retriever/rag_nll"]), rel=1e-5)
    assert bridge.star is None and bridge.star_opt is None


def test_without_advantages_the_two_states_are_one_and_the_correction_is_zero():
    modules, frozen, state, _, turns = world()
    zero = turns.replace(advantages=jnp.zeros(U))
    after, _ = lower("two_state")(frozen, two_state.with_star(modules, state), zero)
    close(after.retriever, after.star, 1e-5)
    assert np.abs(two_state.correction_weights(CONFIG, modules, frozen, after, zero)).max() < 1e-5


def test_the_lower_level_approaches_its_minimum():
    modules, frozen, state, _, turns = world()
    start = two_state.with_star(modules, state)
    losses = []
    for epochs in (1, 20, 60):
        solved, _ = two_state.solve_lower_level(CONFIG, modules, frozen, start, turns, epochs)
        losses.append(
            (float(rag(state.policy, solved.star, double=False)), float(rag(state.policy, solved.retriever, double=False)))
        )
    star, penalised = zip(*losses)
    assert star[0] > star[1] > star[2]
    assert star[2] < penalised[2]  # eta_gamma also follows the advantages
