"""The mini policy's warm start: next-token loss on generated tokens, and two auxiliary losses that are thrown away.

A causal reader must know, when it meets a value, which aspect the passage tells and whether that is what the last query wanted. The
auxiliary heads ask for exactly that, on the states after the last layer but one: the copying head above needs it there.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import optax
from traces import ASPECT_IDS, TraceWriter, batch_of

from bridge_jax.models.qwen2 import Qwen2, Qwen2Config, unembed

CONFIG = {
    "vocab_size": 1024,
    "hidden_size": 128,
    "intermediate_size": 320,
    "num_heads": 6,
    "num_kv_heads": 6,
    "head_dim": 32,
    "tie_embeddings": True,
    "max_positions": 512,
}
LENGTH_STEP = 16
ADAM_RATE = 3e-3  # of embeddings, norms, biases and heads
TARGETS = 24  # at most so many generated tokens a trace
BATCH = 32
AUXILIARY = 0.3  # weight of the auxiliary losses


@dataclass(frozen=True)
class Stage:
    """A learning-rate cycle.

    layers: of the model; new ones are put in below the last and do nothing at first. copied: weight of names and answers against
    the other generated words, most of which are free choices. mixes: (from step, shares of the question forms, how often the gold
    passage is forced in).
    """

    layers: int
    steps: int
    rate: float
    copied: float
    mixes: tuple[tuple[int, tuple[float, float, float], float], ...]

    def mix_at(self, step: int) -> tuple[tuple[float, float, float], float]:
        return [mix for start, *mix in self.mixes if start <= step][-1]


STAGES = (
    Stage(4, 2400, 2e-2, 1.0, ((0, (1.0, 0.0, 0.0), 0.9), (700, (0.5, 0.35, 0.15), 0.6))),  # to read, then to search again
    Stage(6, 1700, 2e-2, 3.0, ((0, (0.3, 0.45, 0.25), 0.7),)),  # two hops: the name that was read becomes the next query
)


def make_model(eos: int, layers: int) -> Qwen2:
    config = Qwen2Config(**CONFIG, num_layers=layers, bos_token_id=None, eos_token_ids=(eos,), pad_token_id=eos)
    return Qwen2(config, jnp.float32)


def grow(params: dict, fresh: dict) -> dict:
    """`params` with the layers that `fresh` has more, below the last one. What they write is 0: the function stays."""

    def insert(path, old, new):
        extra = new[: len(new) - len(old)]
        if {"o_proj", "down_proj"} & {key.key for key in path}:
            extra = jnp.zeros_like(extra)
        return jnp.concatenate([old[:-1], extra, old[-1:]])

    return params | {"layers": jax.tree_util.tree_map_with_path(insert, params["layers"], fresh["layers"])}


def batches(tokenizer, stage: Stage, first_world: int):
    """Endless batches of traces, rows of like length together."""
    step, world = 0, first_world
    order = np.random.default_rng(0)
    while True:
        writer = TraceWriter(tokenizer, world, *stage.mix_at(step))
        world += 1
        rows = sorted((writer.trace() for _ in range(BATCH * 24)), key=lambda row: len(row.tokens))
        for start in order.permutation(24) * BATCH:
            part = rows[start : start + BATCH]
            width = -(-max(len(row.tokens) for row in part) // LENGTH_STEP) * LENGTH_STEP
            yield batch_of(part, width)
            step += 1


def targets_of(batch, copied: float):
    """Of the generated tokens: index [B, K] of the position that predicts each, targets [B, K], weights [B, K]."""
    B = len(batch.tokens)
    index, target, weight = (np.zeros((B, TARGETS), kind) for kind in (np.int32, np.int32, np.float32))
    for b in range(B):
        at = np.flatnonzero(batch.generated[b])[:TARGETS]
        index[b, : len(at)], target[b, : len(at)] = at - 1, batch.tokens[b, at]
        weight[b, : len(at)] = np.where(batch.copied[b, at], copied, 1.0)
    return index, target, weight


def _optimiser(stage: Stage):
    """Muon on the kernels [L, in, out], Adam on everything else."""
    schedule = optax.warmup_cosine_decay_schedule(0.0, 1.0, 100, max(stage.steps, 101), 0.05)
    return optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.contrib.muon(
            lambda step: stage.rate * schedule(step),
            weight_decay=0.01,
            adam_learning_rate=lambda step: ADAM_RATE * schedule(step),
            muon_weight_dimension_numbers=lambda tree: jax.tree.map(
                lambda x: optax.contrib.MuonDimensionNumbers(1, 2) if x.ndim == 3 and x.shape[1] > 8 else None, tree
            ),
        ),
    )


def _cross_entropy(scores, labels):
    """(mean loss, accuracy) over labels >= 0."""
    chosen = labels >= 0
    loss = optax.softmax_cross_entropy_with_integer_labels(scores, jnp.maximum(labels, 0))
    count = jnp.maximum(chosen.sum(), 1)
    return (loss * chosen).sum() / count, ((scores.argmax(-1) == labels) & chosen).sum() / count


def _loss(model: Qwen2, trained, tokens, aspect, relevant, index, target, weight):
    params, heads = trained
    hidden, taps = model.apply(
        {"params": params},
        tokens,
        output="hidden",
        capture_intermediates=lambda module, _: type(module).__name__.endswith("Block"),
        mutable=["intermediates"],
    )
    tap = jax.tree.leaves(taps)[0][-2]  # [B, T, D] after the last layer but one
    tap = tap * jax.lax.rsqrt(jnp.mean(tap * tap, -1, keepdims=True) + 1e-6)
    aspect_loss, aspect_right = _cross_entropy(tap @ heads["aspect"], aspect)
    relevant_loss, relevant_right = _cross_entropy(tap @ heads["relevant"], relevant)
    chosen = jnp.take_along_axis(hidden, index[:, :, None], axis=1)
    logits = unembed(params, chosen, model.config)
    nll = optax.softmax_cross_entropy_with_integer_labels(logits, target)
    right, counted = logits.argmax(-1) == target, weight > 0
    answer = jnp.arange(TARGETS)[None] == counted.sum(1, keepdims=True) - 2  # the answer's last word
    copied = weight > weight.min(where=counted, initial=jnp.inf)
    loss = (nll * weight).sum() / weight.sum()
    return loss + AUXILIARY * (aspect_loss + relevant_loss), {
        "nll": (nll * counted).sum() / counted.sum(),
        "answer": (right & answer).sum() / answer.sum(),
        "copied": (right & copied).sum() / jnp.maximum(copied.sum(), 1),
        "aspect": aspect_right,
        "relevant": relevant_right,
    }


def train(tokenizer, stages=STAGES, say=print, after_stage=lambda number, trained: None, trained=None, first=0):
    """-> (model, parameters). trained, first: go on from what `after_stage` was given, at stage number `first`."""
    for number, stage in enumerate(stages[first:], start=first):
        model = make_model(tokenizer.eos_token_id, stage.layers)
        fresh = model.init(jax.random.key(number), jnp.zeros((1, 8), jnp.int32))["params"]
        if trained is None:
            D = CONFIG["hidden_size"]
            trained = (fresh, {"aspect": jnp.zeros((D, len(ASPECT_IDS))), "relevant": jnp.zeros((D, 2))})
        else:
            trained = (grow(trained[0], fresh), trained[1])
        trained = _train_stage(model, trained, stage, tokenizer, 300 * number, say)
        after_stage(number, trained)
    return model, trained[0]


def _train_stage(model, trained, stage: Stage, tokenizer, first_world: int, say):
    optimiser = _optimiser(stage)

    @jax.jit
    def update(trained, opt, *arrays):
        (_, aux), gradient = jax.value_and_grad(lambda t: _loss(model, t, *arrays), has_aux=True)(trained)
        updates, opt = optimiser.update(gradient, opt, trained)
        return optax.apply_updates(trained, updates), opt, aux

    opt, began, sums, tokens = optimiser.init(trained), time.time(), [], 0
    for step, batch in zip(range(1, stage.steps + 1), batches(tokenizer, stage, first_world)):
        arrays = (batch.tokens, batch.aspect, batch.relevant, *targets_of(batch, stage.copied))
        trained, opt, aux = update(trained, opt, *arrays)
        sums.append(aux)
        tokens += batch.tokens.size
        if step % 50 == 0 or step == stage.steps:
            means = " ".join(f"{name} {np.mean([float(a[name]) for a in sums]):.3f}" for name in aux)
            seconds, sums = time.time() - began, []
            say(f"policy {step}/{stage.steps} {means} {tokens / seconds:,.0f} tokens/s {seconds:.0f}s")
    return trained
