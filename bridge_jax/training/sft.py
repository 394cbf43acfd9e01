"""Supervised training on traces: next-token NLL of the generated tokens, all parameters, AdamW, exact accumulation, exact resume.

Every step is a function of (seed, step): the epoch's permutation gives the batch, the batch is sorted by length and cut into
micro-batches, each padded to a few lengths. A micro-batch adds (sum of NLL, its gradient, number of trained tokens); the update
divides by the step's total, so the gradient is that of the batch's token mean whatever the micro-batches are.

Only positions that predict a trained token go through the vocabulary: about a fifth of a trace.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import sys
import time
from collections.abc import Sequence

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from bridge_jax.errors import UserError
from bridge_jax.files import AnyPath, absolute, append_text, as_path, delete_folder, write_text, writing
from bridge_jax.mesh import batch_sharding, batch_ways
from bridge_jax.models.qwen2 import Qwen2, unembed
from bridge_jax.objectives.logprobs import token_logps
from bridge_jax.terminal import Remaining
from bridge_jax.training.metrics import read_metrics
from bridge_jax.training.traces import Trace

LENGTH_STEP = 64  # sequence lengths are multiples of it: few compilations
TARGET_STEP = 64


@dataclasses.dataclass(frozen=True)
class SFTConfig:
    """lr: the peak, after a linear warm-up over the first twentieth of the steps; then a cosine to a tenth of it."""

    epochs: int
    batch: int
    microbatch: int
    lr: float
    seed: int = 0
    weight_decay: float = 0.01
    grad_clip: float = 1.0
    checkpoint_seconds: float = 120.0  # between two saved states


@flax.struct.dataclass
class SFTBatch:
    """Rows of traces. tokens, segment_ids [B, T] int32 (1 = text, 0 = padding). Of the trained tokens: index [B, K] of the position
    that predicts each, targets [B, K], weight [B, K] float32 (0 = padding)."""

    tokens: jax.Array
    segment_ids: jax.Array
    index: jax.Array
    targets: jax.Array
    weight: jax.Array


@flax.struct.dataclass
class SFTState:
    step: jax.Array
    params: dict
    opt: optax.OptState


def pack(traces: Sequence[Trace], rows: int, targets: int) -> SFTBatch:
    """At most `rows` traces as a batch of exactly `rows` rows, T a multiple of LENGTH_STEP, K = `targets`."""
    longest = max(len(trace.prompt) + len(trace.tokens) for trace in traces)
    length = -(-longest // LENGTH_STEP) * LENGTH_STEP
    tokens, segment_ids = np.zeros((rows, length), np.int32), np.zeros((rows, length), np.int32)
    index, target = np.zeros((rows, targets), np.int32), np.zeros((rows, targets), np.int32)
    weight = np.zeros((rows, targets), np.float32)
    for row, trace in enumerate(traces):
        whole = np.concatenate([trace.prompt, trace.tokens])
        tokens[row, : len(whole)] = whole
        segment_ids[row, : len(whole)] = 1
        at = len(trace.prompt) + np.flatnonzero(trace.generated)
        index[row, : len(at)] = at - 1
        target[row, : len(at)] = whole[at]
        weight[row, : len(at)] = 1.0
    return SFTBatch(tokens, segment_ids, index, target, weight)


def trained_width(traces: Sequence[Trace]) -> int:
    """K of all batches: the most trained tokens of a trace, rounded up."""
    return -(-max(int(trace.generated.sum()) for trace in traces) // TARGET_STEP) * TARGET_STEP


def epoch_batches(count: int, batch: int, seed: int, epoch: int) -> list[list[int]]:
    """The epoch's batches of trace numbers; each trace once, the last batch may be smaller."""
    order = np.random.default_rng([seed, epoch]).permutation(count).tolist()
    return [order[start : start + batch] for start in range(0, count, batch)]


def microbatches(traces: Sequence[Trace], config: SFTConfig, targets: int) -> list[SFTBatch]:
    """A step's traces, longest first (equal lengths side by side: little padding), cut into micro-batches."""
    ordered = sorted(traces, key=lambda trace: -len(trace.prompt) - len(trace.tokens))
    parts = [ordered[start : start + config.microbatch] for start in range(0, len(ordered), config.microbatch)]
    return [pack(part, config.microbatch, targets) for part in parts]


def nll(model: Qwen2, params: dict, batch: SFTBatch) -> tuple[jax.Array, jax.Array]:
    """-> (summed negative log-likelihood of the trained tokens, their number), float32 scalars."""
    hidden = model.apply({"params": params}, batch.tokens, segment_ids=batch.segment_ids, output="hidden")
    chosen = jnp.take_along_axis(hidden, batch.index[:, :, None], axis=1)
    logps, _ = token_logps(chosen, lambda x: unembed(params, x, model.config), batch.targets)
    return -(logps * batch.weight).sum(), batch.weight.sum()


