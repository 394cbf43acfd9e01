"""Training a whole text encoder on (query, passage, negatives): InfoNCE, AdamW, on the training mesh, resumable (METHOD 8).

Every step is a function of (pairs, seed, step), so a training that is killed goes on from its last saved state to the same weights.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import time
from collections.abc import Callable, Sequence

import jax
import numpy as np
import optax

from bridge_jax import distributed
from bridge_jax.errors import UserError
from bridge_jax.files import AnyPath, append_text, as_path, make_folder, write_text
from bridge_jax.mesh import BATCH, batch_ways, put, shardings
from bridge_jax.models import e5
from bridge_jax.objectives.info_nce import PairBatch, info_nce_gradient
from bridge_jax.training.metrics import read_metrics
from bridge_jax.training.sft import SFTState, StateSaver, epoch_batches

WARMUP = 0.1  # of the steps; then the rate falls linearly to 0


@dataclasses.dataclass(frozen=True)
class Pair:
    """A query as the encoder reads it, the corpus row to find, its negatives' rows, and all rows that are right for it."""

    query: str
    positive: int
    negatives: tuple[int, ...]
    known: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class EncoderConfig:
    """batch: pairs in an optimiser step, over all devices. microbatch: pairs encoded at once. lr: at its highest."""

    epochs: int
    batch: int
    microbatch: int
    lr: float
    temperature: float
    seed: int = 0
    weight_decay: float = 0.01
    grad_clip: float = 1.0
    checkpoint_seconds: float = dataclasses.field(default=300.0, compare=False)  # between two saved states


def pack(encoder: e5.Encoder, corpus, pairs: Sequence[Pair], rows: int, microbatch: int, shape: tuple[int, int]) -> PairBatch:
    """At most `rows` pairs as `rows` rows in parts of `microbatch`; shape: (M passages a row, K known ones)."""
    M, K = shape
    passage_rows, known = np.full((rows, M), -1, np.int32), np.full((rows, K), -1, np.int32)
    for n, pair in enumerate(pairs):
        passage_rows[n, : 1 + len(pair.negatives)] = pair.positive, *pair.negatives
        known[n, : len(pair.known)] = pair.known
    queries = e5.pad(encoder, e5.tokenize(encoder, [pair.query for pair in pairs], "query"), rows)
    there = np.flatnonzero(passage_rows.reshape(-1) >= 0)
    texts = e5.tokenize(encoder, [corpus.contents(row) for row in passage_rows.reshape(-1)[there].tolist()], "passage")
    ids: list[Sequence[int]] = [()] * passage_rows.size
    for at, tokens in zip(there.tolist(), texts, strict=True):
        ids[at] = tokens
    passages = [x.reshape(rows, M, -1) for x in e5.pad(encoder, ids)]
    arrays = (*queries, *passages, passage_rows, known, np.arange(rows) < len(pairs))
    return PairBatch(*(x.reshape(-1, microbatch, *x.shape[1:]) for x in arrays))


def place(batch: PairBatch, mesh) -> PairBatch:
    """On the devices: the rows of every part split over the mesh's batch axes where they divide."""
    if mesh is None:
        return jax.device_put(batch)
    rows = BATCH if batch.mask.shape[1] % batch_ways(mesh) == 0 else None
    return jax.tree.map(lambda x: put(x, jax.NamedSharding(mesh, jax.P(None, rows))), batch)


def optimiser(config: EncoderConfig, steps: int) -> optax.GradientTransformation:
    """AdamW behind a clip. The first update has lr / warmup, the last one not quite 0."""
    warmup = max(1, round(WARMUP * steps))

    def rate(count):
        falling = (steps - count) / max(1, steps - warmup + 1)
        return config.lr * jax.numpy.minimum((count + 1) / warmup, falling)

    return optax.chain(optax.clip_by_global_norm(config.grad_clip), optax.adamw(rate, weight_decay=config.weight_decay))


