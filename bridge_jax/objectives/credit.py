"""Document scoring: l_d, the log-likelihood of the gold answer when document d alone follows the history.

Source: METHOD 3 and DESIGN 2. The history of a turn is run once and becomes the *shared* cache block of its C candidates; each
candidate is a row with only its own continuation (document, `<answer> `, gold answer). Forward only for the retriever: METHOD 3
shows that its gradient needs no gradient through the language model. `two_state` alone takes that gradient, for the policy.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from bridge_jax.models import qwen2
from bridge_jax.models.cache import KVBlock
from bridge_jax.objectives.logprobs import token_logps


def document_log_likelihood(model: qwen2.Qwen2, variables, *batch, **options) -> jax.Array:
    """`differentiable_log_likelihood` without a gradient: what the retriever's credit takes (METHOD 3)."""
    likelihood = differentiable_log_likelihood(model, jax.lax.stop_gradient(variables), *batch, **options)
    return jax.lax.stop_gradient(likelihood)


def differentiable_log_likelihood(
    model: qwen2.Qwen2,
    variables,
    history: jax.Array,
    history_valid: jax.Array,
    continuation: jax.Array,
    continuation_valid: jax.Array,
    answer_mask: jax.Array,
    *,
    answer_tokens: int | None = None,
    chunk: int = 1024,
) -> jax.Array:
    """l [U, C] float32: the summed log-probability of the answer tokens of every continuation.

    U turns, C candidates a turn, P history columns, T continuation columns.
      history [U, P] int32, history_valid [U, P] bool: prompt and rollout up to and including `</search>`; padding anywhere.
      continuation [U, C, T] int32, continuation_valid [U, C, T] bool: right-padded. RoPE positions go on from the history's length.
      answer_mask [U, C, T] bool: the tokens whose log-probabilities are summed; never column 0. A row without any gives 0.
      answer_tokens: static bound on answer tokens a row (default T); further ones would be ignored.
      chunk: tokens unembedded at once. [U*C, T, V] is never built: only the states that predict answer tokens are unembedded.
    Its gradient with respect to `variables` is theta's part of L_RAG (METHOD 1, `objectives.two_state`).
    """
    shared = model.apply(variables, history, valid=history_valid, output="block")
    return after_block(
        model, variables, shared, continuation, continuation_valid, answer_mask, answer_tokens=answer_tokens, chunk=chunk
    )


def after_block(
    model: qwen2.Qwen2,
    variables,
    shared: KVBlock,
    continuation: jax.Array,
    continuation_valid: jax.Array,
    answer_mask: jax.Array,
    *,
    answer_tokens: int | None = None,
    chunk: int = 1024,
) -> jax.Array:
    """`differentiable_log_likelihood` behind U histories that are in a cache block already."""
    U, C, T = continuation.shape
    A = T if answer_tokens is None else min(answer_tokens, T)
    rows = continuation.reshape(U * C, T)
    hidden = model.apply(variables, rows, valid=continuation_valid.reshape(U * C, T), shared=shared, output="hidden")

    # Columns of the answer tokens, first to last; their predictors are one column earlier.
    mask = answer_mask.reshape(U * C, T)
    columns = jnp.argsort(~mask, axis=-1, stable=True)[:, :A]
    counted = jnp.take_along_axis(mask, columns, -1)
    targets = jnp.take_along_axis(rows, columns, -1)
    hidden = jnp.take_along_axis(hidden, jnp.maximum(columns - 1, 0)[..., None], 1)
    logps, _ = token_logps(hidden, lambda x: qwen2.unembed(variables["params"], x, model.config), targets, chunk)
    return jnp.where(counted, logps, 0.0).sum(-1).reshape(U, C)