def optimiser(config: SFTConfig, steps: int) -> optax.GradientTransformation:
    warmup = max(1, steps // 20)
    schedule = optax.warmup_cosine_decay_schedule(
        config.lr / (warmup + 1), config.lr, warmup, max(steps, warmup + 1), end_value=config.lr / 10
    )
    return optax.chain(optax.clip_by_global_norm(config.grad_clip), optax.adamw(schedule, weight_decay=config.weight_decay))


class Trainer:
    """The jitted programs of one model. `mesh`: micro-batch rows are split over it when they divide."""

    def __init__(self, model: Qwen2, config: SFTConfig, steps: int, mesh=None):
        self.config, self.steps, self._mesh = config, steps, mesh
        self._optimiser = optimiser(config, steps)
        self._nll = jax.jit(functools.partial(nll, model))
        self._grad = jax.jit(functools.partial(_accumulate, model), donate_argnums=(1,))
        self._apply = jax.jit(functools.partial(_apply, self._optimiser), donate_argnums=(0,))
        self._zeros = jax.jit(lambda params: (jnp.float32(0), jnp.float32(0), jax.tree.map(jnp.zeros_like, params)))

    def start(self, params: dict) -> SFTState:
        """Own float32 copies of `params` (the update donates them) and a fresh optimiser."""
        params = jax.tree.map(lambda x: jnp.array(x, jnp.float32, copy=True), params)
        return SFTState(jnp.int32(0), params, self._optimiser.init(params))

    def update(self, state: SFTState, batches: Sequence[SFTBatch]) -> tuple[SFTState, dict[str, float]]:
        """One optimiser step over the micro-batches; `state` is consumed."""
        total = self._zeros(state.params)
        for batch in batches:
            total = self._grad(state.params, total, self._place(batch))
        state, metrics = self._apply(state, total)
        return state, {name: float(value) for name, value in metrics.items()}

    def loss(self, params: dict, batches: Sequence[SFTBatch]) -> float:
        """Mean NLL a trained token."""
        sums = [self._nll(params, self._place(batch)) for batch in batches]
        return sum(float(s) for s, _ in sums) / sum(float(n) for _, n in sums)

    def _place(self, batch: SFTBatch) -> SFTBatch:
        if self._mesh is None or self.config.microbatch % batch_ways(self._mesh):
            return jax.tree.map(jnp.asarray, batch)
        return jax.device_put(batch, batch_sharding(self._mesh))


def _accumulate(model, params, total, batch):
    (loss, count), grads = jax.value_and_grad(lambda p: nll(model, p, batch), has_aux=True)(params)
    return total[0] + loss, total[1] + count, jax.tree.map(jnp.add, total[2], grads)


def _apply(optimise, state, total):
    loss, count, grads = total
    grads = jax.tree.map(lambda g: g / jnp.maximum(count, 1.0), grads)
    updates, opt = optimise.update(grads, state.opt, state.params)
    metrics = {"loss": loss / jnp.maximum(count, 1.0), "grad_norm": optax.tree.norm(grads)}
    return SFTState(state.step + 1, optax.apply_updates(state.params, updates), opt), metrics


def train(
    model: Qwen2,
    params: dict,
    traces: Sequence[Trace],
    heldout: Sequence[Trace],
    config: SFTConfig,
    folder: AnyPath,
    mesh=None,
    name: str = "warm start",
) -> tuple[dict, dict[str, float]]:
    """Train on `traces`; go on from the state saved in `folder` when there is one. name: what a person is told that this is.

    Writes `<folder>/warmstart_metrics.jsonl` (one object a step; the held-out loss before and after), `<folder>/warmstart_state/`.

    Returns:
      (parameters float32, {"heldout_before", "heldout_after", "steps", "seconds"}).

    Raises:
      UserError: the loss became non-finite.
    """
    plan = [batch for epoch in range(config.epochs) for batch in epoch_batches(len(traces), config.batch, config.seed, epoch)]
    targets = trained_width([*traces, *heldout])
    trainer = Trainer(model, config, len(plan), mesh)
    check = microbatches(heldout, config, targets)
    state = trainer.start(params)
    folder = as_path(folder)
    saver = StateSaver(folder / "warmstart_state")
    state = saver.restore(state)
    start = int(state.step)
    log = _Log(folder / "warmstart_metrics.jsonl", start)
    if not start:
        log.write({"step": 0, "heldout/loss": trainer.loss(state.params, check), "heldout/traces": len(heldout)})
    began = saved = time.monotonic()
    with _Meter(name, len(plan), start) as meter:
        for step in range(start, len(plan)):
            chosen = [traces[i] for i in plan[step]]
            begin = time.monotonic()
            state, metrics = trainer.update(state, microbatches(chosen, config, targets))
            seconds = time.monotonic() - begin
            if not math.isfinite(metrics["loss"]) or not math.isfinite(metrics["grad_norm"]):
                raise UserError(f"{name}: loss {metrics['loss']} at step {step + 1}: lower config.warmstart.lr ({config.lr})")
            count = sum(len(trace.prompt) + len(trace.tokens) for trace in chosen)
            log.write({"step": step + 1, **metrics, "tokens": count, "tokens_per_second": count / seconds, "time/step": seconds})
            meter.step(step + 1, metrics["loss"], count, seconds)
            if time.monotonic() - saved >= config.checkpoint_seconds or step + 1 == len(plan):
                saver.save(step + 1, state)
                saved = time.monotonic()
    after = trainer.loss(state.params, check)
    log.write({"step": len(plan), "heldout/loss": after, "heldout/traces": len(heldout)})
    saver.close()
    before = next(row["heldout/loss"] for row in log.rows() if row["step"] == 0)
    return state.params, {
        "heldout_before": before,
        "heldout_after": after,
        "steps": len(plan),
        "seconds": time.monotonic() - began,
    }


class StateSaver:
    """The latest training state in a folder of its own; the one before stays until the new one is whole."""

    def __init__(self, folder: AnyPath):
        self._folder = absolute(folder)
        options = ocp.CheckpointManagerOptions(max_to_keep=1, enable_async_checkpointing=False, cleanup_tmp_directories=True)
        self._manager = ocp.CheckpointManager(self._folder, options=options)

    def restore(self, like: SFTState) -> SFTState:
        step = self._manager.latest_step()
        if step is None:
            return like
        abstract = jax.tree.map(ocp.utils.to_shape_dtype_struct, like)
        return self._manager.restore(step, args=ocp.args.StandardRestore(abstract))

    def save(self, step: int, state: SFTState) -> None:
        with writing(self._folder):
            self._manager.save(step, args=ocp.args.StandardSave(state))

    def close(self) -> None:
        self._manager.wait_until_finished()
        self._manager.close()


def delete_state(folder: AnyPath) -> None:
    """Free the disk once the trained model is written."""
    delete_folder(as_path(folder) / "warmstart_state")


class _Log:
    """`warmstart_metrics.jsonl`: rows behind the restored step are work that will be done again."""

    def __init__(self, path: AnyPath, start: int):
        self._path = path
        kept = [row for row in read_metrics(path) if row["step"] <= start and (row["step"] == 0) >= ("heldout/loss" in row)]
        write_text(path, "".join(json.dumps(row) + "\n" for row in (kept if start else [])))

    def write(self, row: dict) -> None:
        append_text(self._path, json.dumps(row) + "\n")

    def rows(self) -> list[dict]:
        return read_metrics(self._path)


class _Meter:
    """Loss, tokens/s and time left: a live bar on a terminal, plain lines elsewhere (the first steps, then every 10 seconds)."""

    PLAIN_SECONDS = 10.0

    def __init__(self, name: str, total: int, start: int):
        self._name, self._total, self._start = name, total, start
        self._console = Console(file=sys.stderr, highlight=False)
        self._bar = self._task = None
        self._tokens = self._seconds = 0.0
        self._left, self._spoke = Remaining(total, start), 0.0

    def __enter__(self) -> _Meter:
        if self._console.is_terminal:
            self._bar = Progress(
                TextColumn(self._name), MofNCompleteColumn(), BarColumn(), TextColumn("{task.description}"),
                TextColumn("ETA"), TimeRemainingColumn(), console=self._console,
            )  # fmt: skip
            self._task = self._bar.add_task("first step: compiling", total=self._total, completed=self._start)
            self._bar.start()
        return self

    def __exit__(self, *error) -> None:
        if self._bar:
            self._bar.stop()

    def step(self, number: int, loss: float, tokens: int, seconds: float) -> None:
        self._tokens, self._seconds = 0.8 * self._tokens + tokens, 0.8 * self._seconds + seconds
        self._left.step(number)
        text = f"loss {loss:.3f}  {self._tokens / self._seconds:,.0f} tokens/s"
        if self._bar:
            self._bar.update(self._task, completed=number, description=text)
        elif number == self._total or number - self._start <= 2 or time.monotonic() - self._spoke >= self.PLAIN_SECONDS:
            self._spoke = time.monotonic()
            self._console.print(f"{self._name} {number}/{self._total}  {text}  {self._left}", markup=False, soft_wrap=True)
