"""The RAG terms of the policy's gradient: the two-state estimator and its truncation "drop" (METHOD 1).

    two_state    grad J_RL(theta, eta_gamma) + gamma [ grad L_RAG(theta, eta_gamma) - grad L_RAG(theta, eta*) ]
    drop         grad J_RL(theta, eta_gamma) + gamma   grad L_RAG(theta, eta_gamma)
    one_state    grad J_RL(theta, eta_gamma)                                                  (BRIDGE)

eta_gamma is the penalised retriever, eta* a second one that descends L_RAG alone. Every gradient is with respect to theta, and

    grad_theta L_RAG(theta, eta) = - mean_turns sum_d w_d(eta) grad_theta l_d(theta)

so both RAG terms together are *one* backward pass through document scoring, with constant weights W = w(eta_gamma) - w(eta*) on the
documents (for "drop" w(eta_gamma)). It runs over few turns at a time, as scoring does, at theta_n, before the policy moves; the sum
is added to the gradient of every GRPO minibatch of the step. On steps without scored turns (`credit.period` > 1) there is none.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from bridge_jax.mesh import batch_sharding, put
from bridge_jax.objectives.bilevel import (
    BridgeState,
    Frozen,
    Modules,
    Rollouts,
    StepConfig,
    Turns,
    one_minibatch,
    policy_gradient,
    policy_variables,
    retriever_step,
)
from bridge_jax.objectives.credit import differentiable_log_likelihood
from bridge_jax.objectives.rag import responsibilities

# Of `scoring.Scorer.batches`: (for each used row of the batch, the requests it stands for; its arrays; bound on target tokens).
ScoredBatch = tuple[Sequence[Sequence[int]], dict[str, jax.Array], int]


def with_star(modules: Modules, state: BridgeState) -> BridgeState:
    """The state with a second retriever eta*, which starts where the penalised one is."""
    star = jax.tree.map(lambda x: jnp.array(x, copy=True), state.retriever)  # a compiled step takes both over
    return state.replace(star=star, star_opt=modules.retriever_optimizer.init(star))


def document_weights(config: StepConfig, modules: Modules, frozen: Frozen, lora, turns: Turns) -> jax.Array:
    """w_d(eta) [U, C] float32 for the retriever `lora`; 0 on padding turns and absent candidates."""
    queries = modules.encoder.apply({"params": frozen.encoder, "lora": lora}, turns.query_tokens, turns.query_mask)
    scores = jnp.einsum("ud,ucd->uc", queries.astype(jnp.float32), turns.doc_vectors.astype(jnp.float32))
    _, weights = responsibilities(scores, turns.log_likelihood, config.retriever.tau, turns.doc_mask)
    return jnp.where(turns.doc_mask & turns.mask[:, None], weights, 0.0)


def correction_weights(config: StepConfig, modules: Modules, frozen: Frozen, state: BridgeState, turns: Turns) -> jax.Array:
    """W [U, C] of `config.estimator`."""
    weights = document_weights(config, modules, frozen, state.retriever, turns)
    if config.estimator == "two_state":
        weights = weights - document_weights(config, modules, frozen, state.star, turns)
    return weights


_policy_gradient = jax.jit(policy_gradient, static_argnums=(0, 1))


def _language_model_alone(config: StepConfig) -> StepConfig:
    """Without what a backward pass through the language model does not read: other values must not compile it again."""
    return dataclasses.replace(config, retriever=None, estimator="one_state")


@functools.partial(jax.jit, static_argnums=(0, 1), static_argnames="answer_tokens", donate_argnames="total")
def _accumulate(config: StepConfig, model, frozen_params, policy, total, weights, batch, *, answer_tokens: int):
    """total - grad_theta sum_d W_d l_d of one batch. weights [S, C]; batch: arrays [S, ...] with C*K continuations."""
    S, C = weights.shape

    def loss(policy):
        likelihood = differentiable_log_likelihood(
            model,
            policy_variables(config, frozen_params, policy),
            **batch,
            answer_tokens=answer_tokens,
            chunk=config.chunk,
            pairs=config.pairs,
        )
        return -(weights * _mean_over_targets(likelihood.reshape(S, C, -1), batch["answer_mask"].any(-1).reshape(S, C, -1))).sum()

    return jax.tree.map(jnp.add, total, jax.grad(loss)(policy))


def _mean_over_targets(likelihood: jax.Array, exists: jax.Array) -> jax.Array:
    """[S, C, K] -> [S, C]: log of the mean likelihood of the targets that exist, as `scoring` has it; junk where none does."""
    top = jax.nn.logsumexp(jnp.where(exists, likelihood, -1e30), -1)
    return top - jnp.log(jnp.maximum(exists.sum(-1), 1))


def likelihood_gradient(
    config: StepConfig, modules: Modules, frozen: Frozen, policy, weights: np.ndarray, batches: Iterable[ScoredBatch]
):
    """- sum over requests and documents of W_d grad_theta l_d, a tree like `policy`. weights [requests, C] float32.

    Memory: one batch's backward pass (layers rematerialised if the policy's are) and one tree.
    """
    mesh, config = modules.policy.mesh, _language_model_alone(config)
    total = jax.tree.map(jnp.zeros_like, policy)
    for places, arrays, answer_tokens in batches:
        rows = np.zeros((arrays["history"].shape[0], weights.shape[1]), np.float32)
        for row, requests in zip(rows, places):
            row[:] = weights[list(requests)].sum(0)
        placed = rows if mesh is None else put(rows, batch_sharding(mesh))
        total = _accumulate(config, modules.policy, frozen.policy, policy, total, placed, arrays, answer_tokens=answer_tokens)
    return total


def correction(
    config: StepConfig,
    modules: Modules,
    frozen: Frozen,
    policy,
    weights: np.ndarray,
    owners: Sequence[int],
    turns_in: int,
    batches: Iterable[ScoredBatch],
):
    """What is added to the policy's gradient: gamma x mean over turns, a tree like `policy`.

    Args:
      weights: W [U, C]. turns_in: turns that count. owners: [requests] the turn whose l (or a summand of it) a request scores.
    """
    gradient = likelihood_gradient(config, modules, frozen, policy, np.asarray(weights)[np.asarray(owners, int)], batches)
    return jax.tree.map(lambda g: g * (config.retriever.gamma / max(turns_in, 1)), gradient)


def policy_gradients(
    config: StepConfig,
    modules: Modules,
    frozen: Frozen,
    state: BridgeState,
    rollouts: Rollouts,
    turns: Turns,
    owners: Sequence[int],
    batches: Sequence[ScoredBatch],
) -> dict[str, object]:
    """{"one_state", "two_state", "drop"}: the three gradients at the same point, over all rollouts and turns; nothing is updated.

    Args:
      state: with eta* (`with_star`). owners, batches: as in `correction`.
    """
    rows = one_minibatch(rollouts)
    one_state = _policy_gradient(_language_model_alone(config), modules, frozen.policy, state.policy, rows)[0]
    gradients, turns_in = {"one_state": one_state}, int(np.asarray(turns.mask).sum())
    for estimator in ("two_state", "drop"):
        chosen = dataclasses.replace(config, estimator=estimator)
        weights = jax.jit(functools.partial(correction_weights, chosen, modules))(frozen, state, turns)
        added = correction(chosen, modules, frozen, state.policy, weights, owners, turns_in, batches)
        gradients[estimator] = jax.tree.map(jnp.add, one_state, added)
    return gradients


def solve_lower_level(
    config: StepConfig, modules: Modules, frozen: Frozen, state: BridgeState, turns: Turns, epochs: int
) -> tuple[BridgeState, dict[str, jax.Array]]:
    """Both retrievers after `epochs` passes over fixed turns at a fixed policy: near eta_gamma and eta* for enough of them.

    Returns (state, metrics of `retriever_step`, means over the passes).
    """
    step = functools.partial(retriever_step, dataclasses.replace(config, turn_epochs=epochs), modules)
    return jax.jit(step)(frozen, state, turns)


def compilations() -> int:
    """Programs of the backward pass compiled so far in this process."""
    return _accumulate._cache_size()
