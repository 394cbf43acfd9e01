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

What a sample draws (`drawing.py`) depends on its id and position only, not on its neighbours, the batch's make-up, the column or
the chunk. At temperature 1 the sampler draws from the trainer's distribution: nothing is masked or renormalised, not even ids
beyond the tokenizer in a padded vocabulary (they have no text, and are counted).
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
from bridge_jax.rollout.drawing import pick
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
    owed: jax.Array  # [B] int32, tokens this generation must take before it may end
    reason: jax.Array  # [B] int32, RUNNING or why the row stands still
    sample_id: jax.Array  # [B] int32
    forwarded: jax.Array  # [] int32, real tokens put through the model so far
    computed: jax.Array  # [] int32, the same with padding


class Sampler:
    """The jitted programs of one model and vocabulary. Weights are an argument of each call; states are donated.

    `model`: anything with Qwen2's call (output="hidden"), a `config` that `unembed` and `KVBlock.empty` read, and a `dtype`.
    top_p, top_k: `drawing.draw_top`. min_new_tokens: no generation ends before so many tokens, except at its limit: until then the
    EOS ids are barred, and so is every token that would complete a stop string. (To let a tag pass unheeded would not do: an
    action is read up to its first closing tag, and the policy would see an unanswered search in its own text.)
    With the defaults none of the three costs anything: the options are static.
    """

    def __init__(
        self, model, table: StopTable, eos_ids: Sequence[int], *, top_p: float = 1.0, top_k: int = 0, min_new_tokens: int = 0
    ):
        self.model = model
        self._options = {"top_p": top_p, "top_k": top_k}
        self._min_new_tokens = min_new_tokens
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
            owed=jnp.full(rows, self._min_new_tokens, jnp.int32),
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
            barred = self._barred(next_state, state) if self._min_new_tokens else None
            token, logp = pick(logits, key, state.sample_id, state.position, temperature, barred=barred, **self._options)
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
                owed=jnp.maximum(state.owed - running, 0),
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

    def _barred(self, next_state, state):
        """[B, V] bool: what would end the generation of a row that owes tokens."""
        after = next_state[state.matched]
        ends = (after == self._accepting[0]) | (after == self._accepting[1])
        return (state.owed > 0)[:, None] & ends.at[:, self._eos].set(True)

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
            owed=jnp.full_like(state.owed, self._min_new_tokens),
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
