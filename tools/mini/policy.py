"""The mini policy's warm start: next-token loss on generated tokens, and two auxiliary losses that are thrown away.

A causal reader must know, when it meets a value, which aspect the passage tells and whether that is what the last query wanted. The
auxiliary heads ask for exactly that, on the states after the last layer but one: the copying head above needs it there.
"""

from __future__ import annotations

import time

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
    "num_layers": 4,
    "num_heads": 6,
    "num_kv_heads": 6,
    "head_dim": 32,
    "tie_embeddings": True,
    "max_positions": 512,
}
LENGTH_STEP = 16
ADAM_RATE = 3e-3  # of embeddings, norms, biases and heads
TARGETS = 24  # at most so many generated tokens a trace


def make_model(eos: int) -> Qwen2:
    return Qwen2(Qwen2Config(**CONFIG, bos_token_id=None, eos_token_ids=(eos,), pad_token_id=eos), jnp.float32)


def pools(tokenizer, batch: int, seed: int, mix_at):
    """Endless batches of traces, rows of like length together. mix_at(step) -> (mix, hit)."""
    step, world = 0, 0
    order = np.random.default_rng(seed)
    while True:
        mix, hit = mix_at(step)
        writer = TraceWriter(tokenizer, world, mix, hit)
        world += 1
        rows = sorted((writer.trace() for _ in range(batch * 24)), key=lambda row: len(row.tokens))
        for start in order.permutation(24) * batch:
            part = rows[start : start + batch]
            width = -(-max(len(row.tokens) for row in part) // LENGTH_STEP) * LENGTH_STEP
            yield batch_of(part, width)
            step += 1


def targets_of(generated: np.ndarray, tokens: np.ndarray):
    """index [B, K] of the position that predicts each generated token, targets, weights."""
    B = len(tokens)
    index, target, weight = (np.zeros((B, TARGETS), kind) for kind in (np.int32, np.int32, np.float32))
    for b in range(B):
        at = np.flatnonzero(generated[b])[:TARGETS]
        index[b, : len(at)], target[b, : len(at)], weight[b, : len(at)] = at - 1, tokens[b, at], 1.0
    return index, target, weight


def train(
    tokenizer, steps: int, batch: int, lr: float, mix_at, seed: int = 0, say=print, aux_weight=0.3, evaluate=None, params=None
):
    """-> (model, parameters)"""
    model = make_model(tokenizer.eos_token_id)
    if params is None:
        params = model.init(jax.random.key(seed), jnp.zeros((1, 8), jnp.int32))["params"]
    D = CONFIG["hidden_size"]
    heads = {"aspect": jnp.zeros((D, len(ASPECT_IDS))), "relevant": jnp.zeros((D, 2))}
    # Muon on the kernels [L, in, out], Adam on everything else.
    schedule = optax.warmup_cosine_decay_schedule(0.0, 1.0, 100, max(steps, 101), 0.05)
    optimiser = optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.contrib.muon(
            lambda step: lr * schedule(step),
            weight_decay=0.01,
            adam_learning_rate=lambda step: ADAM_RATE * schedule(step),
            muon_weight_dimension_numbers=lambda tree: jax.tree.map(
                lambda x: optax.contrib.MuonDimensionNumbers(1, 2) if x.ndim == 3 and x.shape[1] > 8 else None, tree
            ),
        ),
    )

    def cross_entropy(scores, labels):
        chosen = labels >= 0
        loss = optax.softmax_cross_entropy_with_integer_labels(scores, jnp.maximum(labels, 0))
        right = (scores.argmax(-1) == labels) & chosen
        return (loss * chosen).sum() / jnp.maximum(chosen.sum(), 1), right.sum() / jnp.maximum(chosen.sum(), 1)

    def loss_fn(trained, tokens, aspect, relevant, index, target, weight):
        params, heads = trained
        hidden, taps = model.apply(
            {"params": params}, tokens, output="hidden",
            capture_intermediates=lambda module, _: type(module).__name__.endswith("Block"), mutable=["intermediates"],
        )  # fmt: skip
        tap = jax.tree.leaves(taps)[0][-2]  # [B, T, D] after the last layer but one
        tap = tap * jax.lax.rsqrt(jnp.mean(tap * tap, -1, keepdims=True) + 1e-6)
        aspect_loss, aspect_right = cross_entropy(tap @ heads["aspect"], aspect)
        relevant_loss, relevant_right = cross_entropy(tap @ heads["relevant"], relevant)
        chosen = jnp.take_along_axis(hidden, index[:, :, None], axis=1)
        logits = unembed(params, chosen, model.config)
        nll = optax.softmax_cross_entropy_with_integer_labels(logits, target) * weight
        right = (logits.argmax(-1) == target) * weight
        last = jnp.arange(TARGETS)[None] == weight.sum(1, keepdims=True) - 2  # the (last word of the) answer
        total = nll.sum() / weight.sum() + aux_weight * (aspect_loss + relevant_loss)
        return total, {
            "nll": nll.sum() / weight.sum(),
            "answer": (right * last).sum() / last.sum(),
            "aspect": aspect_right,
            "relevant": relevant_right,
        }

    @jax.jit
    def update(trained, opt, *arrays):
        (_, aux), gradient = jax.value_and_grad(loss_fn, has_aux=True)(trained, *arrays)
        updates, opt = optimiser.update(gradient, opt, trained)
        return optax.apply_updates(trained, updates), opt, aux

    trained = (params, heads)
    opt, began, sums, tokens = optimiser.init(trained), time.time(), [], 0
    stream = pools(tokenizer, batch, seed, mix_at)
    for step in range(1, steps + 1):
        b = next(stream)
        trained, opt, aux = update(trained, opt, b.tokens, b.aspect, b.relevant, *targets_of(b.generated, b.tokens))
        sums.append(aux)
        tokens += b.tokens.size
        if step % 50 == 0 or step == steps:
            mean = {name: float(np.mean([float(a[name]) for a in sums])) for name in aux}
            sums = []
            seconds = time.time() - began
            say(
                f"policy {step}/{steps} "
                + " ".join(f"{k} {v:.3f}" for k, v in mean.items())
                + f" {tokens / seconds:,.0f} tokens/s {seconds:.0f}s"
            )
            if evaluate is not None and step % 500 == 0:
                evaluate(step, model, trained[0])
    return model, trained[0]
