"""The device side of a rollout: prefill, decode in chunks, append observations, compact. Static shapes, nothing computed twice.

Columns are time, positions are per row. The whole batch has one write column; a row that has stopped writes invalid columns, and
RoPE positions count each row's own tokens. With N groups of G samples (rows n*G .. n*G+G-1 are group n):

    shared  (prompt, one a group)       private (one a sample)                    column
    [ q q q q . . ]                     row 0  [ a a a a a O O O O O O b b b     |        ]
                                        row 1  [ a a a . . O O O . . . b . .     |        ]      . = invalid
                                        row 2  [ a a . . . . . . . . . . . .     |        ]      (row 2 answered at once)
                                                 generation  observations  next generation

`hidden` is the state behind each row's last token; its logits give the next one. So every token is forwarded exactly once, right
after it was sampled, and an observation is simply appended: no token is ever prefilled again.

Keys are ``fold_in(fold_in(key, sample_id), position)``: what a sample draws depends on itself only, not on its neighbours, the
batch's make-up, the column or the chunk. The recorded log-probability is the trainer's: float32 log-softmax of the unmodified
logits (all V of them, temperature 1) at the sampled token. At temperature 1 the sampler draws from exactly that distribution:
nothing is masked or renormalised, not even ids beyond the tokenizer in a padded vocabulary (they have no text, and are
counted).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from bridge_jax.models.cache import KVBlock
from bridge_jax.models.qwen2 import unembed
from bridge_jax.rollout.stopping import StopTable

# Why a row stands still. SEARCH and ANSWER follow the order of protocol.STOP_STRINGS.
RUNNING, SEARCH, ANSWER, EOS, LIMIT, IDLE = range(6)


@flax.struct.dataclass
class DecodeState:
    """Everything a batch of B = N * G rows needs to go on sampling."""

    shared: KVBlock  # [L, N, P, K, H] the prompts
    private: KVBlock  # [L, B, S, K, H] what the samples wrote and read
    column: jax.Array  # [] int32, the next column to write
    hidden: jax.Array  # [B, D] after the final norm, of each row's last token
    position: jax.Array  # [B] int32, of the next token
    matched: jax.Array  # [B] int32, state of the stop automaton in this generation
    left: jax.Array  # [B] int32, tokens this generation may still take
    reason: jax.Array  # [B] int32, RUNNING or why the row stands still
    sample_id: jax.Array  # [B] int32
    forwarded: jax.Array  # [] int32, real tokens put through the model so far
    computed: jax.Array  # [] int32, the same with padding


def draw(logits: jax.Array, uniform: jax.Array) -> jax.Array:
    """logits [B, V] float32, uniform [B] in [0, 1) -> [B] int32: each row's cumulative distribution inverted at its number.

    One random number a row instead of V, and two short cumulative sums (over blocks, then inside the block) instead of a long one.
    An id of probability 0 is never drawn.
    """
    batch, vocab = logits.shape
    width = 1 << max(1, (vocab.bit_length() + 1) // 2)
    weights = jnp.exp(logits - logits.max(-1, keepdims=True))
    weights = jnp.pad(weights, ((0, 0), (0, -vocab % width))).reshape(batch, -1, width)

    def invert(
        mass, target
    ):  # the first possible entry whose cumulative sum passes the target; the likeliest if rounding left none
        cumulative = jnp.cumsum(mass, axis=-1)
        passes = (cumulative > target[:, None]) & (mass > 0)
        index = jnp.where(passes.any(-1), passes.argmax(-1), mass.argmax(-1))
        return index, jnp.take_along_axis(cumulative - mass, index[:, None], axis=1)[:, 0]

    blocks = weights.sum(-1)
    target = uniform * jnp.cumsum(blocks, axis=-1)[:, -1]
    block, before = invert(blocks, target)
    inside, _ = invert(jnp.take_along_axis(weights, block[:, None, None], axis=1)[:, 0], target - before)
    return (block * width + inside).astype(jnp.int32)


def pick(logits: jax.Array, key: jax.Array, sample_id: jax.Array, position: jax.Array, temperature: jax.Array):
    """(token [B] int32, log-prob [B] float32 under the untempered distribution). temperature 0 takes the most likely token."""
    keys = jax.vmap(lambda sample, at: jax.random.fold_in(jax.random.fold_in(key, sample), at))(sample_id, position)
    uniform = jax.vmap(lambda row_key: jax.random.uniform(row_key))(keys)
    sampled = draw(logits / jnp.where(temperature > 0, temperature, 1.0), uniform)
    token = jnp.where(temperature > 0, sampled, logits.argmax(-1).astype(jnp.int32))
    chosen = jnp.take_along_axis(logits, token[:, None], axis=1)[:, 0]
    return token, chosen - jax.nn.logsumexp(logits, axis=-1)


class Sampler:
    """The jitted programs of one model and vocabulary. Weights are an argument of each call; states are donated.

    `model`: anything with Qwen2's call (output="hidden"), a `config` that `unembed` and `KVBlock.empty` read, and a `dtype`.
    """

    def __init__(self, model, table: StopTable, eos_ids: Sequence[int]):
        self.model = model
        self._next_state = jnp.asarray(table.next_state)
        self._accepting = table.accepting
        self._eos = np.asarray(sorted(set(eos_ids)), np.int32)
        # Bound methods: each sampler has compiled programs, and counts, of its own.
        self._prefill = jax.jit(self._prefill_impl, static_argnames=("capacity",))
        self._decode = jax.jit(self._decode_impl, static_argnames=("steps",), donate_argnames=("state",))
        self._append = jax.jit(self._append_impl, donate_argnames=("state",))
        self._compact = jax.jit(self._compact_impl, donate_argnames=("state",))

    def compilations(self) -> int:
        """Programs compiled so far."""
        return sum(program._cache_size() for program in (self._prefill, self._decode, self._append, self._compact))

    def prefill(self, variables, prompts, lengths, sample_ids, left, *, capacity: int) -> DecodeState:
        """Read the prompts once a group.

        prompts [N, P] int32 right-padded, lengths [N] (0: an empty group), sample_ids [B], left [B] (0: the row stays idle).
        """
        return self._prefill(variables, prompts, lengths, sample_ids, left, capacity=capacity)

    def decode_chunk(self, variables, state: DecodeState, key, temperature, *, steps: int):
        """Sample up to `steps` tokens a row; ends early when every row has stopped.

        Returns (state, tokens [B, steps] int32, logps [B, steps] float32, counts [B] int32): row b wrote its first counts[b].
        """
        return self._decode(variables, self._next_state, state, key, jnp.float32(temperature), steps=steps)

    def append(self, variables, state: DecodeState, tokens, lengths, left) -> DecodeState:
        """Append an observation to the rows with lengths[b] > 0; their next generation may take left[b] tokens. The others go idle.

        tokens [B, O] int32 right-padded. Writes O columns.
        """
        return self._append(variables, state, tokens, lengths, left)

    def compact(self, state: DecodeState, keep) -> DecodeState:
        """Move each row's valid columns to the front and forget the rows with keep[b] False, so that columns are free again."""
        return self._compact(state, keep)

    def _prefill_impl(self, variables, prompts, lengths, sample_ids, left, *, capacity):
        groups, width = prompts.shape
        rows = sample_ids.shape[0]
        config, dtype = self.model.config, self.model.dtype
        valid = jnp.arange(width) < lengths[:, None]
        hidden, shared = self.model.apply(
            variables,
            prompts,
            positions=jnp.broadcast_to(jnp.arange(width, dtype=jnp.int32), prompts.shape),
            valid=valid,
            private=KVBlock.empty(config, groups, width, dtype),
            write_at=jnp.int32(0),
            output="hidden",
        )
        last = jnp.take_along_axis(hidden, jnp.maximum(lengths - 1, 0)[:, None, None], axis=1)[:, 0]
        per_row = functools.partial(jnp.repeat, repeats=rows // groups, axis=0, total_repeat_length=rows)
        return DecodeState(
            shared=shared,
            private=KVBlock.empty(config, rows, capacity, dtype),
            column=jnp.int32(0),
            hidden=per_row(last),
            position=per_row(lengths),
            matched=jnp.zeros(rows, jnp.int32),
            left=left,
            reason=jnp.where(left > 0, RUNNING, IDLE).astype(jnp.int32),
            sample_id=sample_ids,
            forwarded=valid.sum(dtype=jnp.int32),
            computed=jnp.int32(groups * width),
        )

    def _decode_impl(self, variables, next_state, state, key, temperature, *, steps):
        rows = state.reason.shape[0]

        def go_on(carry):
            step, state, *_ = carry
            return (step < steps) & (state.reason == RUNNING).any()

        def body(carry):
            step, state, tokens, logps, counts = carry
            running = state.reason == RUNNING
            logits = unembed(variables["params"], state.hidden, self.model.config)
            token, logp = pick(logits, key, state.sample_id, state.position, temperature)
            token = jnp.where(running, token, 0)
            matched = jnp.where(running, next_state[state.matched, token].astype(jnp.int32), state.matched)
            left = state.left - running
            reason = jnp.select(  # a completed tag counts before the limit it was completed at
                [matched == self._accepting[0], matched == self._accepting[1], jnp.isin(token, self._eos), left <= 0],
                [SEARCH, ANSWER, EOS, LIMIT],
                RUNNING,
            ).astype(jnp.int32)
            hidden, private = self.model.apply(
                variables,
                token[:, None],
                positions=state.position[:, None],
                valid=running[:, None],
                shared=state.shared,
                private=state.private,
                write_at=state.column,
                output="hidden",
            )
            state = state.replace(
                private=private,
                column=state.column + 1,
                hidden=jnp.where(running[:, None], hidden[:, 0], state.hidden),
                position=state.position + running,
                matched=matched,
                left=left,
                reason=jnp.where(running, reason, state.reason),
                forwarded=state.forwarded + running.sum(dtype=jnp.int32),
                computed=state.computed + rows,
            )
            tokens = tokens.at[:, step].set(token)
            logps = logps.at[:, step].set(jnp.where(running, logp, 0.0))
            return step + 1, state, tokens, logps, counts + running

        buffers = jnp.zeros((rows, steps), jnp.int32), jnp.zeros((rows, steps), jnp.float32), jnp.zeros(rows, jnp.int32)
        _, state, tokens, logps, counts = jax.lax.while_loop(go_on, body, (jnp.int32(0), state, *buffers))
        return state, tokens, logps, counts

    def _append_impl(self, variables, state, tokens, lengths, left):
        rows, width = tokens.shape
        steps = jnp.arange(width, dtype=jnp.int32)
        valid = steps < lengths[:, None]
        hidden, private = self.model.apply(
            variables,
            tokens,
            positions=state.position[:, None] + steps,
            valid=valid,
            shared=state.shared,
            private=state.private,
            write_at=state.column,
            output="hidden",
        )
        last = jnp.take_along_axis(hidden, jnp.maximum(lengths - 1, 0)[:, None, None], axis=1)[:, 0]
        return state.replace(
            private=private,
            column=state.column + width,
            hidden=jnp.where((lengths > 0)[:, None], last, state.hidden),
            position=state.position + lengths,
            matched=jnp.zeros_like(state.matched),
            left=left,
            reason=jnp.where(left > 0, RUNNING, IDLE).astype(jnp.int32),
            forwarded=state.forwarded + valid.sum(dtype=jnp.int32),
            computed=state.computed + rows * width,
        )

    def _compact_impl(self, state, keep):
        """Keys carry their rotation already, so columns may move freely as long as a row's order stays."""
        valid = state.private.valid & keep[:, None]
        order = jnp.argsort(~valid, axis=1, stable=True)
        gather = order[None, :, :, None, None]
        private = KVBlock(
            k=jnp.take_along_axis(state.private.k, gather, axis=2),
            v=jnp.take_along_axis(state.private.v, gather, axis=2),
            valid=jnp.take_along_axis(valid, order, axis=1),
        )
        return state.replace(private=private, column=valid.sum(1, dtype=jnp.int32).max())