def train(
    tower: e5.Encoder,
    corpus,
    pairs: Sequence[Pair],
    config: EncoderConfig,
    folder: AnyPath,
    between: Callable[[], None] = lambda: None,
) -> tuple[dict, dict[str, float]]:
    """Train all of `tower` (its parameters on its module's mesh) -> (its parameters, metrics).

    Goes on from the state saved in `<folder>/state`; `<folder>/metrics.jsonl` has a row a step. With several processes all must
    call it. between: called before each step; it may raise to break off.

    Raises:
      UserError: the loss became non-finite.
    """
    folder, mesh = as_path(folder), tower.module.mesh
    ways = 1 if mesh is None else batch_ways(mesh)
    microbatch = -(-min(config.microbatch, len(pairs)) // ways) * ways
    batch = -(-min(config.batch, len(pairs)) // microbatch) * microbatch
    plan = [part for epoch in range(config.epochs) for part in epoch_batches(len(pairs), batch, config.seed, epoch)]
    shape = 1 + max(len(pair.negatives) for pair in pairs), max(len(pair.known) for pair in pairs)
    optimise = optimiser(config, len(plan))
    params = jax.tree.map(lambda x: x.copy(), tower.params)  # the update takes its state over
    state = SFTState(jax.numpy.int32(0), params, _init(optimise, params, mesh, tower.module.config.units))
    make_folder(folder)
    saver = StateSaver(folder / "state")
    state = saver.restore(state)
    start = int(state.step)
    path, began = folder / "metrics.jsonl", time.monotonic()
    if distributed.is_main():
        kept = [row for row in read_metrics(path) if row["step"] <= start]
        write_text(path, "".join(json.dumps(row) + "\n" for row in kept))
    saved = time.monotonic()
    try:
        for step in range(start, len(plan)):
            between()
            chosen = place(pack(tower, corpus, [pairs[i] for i in plan[step]], batch, microbatch, shape), mesh)
            params, opt, found = _step(tower.module, config, len(plan), (state.params, state.opt), chosen)
            state = SFTState(jax.numpy.int32(step + 1), params, opt)
            row = {"step": step + 1, **{name: float(value) for name, value in found.items()}}
            if not all(map(math.isfinite, row.values())):
                raise UserError(f"encoder training: loss {row['loss']} at step {step + 1}: lower config.agentic.lr ({config.lr})")
            if distributed.is_main():
                append_text(path, json.dumps(row) + "\n")
            if distributed.on_main(lambda since=saved: time.monotonic() - since >= config.checkpoint_seconds):
                saver.save(step + 1, state)
                saved = time.monotonic()
    except distributed.Preempted:
        if int(state.step) > start:
            saver.save(int(state.step), state)
        raise
    finally:
        saver.close()
    rows = distributed.on_main(lambda: read_metrics(path))
    last = rows[-max(1, len(plan) // config.epochs) :]
    return state.params, {
        "steps": len(plan),
        "batch": batch,
        "loss_first": rows[0]["loss"],
        "loss_last_epoch": float(np.mean([row["loss"] for row in last])),
        "hits_last_epoch": float(np.mean([row["hits"] for row in last])),
        "seconds": time.monotonic() - began,
    }


def _init(optimise, params, mesh, units):
    """The optimiser's state, its moments where their parameters are."""
    if mesh is None:
        return optimise.init(params)
    places = shardings(mesh, jax.eval_shape(optimise.init, params), units)
    return jax.jit(optimise.init, out_shardings=places)(params)


@functools.partial(jax.jit, static_argnums=(0, 1, 2), donate_argnums=3)
def _step(module, config: EncoderConfig, steps: int, state, batch: PairBatch):
    params, opt = state
    gradient, (total, count, hits) = info_nce_gradient(module, params, batch, config.temperature)
    updates, opt = optimiser(config, steps).update(gradient, opt, params)
    count = count.clip(1.0)
    metrics = {"loss": total / count, "hits": hits / count, "grad_norm": optax.tree.norm(gradient)}
    return optax.apply_updates(params, updates), opt, metrics
