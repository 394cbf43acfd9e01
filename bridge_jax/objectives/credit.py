"""Document scoring: l_d, the log-likelihood of the gold answer when document d alone follows the history.

Source: METHOD 3 and DESIGN 2. The history of a turn is run once and becomes the *shared* cache block of its C candidates; each
candidate is a row with only its own continuation (document, `<answer> `, gold answer). Forward only for the retriever: METHOD 3
shows that its gradient needs no gradient through the language model. `two_state` alone takes that gradient, for the policy.

Memory: attention holds N logits a *pair*, a token and a column it may attend to; a continuation token has T + P of them, a history
token P. `pairs` bounds how many there are at once, whatever the lengths: beyond it turns follow one another, and beyond it for one
turn its candidates do, behind the same history.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

from bridge_jax.mesh import batch_ways
from bridge_jax.models import qwen2
from bridge_jax.models.cache import KVBlock
from bridge_jax.objectives.logprobs import steps_of, token_logps

# What a token takes besides its logits (MLP, states), in pairs. Compiled programs of 0.5B and 3B shapes, T from 192 to 1280 and P
# from 512 to 8192, then take 4 to 8 x N bytes a pair.
OTHER = 512


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
    pairs: int | None = None,
) -> jax.Array:
    """l [U, C] float32: the summed log-probability of the answer tokens of every continuation.

    U turns, C candidates a turn, P history columns, T continuation columns.
      history [U, P] int32, history_valid [U, P] bool: prompt and rollout up to and including `</search>`; padding anywhere.
      continuation [U, C, T] int32, continuation_valid [U, C, T] bool: right-padded. RoPE positions go on from the history's length.
      answer_mask [U, C, T] bool: the tokens whose log-probabilities are summed; never column 0. A row without any gives 0.
      answer_tokens: static bound on answer tokens a row (default T); further ones would be ignored.
      chunk: tokens unembedded at once. [U*C, T, V] is never built: only the states that predict answer tokens are unembedded.
      pairs: those at once on a device (see the module's text; None: all), unless one history or one continuation has more.
    Its gradient with respect to `variables` is theta's part of L_RAG (METHOD 1, `objectives.two_state`); with `pairs` each step of
    turns or candidates is computed again in the backward pass.
    """
    (U, P), (_, C, T) = history.shape, continuation.shape

    def of_turns(history, history_valid, *rows):
        shared = model.apply(variables, history, valid=history_valid, output="block")
        return after_block(model, variables, shared, *rows, answer_tokens=answer_tokens, chunk=chunk, pairs=pairs)

    steps = _steps(_of_a_device(U, model), max(P * (P + OTHER), C * T * (T + P + OTHER)), pairs)
    return _in_steps(of_turns, steps, 0, history, history_valid, continuation, continuation_valid, answer_mask)


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
    pairs: int | None = None,
) -> jax.Array:
    """`differentiable_log_likelihood` behind U histories that are in a cache block already; `pairs` takes candidates apart."""
    (U, C, T), P = continuation.shape, shared.valid.shape[1]

    def of_candidates(*rows):
        return _after_block(model, variables, shared, *rows, T if answer_tokens is None else min(answer_tokens, T), chunk)

    steps = _steps(C, _of_a_device(U, model) * T * (T + P + OTHER), pairs)
    return _in_steps(of_candidates, steps, 1, continuation, continuation_valid, answer_mask)


def _after_block(model, variables, shared, continuation, continuation_valid, answer_mask, A: int, chunk: int) -> jax.Array:
    U, C, T = continuation.shape
    rows = continuation.reshape(U * C, T)
    hidden = model.apply(variables, rows, valid=continuation_valid.reshape(U * C, T), shared=shared, output="hidden")

    # Columns of the answer tokens, first to last; their predictors are one column earlier.
    mask = answer_mask.reshape(U * C, T)
    columns = jnp.argsort(~mask, axis=-1, stable=True)[:, :A]
    counted = jnp.take_along_axis(mask, columns, -1)
    targets = jnp.take_along_axis(rows, columns, -1)
    hidden = jnp.take_along_axis(hidden, jnp.maximum(columns - 1, 0)[..., None], 1)
    head = functools.partial(qwen2.unembed, variables["params"], config=model.config)
    logps, _ = token_logps(hidden, head, targets, chunk, batch_ways(model.mesh), model.mesh)
    return jnp.where(counted, logps, 0.0).sum(-1).reshape(U, C)


def _of_a_device(turns: int, model: qwen2.Qwen2) -> int:
    """Of the turns of a batch, how many one device has (all, where they do not divide)."""
    ways = batch_ways(model.mesh)
    return turns if turns % ways else turns // ways


def _steps(count: int, each: int, pairs: int | None) -> int:
    """How many equal steps take `count` things of `each` pairs."""
    return 1 if pairs is None else steps_of(count, pairs // each)


def _in_steps(fn: Callable[..., jax.Array], steps: int, axis: int, *arrays: jax.Array) -> jax.Array:
    """`fn(*arrays)`, which has their leading axes [U, C], taken over equal parts of that axis one after another.

    A part is every steps-th entry: of turns that are split over devices, as many of every device's.
    """
    if steps == 1:
        return fn(*arrays)

    def split(x):  # [.., A, ..] -> [steps, .., A / steps, ..]
        return jnp.moveaxis(x.reshape(*x.shape[:axis], -1, steps, *x.shape[axis + 1 :]), axis + 1, 0)

    parts = jnp.moveaxis(jax.lax.map(jax.checkpoint(lambda part: fn(*part)), tuple(map(split, arrays))), 0, axis + 1)
    return parts.reshape(*parts.shape[:axis], -1, *parts.shape[axis + 2 :])
