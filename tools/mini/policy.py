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
from losses import masked_cross_entropy
from traces import ASPECT_IDS, Batch, TraceWriter, batch_of

from bridge_jax.data.mini.language import vocabulary
from bridge_jax.models.qwen2 import Qwen2, Qwen2Config, unembed

CONFIG = {
    "vocab_size": 1024,
    "hidden_size": 128,
    "intermediate_size": 320,
    "num_layers": 5,
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
COPY_ROWS = 10
LOOK_BACK = (1, 1, 2)
AUXILIARY = 0.3  # weight of the auxiliary losses


STEPS, RATE = 2000, 2e-2
COPY_STEPS = 200  # at the start: copy rows alone
COPIED = 2.0  # weight of names and answers against the other generated words, most of which are free choices
# From step: shares of (one_hop, two_hop, comparison), and how often the gold passage is forced into what is shown.
MIXES = ((0, (1.0, 0.0, 0.0), 0.95), (500, (0.6, 0.3, 0.1), 0.8), (1100, (0.35, 0.4, 0.25), 0.65))


def make_model(eos: int) -> Qwen2:
    config = Qwen2Config(**CONFIG, bos_token_id=None, eos_token_ids=(eos,), pad_token_id=eos)
    return Qwen2(config, jnp.float32)


def with_backward_heads(params: dict) -> dict:
    """`params` with LOOK_BACK's heads of the first layer looking one (or two) tokens back from the start.

    Copying a name needs two layers: "what stood before me?", then "where did the word I just wrote stand?". Waiting until training
    finds the first by chance takes thousands of steps at this size; with it in place the second is learned in two hundred. A bias b
    on the keys and the same bias turned by -d positions on the queries give the score sum_i b_i^2 cos(w_i (distance - d)).
    """
    H, slow = CONFIG["head_dim"], CONFIG["head_dim"] // 4  # the fast half of the frequencies tells neighbours apart
    strength = np.where(np.arange(H // 2) < slow, 2.4, 0.0)
    attention = {name: dict(params["layers"][name]) for name in ("q_proj", "k_proj")}
    keys, queries = (np.array(attention[name]["bias"]) for name in ("k_proj", "q_proj"))
    for head, distance in enumerate(LOOK_BACK):
        turn = 10000.0 ** (-2 * np.arange(H // 2) / H) * -distance
        keys[0, head * H : (head + 1) * H] = np.concatenate([strength, np.zeros(H // 2)])
        queries[0, head * H : (head + 1) * H] = np.concatenate([strength * np.cos(turn), strength * np.sin(turn)])
    attention["k_proj"]["bias"], attention["q_proj"]["bias"] = jnp.asarray(keys), jnp.asarray(queries)
    return params | {"layers": params["layers"] | attention}


def batches(tokenizer):
    """Endless batches: of copy rows, then of traces (rows of like length together) with a few copy rows."""
    rng = np.random.default_rng(0)
    words = np.asarray(tokenizer.convert_tokens_to_ids(vocabulary()), np.int32)
    for _ in range(COPY_STEPS):
        yield copy_rows(48, 40, words, rng)
    step, world = COPY_STEPS, 0
    while True:
        writer = TraceWriter(tokenizer, world, *[mix for start, *mix in MIXES if start <= step][-1])
        world += 1
        rows = sorted((writer.trace() for _ in range(BATCH * 24)), key=lambda row: len(row.tokens))
        for start in rng.permutation(24) * BATCH:
            part = rows[start : start + BATCH]
            width = -(-max(len(row.tokens) for row in part) // LENGTH_STEP) * LENGTH_STEP
            parts = batch_of(part, width), copy_rows(COPY_ROWS, width, words, rng)
            yield Batch(*(np.concatenate(pair) for pair in zip(*(vars(part).values() for part in parts))))
            step += 1


def copy_rows(count: int, width: int, words: np.ndarray, rng: np.random.Generator) -> Batch:
    """Random words, then pieces of them again. Names and values are copied word by word, and traces alone give each of the 900
    words too few chances to learn how."""
    half = width // 2
    tokens, again = np.zeros((count, width), np.int32), np.zeros((count, width), np.int32)
    for row, repeated in zip(tokens, again):
        row[:half] = rng.choice(words, half, replace=False)
        at = half
        while at < width:
            length = min(int(rng.integers(3, 7)), width - at)
            start = rng.integers(0, half - length + 1)
            row[at : at + length] = row[start : start + length]
            repeated[at + 1 : at + length] = 1  # a piece's first word cannot be known
            at += length
        positions = np.flatnonzero(repeated)
        repeated[rng.choice(positions, max(0, len(positions) - TARGETS), replace=False)] = 0
    nothing = np.full((count, width), -1, np.int32)
    return Batch(tokens, again, again, nothing, nothing)


def targets_of(batch: Batch):
    """Of the generated tokens: index [B, K] of the position that predicts each, targets [B, K], weights [B, K]."""
    B = len(batch.tokens)
    index, target, weight = (np.zeros((B, TARGETS), kind) for kind in (np.int32, np.int32, np.float32))
    for b in range(B):
        at = np.flatnonzero(batch.generated[b])[:TARGETS]
        index[b, : len(at)], target[b, : len(at)] = at - 1, batch.tokens[b, at]
        weight[b, : len(at)] = np.where(batch.copied[b, at], COPIED, 1.0)
    return index, target, weight


def _optimiser(steps: int):
    """Muon on the kernels [L, in, out], Adam on everything else."""
    schedule = optax.warmup_cosine_decay_schedule(0.0, 1.0, 100, max(steps, 101), 0.05)
    return optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.contrib.muon(
            lambda step: RATE * schedule(step),
            weight_decay=0.01,
            adam_learning_rate=lambda step: ADAM_RATE * schedule(step),
            muon_weight_dimension_numbers=lambda tree: jax.tree.map(
                lambda x: optax.contrib.MuonDimensionNumbers(1, 2) if x.ndim == 3 and x.shape[1] > 8 else None, tree
            ),
        ),
    )


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
    aspect_loss, aspect_right = masked_cross_entropy(tap @ heads["aspect"], aspect)
    relevant_loss, relevant_right = masked_cross_entropy(tap @ heads["relevant"], relevant)
    chosen = jnp.take_along_axis(hidden, index[:, :, None], axis=1)
    logits = unembed(params, chosen, model.config)
    nll = optax.softmax_cross_entropy_with_integer_labels(logits, target)
    right, counted = logits.argmax(-1) == target, weight > 0
    traces = (relevant >= 0).any(1)[:, None]
    answer = traces & (jnp.arange(TARGETS)[None] == counted.sum(1, keepdims=True) - 2)  # the answer's last word
    copied = (weight > weight.min(where=counted, initial=jnp.inf)) & traces
    loss = (nll * weight).sum() / weight.sum()
    return loss + AUXILIARY * (aspect_loss + relevant_loss), {
        "nll": (nll * counted).sum() / counted.sum(),
        "answer": (right & answer).sum() / jnp.maximum(answer.sum(), 1),
        "copied": (right & copied).sum() / jnp.maximum(copied.sum(), 1),
        "repeated": (right & counted & ~traces).sum() / jnp.maximum((counted & ~traces).sum(), 1),
        "aspect": aspect_right,
        "relevant": relevant_right,
    }


def train(tokenizer, steps: int = STEPS, say=print):
    """-> (model, parameters)"""
    model = make_model(tokenizer.eos_token_id)
    params = with_backward_heads(model.init(jax.random.key(0), jnp.zeros((1, 8), jnp.int32))["params"])
    D = CONFIG["hidden_size"]
    trained = (params, {"aspect": jnp.zeros((D, len(ASPECT_IDS))), "relevant": jnp.zeros((D, 2))})
    optimiser = _optimiser(steps)

    @jax.jit
    def update(trained, opt, *arrays):
        (_, aux), gradient = jax.value_and_grad(lambda t: _loss(model, t, *arrays), has_aux=True)(trained)
        updates, opt = optimiser.update(gradient, opt, trained)
        return optax.apply_updates(trained, updates), opt, aux

    opt, began, sums, tokens = optimiser.init(trained), time.time(), [], 0
    for step, batch in zip(range(1, steps + 1), batches(tokenizer)):
        trained, opt, aux = update(trained, opt, batch.tokens, batch.aspect, batch.relevant, *targets_of(batch))
        sums.append(aux)
        tokens += batch.tokens.size
        if step % 50 == 0 or step == steps:
            means = " ".join(f"{name} {np.mean([float(a[name]) for a in sums]):.3f}" for name in aux)
            seconds, sums = time.time() - began, []
            say(f"policy {step}/{steps} {means} {tokens / seconds:,.0f} tokens/s {seconds:.0f}s")
    return model, trained[0]
