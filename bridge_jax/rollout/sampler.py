"""The device side of a rollout: prefill, decode in chunks, append observations, compact. Static shapes, nothing computed twice.

Columns are time, positions are per row. The whole batch has one write column; a row that has stopped writes invalid columns, and
RoPE positions count each row's own tokens. With N groups of G samples (rows n*G .. n*G+G-1 are group n):

    shared  (prompt, one a group)       private (one a sample)                    column
    [ q q q q . . ]                     row 0  [ a a a a a O O O O O O b b b     |        ]
                                        row 1  [ a a a . . O O O . . . b . .     |        ]      . = invalid
                                        row 2  [ a a . . . . . . . . . . . .     |        ]      (row 2 answered at once)
                                                 generation  observations  next generation

Rows need not act in step: an append moves what its rows have to the front of their blocks and writes right behind it, whatever the
other rows are doing, and a new group takes over rows at any column.

`hidden` is the state behind each row's last token; its logits give the next one. So every token is forwarded exactly once, right
after it was sampled, and an observation is simply appended: no token is ever prefilled again.

What a sample draws (`drawing.py`) depends on its id and position only, not on its neighbours, the batch's make-up, the column or
the chunk. At temperature 1 the sampler draws from the trainer's distribution: nothing is masked or renormalised, not even ids
beyond the tokenizer in a padded vocabulary (they have no text, and are counted).

Over the model's mesh the rows (and groups) of every array are split over the batch axes, key/value heads over "tensor".
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from bridge_jax.mesh import BATCH, batch_ways, constrain
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
    """The jitted programs of one model and vocabulary. Weights are an argument of each call. A state that was handed over is gone:
    it is donated, so every call writes into the buffers of the one before, but for a `compact` to another width.

    `model`: anything with Qwen2's call (output="hidden"), a `config` that `unembed` and `KVBlock.empty` read, a `dtype` and a
    `mesh` (or None).
    top_p, top_k: `drawing.draw_top`. min_new_tokens: no generation ends before so many tokens, except at its limit: until then the
    EOS ids are barred, and so is every token that would complete a stop string. (To let a tag pass unheeded would not do: an
    action is read up to its first closing tag, and the policy would see an unanswered search in its own text.)
    With the defaults none of the three costs anything: the options are static.
    """

    def __init__(
        self, model, table: StopTable, eos_ids: Sequence[int], *, top_p: float = 1.0, top_k: int = 0, min_new_tokens: int = 0
    ):
        self.model = model
        self.mesh = model.mesh
        self._options = {"top_p": top_p, "top_k": top_k}
        self._min_new_tokens = min_new_tokens
        self._next_state = jnp.asarray(table.next_state)
        self._accepting = table.accepting
        self._eos = np.asarray(sorted(set(eos_ids)), np.int32)
        # Bound methods: each sampler has compiled programs, and counts, of its own.
        self._empty = jax.jit(self._empty_impl, static_argnames=("groups", "rows", "prompt_width", "width"))
        self._enter = jax.jit(self._enter_impl, donate_argnames=("state",))
        self._decode = jax.jit(self._decode_impl, static_argnames=("steps",), donate_argnames=("state",))
        self._append = jax.jit(self._append_impl, donate_argnames=("state",))
        self._order = jax.jit(self._order_impl, static_argnames=("width",))
        self._move = jax.jit(self._move_impl, static_argnames=("width",))
        self._move_in_place = jax.jit(self._move_in_place_impl, donate_argnames=("x",))

    def compilations(self) -> int:
        """Programs compiled so far."""
        programs = self._empty, self._enter, self._decode, self._append, self._order, self._move, self._move_in_place
        return sum(program._cache_size() for program in programs)

    def start(self, variables, prompts, lengths, slots, sample_ids, left, *, groups: int, prompt_width: int, width: int):
        """A batch of N = `groups` places with the first E groups in it; the rest is idle. Else as `enter`.

        prompt_width: of the shared block, at least P. width: of the private one.
        """
        state = self._empty(groups=groups, rows=groups * len(sample_ids) // len(prompts), prompt_width=prompt_width, width=width)
        return self.enter(variables, state, prompts, lengths, slots, sample_ids, left)

    def enter(self, variables, state: DecodeState, prompts, lengths, slots, sample_ids, left) -> DecodeState:
        """Read E prompts, once each, and put their groups in the places `slots`, where whatever was there is forgotten.

        prompts [E, P] int32 right-padded, lengths [E], slots [E] int32 (N: nobody), sample_ids [E * G], left [E * G] int32: tokens
        the first generation of each row may take.
        """
        return self._enter(variables, state, prompts, lengths, slots, sample_ids, left)

    def decode_chunk(self, variables, state: DecodeState, key, temperature, *, steps: int):
        """Sample up to `steps` tokens a row; ends early when every row has stopped.

        Returns (state, tokens [B, steps] int32, logps [B, steps] float32, counts [B] int32): row b wrote its first counts[b].
        """
        return self._decode(variables, self._next_state, state, key, jnp.float32(temperature), steps=steps)

    def append(self, variables, state: DecodeState, rows, tokens, lengths, left) -> DecodeState:
        """Append observations to R stopped rows, whose next generations may take left[r] tokens. The other rows stay as they are.

        rows [R] int32 (B: nobody), tokens [R, O] int32 right-padded, lengths [R], left [R] int32. The block needs O columns more
        than the fullest of the R rows has valid ones. The write column moves only if one of them reaches beyond it.
        """
        return self._append(variables, state, rows, tokens, lengths, left)

    def compact(self, state: DecodeState, keep, *, width: int) -> DecodeState:
        """Move each row's valid columns to the front of a block of `width` columns; forget the rows with keep[b] False.

        At the same width columns move inside the block, a layer at a time. Buffers of another size cannot be shared, so a new block
        is made: the keys first, and the old ones are given up before the values move, so that half of it stands beside the old one.
        """
        block = state.private
        order, valid, column = self._order(block.valid, keep, width=width)
        moved = []
        for x in (block.k, block.v):
            moved.append(self._move_in_place(x, order) if width == x.shape[2] else self._move(x, order, width=width))
            x.delete()  # a donated one is deleted already
        return state.replace(private=KVBlock(*moved, valid), column=column)

    def _empty_impl(self, *, groups: int, rows: int, prompt_width: int, width: int) -> DecodeState:
        config, dtype = self.model.config, self.model.dtype
        zeros = jnp.zeros(rows, jnp.int32)
        state = DecodeState(
            shared=KVBlock.empty(config, groups, prompt_width, dtype),
            private=KVBlock.empty(config, rows, width, dtype),
            column=jnp.int32(0),
            hidden=jnp.zeros((rows, config.hidden_size), dtype),
            position=zeros,
            matched=zeros,
            left=zeros,
            owed=zeros,
            reason=jnp.full(rows, IDLE, jnp.int32),
            sample_id=zeros,
            forwarded=jnp.int32(0),
            computed=jnp.int32(0),
        )
        return self._split(state)

    def _split(self, tree):
        """Arrays of rows, caches with their rows in the second axis, and scalars, each where it belongs on the mesh."""

        return jax.tree.map(lambda x: constrain(x, self.mesh, rows_spec(x.ndim)), tree)

    def _enter_impl(self, variables, state, prompts, lengths, slots, sample_ids, left):
        entering, length = prompts.shape
        size = sample_ids.shape[0] // entering
        valid = jnp.arange(length) < lengths[:, None]
        hidden, block = self.model.apply(
            variables,
            prompts,
            positions=jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32), prompts.shape),
            valid=valid,
            private=self._split(KVBlock.empty(self.model.config, entering, length, self.model.dtype)),
            write_at=jnp.int32(0),
            output="hidden",
        )
        beyond = state.shared.valid.shape[1] - length
        shared = KVBlock(
            k=state.shared.k.at[:, slots, :length].set(block.k, mode="drop"),
            v=state.shared.v.at[:, slots, :length].set(block.v, mode="drop"),
            valid=state.shared.valid.at[slots].set(jnp.pad(block.valid, ((0, 0), (0, beyond))), mode="drop"),
        )
        rows = (slots[:, None] * size + jnp.arange(size, dtype=jnp.int32)).reshape(-1)
        per_row = functools.partial(jnp.repeat, repeats=size, axis=0, total_repeat_length=rows.shape[0])

        def put(old, new):
            return old.at[rows].set(new, mode="drop")

        state = state.replace(
            shared=shared,
            private=state.private.replace(valid=put(state.private.valid, False)),
            hidden=put(state.hidden, per_row(_last(hidden, lengths))),
            position=put(state.position, per_row(lengths)),
            matched=put(state.matched, 0),
            left=put(state.left, left),
            owed=put(state.owed, self._min_new_tokens),
            reason=put(state.reason, jnp.where(left > 0, RUNNING, IDLE)),
            sample_id=put(state.sample_id, sample_ids),
            forwarded=state.forwarded + valid.sum(dtype=jnp.int32),
            computed=state.computed + entering * length,
        )
        return self._split(state)

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
            return step + 1, *self._split((state, tokens, logps, counts + running))

        buffers = jnp.zeros((rows, steps), jnp.int32), jnp.zeros((rows, steps), jnp.float32), jnp.zeros(rows, jnp.int32)
        _, state, tokens, logps, counts = jax.lax.while_loop(go_on, body, (jnp.int32(0), state, *buffers))
        return state, tokens, logps, counts

    def _barred(self, next_state, state):
        """[B, V] bool: what would end the generation of a row that owes tokens."""
        after = next_state[state.matched]
        ends = (after == self._accepting[0]) | (after == self._accepting[1])
        return (state.owed > 0)[:, None] & ends.at[:, self._eos].set(True)

    def _append_impl(self, variables, state, rows, tokens, lengths, left):
        """The R rows are taken out of the batch, each with a prompt block of its own, compacted, and put back.

        So an observation stands right behind what its row has, and the other rows have no columns to skip.
        """
        groups, total = state.shared.valid.shape[0], state.reason.shape[0]
        at = jnp.minimum(rows, total - 1)
        length = tokens.shape[1]
        steps = jnp.arange(length, dtype=jnp.int32)
        valid = steps < lengths[:, None]
        private = self._split(self._take(state.private, at))
        behind = jnp.where(rows < total, private.valid.sum(1, dtype=jnp.int32), 0).max()
        hidden, private = self.model.apply(
            variables,
            tokens,
            positions=state.position[at, None] + steps,
            valid=valid,
            shared=self._split(self._take(state.shared, at // (total // groups))),
            private=self._compacted(private),
            write_at=behind,
            output="hidden",
        )

        def put(old, new):
            return old.at[rows].set(new, mode="drop")

        state = state.replace(
            private=KVBlock(
                k=state.private.k.at[:, rows].set(private.k, mode="drop"),
                v=state.private.v.at[:, rows].set(private.v, mode="drop"),
                valid=put(state.private.valid, private.valid),
            ),
            column=jnp.maximum(state.column, behind + lengths.max()),
            hidden=put(state.hidden, _last(hidden, lengths)),
            position=put(state.position, state.position[at] + lengths),
            matched=put(state.matched, 0),
            left=put(state.left, left),
            owed=put(state.owed, self._min_new_tokens),
            reason=put(state.reason, jnp.where(left > 0, RUNNING, IDLE)),
            forwarded=state.forwarded + valid.sum(dtype=jnp.int32),
            computed=state.computed + rows.shape[0] * length,
        )
        return self._split(state)

    def _take(self, block: KVBlock, rows: jax.Array) -> KVBlock:
        """The rows [R] of a block of B rows as a block of R."""
        return KVBlock(k=self._cache_rows(block.k, rows), v=self._cache_rows(block.v, rows), valid=block.valid[rows])

    def _cache_rows(self, x: jax.Array, rows: jax.Array) -> jax.Array:
        """x [L, B, S, K, H], rows [R] in [0, B) -> [L, R, S, K, H]. Over a mesh each device gives the rows it has."""
        if self.mesh is None:
            return _rows_of(x, rows)
        ways = batch_ways(self.mesh)
        if x.shape[1] % ways:
            return x[:, rows]
        heads = "tensor" if x.shape[3] % self.mesh.shape["tensor"] == 0 else None
        split = rows.shape[0] % ways == 0

        def local(x, rows):
            own = _rows_of(x, rows - jax.lax.axis_index(BATCH) * x.shape[1])
            return jax.lax.psum_scatter(own, BATCH, scatter_dimension=1, tiled=True) if split else jax.lax.psum(own, BATCH)

        specs = P(None, BATCH, None, heads), P()
        out = P(None, BATCH if split else None, None, heads)
        return jax.shard_map(local, mesh=self.mesh, in_specs=specs, out_specs=out, check_vma=False)(x, rows)

    def _order_impl(self, valid, keep, *, width):
        """valid [B, S], keep [B] -> what is where after compaction: (order [B, min(S, width)], valid [B, width], column [])."""
        valid = valid & keep[:, None]
        order = _front(valid)[:, :width]
        valid = jnp.pad(jnp.take_along_axis(valid, order, axis=1), ((0, 0), (0, width - order.shape[1])))
        return self._split((order, valid, valid.sum(1, dtype=jnp.int32).max()))

    def _move_impl(self, x, order, *, width):
        """x [L, B, S, K, H], order [B, W] -> [L, B, width, K, H]"""
        moved = self._split(jnp.zeros((*x.shape[:2], width, *x.shape[3:]), x.dtype))
        return self._by_layers(moved, lambda moved, layer: jax.lax.dynamic_index_in_dim(x, layer), order)

    def _move_in_place_impl(self, x, order):
        return self._by_layers(x, jax.lax.dynamic_index_in_dim, order)

    def _by_layers(self, out, source, order):
        """Columns `order` of source(out, layer) [1, B, S, K, H] to the front of each layer of `out`: all at once is a copy."""

        def one_layer(layer, out):
            moved = _moved(source(out, layer), order)
            return self._split(jax.lax.dynamic_update_slice(out, moved, (layer, 0, 0, 0, 0)))

        return jax.lax.fori_loop(0, out.shape[0], one_layer, out)

    def _compacted(self, block: KVBlock) -> KVBlock:
        order = _front(block.valid)
        k, v = (self._move_in_place_impl(x, order) for x in (block.k, block.v))
        return KVBlock(k, v, jnp.take_along_axis(block.valid, order, axis=1))


def rows_spec(ndim: int) -> P:
    """Where an array of a `DecodeState` lies: a cache, an array of rows (or groups), or a scalar."""
    return P(None, BATCH, None, "tensor") if ndim == 5 else P(BATCH) if ndim else P()


def _front(valid: jax.Array) -> jax.Array:
    """valid [B, S] -> the columns [B, S] of each row with the valid ones first.

    Keys carry their rotation already, so columns may move freely as long as a row's order stays.
    """
    return jnp.argsort(~valid, axis=1, stable=True)


def _moved(x: jax.Array, order: jax.Array) -> jax.Array:
    """x [L, B, S, K, H], order [B, W] -> [L, B, W, K, H]"""
    return jnp.take_along_axis(x, order[None, :, :, None, None], axis=2)


def _rows_of(x: jax.Array, rows: jax.Array) -> jax.Array:
    """x [L, B, S, K, H], rows [R] -> [L, R, S, K, H], zeros where a row is outside [0, B).

    One after another: a gather would first copy the whole cache on TPUs.
    """
    size = (x.shape[0], 1, *x.shape[2:])

    def copy(n, out):
        here = (rows[n] >= 0) & (rows[n] < x.shape[1])
        row = jax.lax.dynamic_slice_in_dim(x, jnp.clip(rows[n], 0, x.shape[1] - 1), 1, axis=1)
        return jax.lax.dynamic_update_slice_in_dim(out, jnp.where(here, row, jnp.zeros(size, x.dtype)), n, axis=1)

    return jax.lax.fori_loop(0, rows.shape[0], copy, jnp.zeros((x.shape[0], rows.shape[0], *x.shape[2:]), x.dtype))


def _last(hidden: jax.Array, lengths: jax.Array) -> jax.Array:
    """hidden [B, T, D], lengths [B] -> [B, D]: behind each row's last real token."""
    return jnp.take_along_axis(hidden, jnp.maximum(lengths - 1, 0)[:, None, None], axis=1)[:, 0]
