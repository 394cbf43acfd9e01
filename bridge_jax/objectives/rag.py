"""The retriever's loss: outcome credit J_ret plus gamma times the RAG likelihood L_RAG.

Source: METHOD 3. Per turn u with candidates d (C of them), s_d = <f_eta(q), e_d>:

    p_d = softmax(s_d / tau)                         the retriever's distribution over the candidates
    w_d = stop_gradient softmax(log p_d + l_d)       posterior responsibility; l_d = log-likelihood of the gold answer under d
    J_ret = - A sum_d w_d log p_d                    L_RAG = - logsumexp_d(log p_d + l_d)
    L_eta = J_ret + gamma L_RAG                      dL_eta/ds_d = -(A + gamma) (w_d - p_d) / tau

Comparators distil the language model's preference among the candidates into p instead (`distil`), without outcome and prior:

    replug         KL(p | q), q = softmax(exp(l_d) / beta)        REPLUG's LSR; its gamma is our tau
                   dL/ds_d = p_d (log(p_d / q_d) - KL) / tau
    replug_pdist   KL(q | p), q = softmax(l_d)                    Atlas' perplexity distillation
                   dL/ds_d = (p_d - q_d) / tau

l_d and e_d are data: the only thing differentiated is the query vector. Option (this project's): + anchor (1 - <f_eta(q), f_0(q)>),
f_0 the base encoder, which keeps the query tower where the frozen passage vectors still mean something to it.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

_NEGATIVE = -1e30  # stands for log 0 where -inf would turn 0 * inf into NaN


@dataclasses.dataclass(frozen=True)
class RetrieverLossConfig:
    """tau: temperature of p. gamma: weight of L_RAG. use_outcome, use_rag: which terms exist (`decoupled_rl` is J_ret alone,
    `decoupled_rag` is gamma L_RAG alone, that is A := 0). clamp_negative: negative advantages count as 0.
    credit_shown: k > 0 restricts J_ret to the first k candidates, the ones the policy saw; L_RAG always uses all C.
    anchor: weight of the distance to the base encoder's query vector. distil: "", "replug" or "replug_pdist", a term of weight 1;
    likelihood_tau: beta."""

    tau: float = 1.0
    gamma: float = 0.02
    use_outcome: bool = True
    use_rag: bool = True
    clamp_negative: bool = False
    credit_shown: int = 0
    anchor: float = 0.0
    distil: str = ""
    likelihood_tau: float = 0.1

    def __post_init__(self):
        for name in ("tau", "likelihood_tau"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} {getattr(self, name)}: must be above 0")
        if self.distil not in ("", "replug", "replug_pdist"):
            raise ValueError(f"distil {self.distil!r}: allowed are replug, replug_pdist and none")
        if not (self.use_outcome or self.use_rag or self.distil):
            raise ValueError("a retriever loss with neither J_ret nor L_RAG trains nothing; switch the retriever update off")


def responsibilities(
    scores: jax.Array, log_likelihood: jax.Array, tau: float, doc_mask: jax.Array | None = None
) -> tuple[jax.Array, jax.Array]:
    """(log p, w), both [U, C] float32, from scores s [U, C] and l [U, C]. w carries no gradient.

    doc_mask [U, C] bool marks real candidates; the others get w = 0 and log p = -1e30.
    """
    scores = scores.astype(jnp.float32) / tau
    log_likelihood = jax.lax.stop_gradient(log_likelihood.astype(jnp.float32))
    if doc_mask is not None:
        scores = jnp.where(doc_mask, scores, _NEGATIVE)
        log_likelihood = jnp.where(doc_mask, log_likelihood, 0.0)
    log_p = jax.nn.log_softmax(scores, -1)
    weights = jax.lax.stop_gradient(jax.nn.softmax(log_p + log_likelihood, -1))
    return log_p, weights


def score_loss(
    scores: jax.Array,
    log_likelihood: jax.Array,
    advantages: jax.Array,
    turn_mask: jax.Array,
    config: RetrieverLossConfig,
    doc_mask: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array, dict[str, jax.Array]]:
    """L_eta as a function of the scores s [U, C]; arguments and results as in `retriever_loss`."""
    turn_mask = jnp.asarray(turn_mask, bool)
    doc_mask = jnp.ones(scores.shape, bool) if doc_mask is None else jnp.asarray(doc_mask, bool)
    # Padding turns hold anything: give them harmless numbers first, so that nothing non-finite meets a gradient.
    doc_mask = doc_mask | ~turn_mask[:, None]
    scores = jnp.where(turn_mask[:, None], scores, 0.0)
    log_likelihood = jax.lax.stop_gradient(jnp.where(turn_mask[:, None] & doc_mask, log_likelihood, 0.0).astype(jnp.float32))
    advantages = jax.lax.stop_gradient(jnp.where(turn_mask, advantages, 0.0).astype(jnp.float32))

    log_p, weights = responsibilities(scores, log_likelihood, config.tau, doc_mask)
    rag_nll = -jax.nn.logsumexp(log_p + log_likelihood, -1)
    loss = jnp.zeros_like(rag_nll)
    if config.use_outcome:
        credit = jnp.maximum(advantages, 0.0) if config.clamp_negative else advantages
        loss = loss - credit * jnp.where(doc_mask, _credited(weights, log_p, log_likelihood, config) * log_p, 0.0).sum(-1)
    if config.use_rag:
        loss = loss + config.gamma * rag_nll
    divergence = {}
    if config.distil:
        divergence["retriever/distil_kl"] = kl = _distilled(log_p, log_likelihood, doc_mask, config)
        loss = loss + kl

    entropy = -jnp.where(doc_mask, jnp.exp(log_p) * log_p, 0.0).sum(-1)
    metrics = {
        "credit/weight_max": weights.max(-1),
        "credit/p_entropy": entropy,
        "credit/zero_advantage_turns": (advantages == 0.0).astype(jnp.float32),
        "retriever/rag_nll": rag_nll,
        **divergence,
    }
    sums = {name: jax.lax.stop_gradient(jnp.where(turn_mask, value, 0.0).sum()) for name, value in metrics.items()}
    return jnp.where(turn_mask, loss, 0.0).sum(), turn_mask.astype(jnp.float32).sum(), sums


def _credited(weights: jax.Array, log_p: jax.Array, log_likelihood: jax.Array, config: RetrieverLossConfig) -> jax.Array:
    """The w of J_ret: over all C, or renormalised over the shown ones. p stays over all C, so sum(w - p) is 0 either way."""
    if not config.credit_shown:
        return weights
    shown = jnp.arange(weights.shape[-1]) < config.credit_shown
    return jax.lax.stop_gradient(jax.nn.softmax(jnp.where(shown, log_p + log_likelihood, _NEGATIVE), -1))


def _distilled(log_p: jax.Array, log_likelihood: jax.Array, doc_mask: jax.Array, config: RetrieverLossConfig) -> jax.Array:
    """The divergence [U] of the retriever's distribution and the language model's, which carries no gradient."""
    raw = jnp.exp(log_likelihood) / config.likelihood_tau if config.distil == "replug" else log_likelihood
    log_q = jax.nn.log_softmax(jnp.where(doc_mask, raw, _NEGATIVE), -1)
    of, to = (log_p, log_q) if config.distil == "replug" else (log_q, log_p)
    return jnp.where(doc_mask, jnp.exp(of) * (of - to), 0.0).sum(-1)


def retriever_loss(
    query_vectors: jax.Array,
    doc_vectors: jax.Array,
    log_likelihood: jax.Array,
    advantages: jax.Array,
    turn_mask: jax.Array,
    config: RetrieverLossConfig,
    doc_mask: jax.Array | None = None,
    base_vectors: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array, dict[str, jax.Array]]:
    """L_eta summed over turns.

    query_vectors [U, D] float32: f_eta(q), differentiated. doc_vectors [U, C, D]: frozen e_d in retrieval order.
    log_likelihood [U, C]: l_d. advantages [U]: A of the turn's rollout. turn_mask [U] bool: real turns.
    doc_mask [U, C] bool: real candidates. base_vectors [U, D] float32: f_0(q), for the anchor and the drift.
    Returns (loss sum, number of turns, metric sums over turns: credit/weight_max, credit/p_entropy, credit/zero_advantage_turns,
    retriever/rag_nll, with `distil` retriever/distil_kl, with base_vectors retriever/drift = 1 - <f_eta(q), f_0(q)>). Everything is
    0 for an empty turn_mask.
    """
    query_vectors = query_vectors.astype(jnp.float32)
    scores = jnp.einsum("ud,ucd->uc", query_vectors, jax.lax.stop_gradient(doc_vectors).astype(jnp.float32))
    loss, count, sums = score_loss(scores, log_likelihood, advantages, turn_mask, config, doc_mask)
    if base_vectors is not None:
        real = jnp.asarray(turn_mask, bool)
        base = jax.lax.stop_gradient(jnp.where(real[:, None], base_vectors, 0.0))
        drift = jnp.where(real, 1.0 - (query_vectors * base).sum(-1), 0.0).sum()
        sums["retriever/drift"] = jax.lax.stop_gradient(drift)
        if config.anchor:
            loss = loss + config.anchor * drift
    return loss, count, sums
