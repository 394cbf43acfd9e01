"""The mini encoder: BERT architecture, trained so that similarity finds the entity and not the aspect.

Contrast: a query about one aspect of an entity against *any* passage of that entity, other entities in the batch as negatives. Two
small aspect classifiers, on the passage vectors and on the query vectors (thrown away), keep the aspect in both, so that a
query-side adapter can learn to match them; nothing aligns the two before it does.
"""

from __future__ import annotations

import random
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
from losses import masked_cross_entropy
from traces import ASPECT_IDS, FIRST_SEED

from bridge_jax.data.mini.language import ASPECTS, QUERIES, VAGUE_QUERIES
from bridge_jax.data.mini.world import make_world, passage_id
from bridge_jax.models import e5

CONFIG = e5.BertConfig(vocab_size=1024, hidden_size=96, intermediate_size=256, num_layers=2, num_heads=4, max_positions=64)
BATCH, LENGTH, TEMPERATURE = 256, 24, 0.05
STEPS, RATE = 200, 2e-3
ASPECT = 0.1  # weight of the classifiers


def pack(tokenizer, texts, width=LENGTH):
    ids = tokenizer(texts)["input_ids"]
    tokens, mask = np.zeros((len(ids), width), np.int32), np.zeros((len(ids), width), bool)
    for row, valid, text in zip(tokens, mask, ids):
        row[: len(text)] = text[:width]
        valid[: len(text)] = True
    return tokens, mask


def batches(tokenizer, steps: int):
    rng = random.Random("mini encoder 0")
    world = texts = None
    for step in range(steps):
        if step % 10 == 0:
            world = make_world(FIRST_SEED + 500 + step // 10)
            texts = {p.id: f'passage: "{p.title}"\n{p.text}' for p in world.passages}
            entities = list(world.entities.values())
        queries, passages, labels = [], [], ([], [])
        for entity in rng.sample(entities, BATCH):
            asked, told = rng.choice(ASPECTS[entity.kind]), rng.choice(ASPECTS[entity.kind])
            vague = rng.random() < 0.15
            form = rng.choice(VAGUE_QUERIES if vague else QUERIES)
            queries.append("query: " + form.format(x=entity.name, noun=rng.choice(asked.nouns)))
            passages.append(texts[passage_id(entity.id, told.name)])
            labels[0].append(ASPECT_IDS[entity.kind, told.name])
            labels[1].append(-1 if vague else ASPECT_IDS[entity.kind, asked.name])
        yield (*pack(tokenizer, queries), *pack(tokenizer, passages), np.asarray(labels))


def train(tokenizer, steps: int = STEPS, say=print):
    """-> (module, parameters)"""
    module = e5.Bert(CONFIG, jnp.float32, None, None)
    key = jax.random.key(0)
    params = module.init(key, jnp.zeros((1, 8), jnp.int32), jnp.ones((1, 8), jnp.int32))["params"]
    heads = (jnp.zeros((CONFIG.hidden_size, len(ASPECT_IDS))),) * 2  # of passages and of queries: nothing aligns the two
    optimiser = optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.adamw(optax.warmup_cosine_decay_schedule(0.0, RATE, steps // 20 + 1, steps, RATE / 20), weight_decay=0.01),
    )

    def loss_fn(trained, batch):
        params, heads = trained
        query_tokens, query_mask, passage_tokens, passage_mask, labels = batch
        queries = module.apply({"params": params}, query_tokens, query_mask)
        passages = module.apply({"params": params}, passage_tokens, passage_mask)
        identity = optax.softmax_cross_entropy_with_integer_labels(queries @ passages.T / TEMPERATURE, jnp.arange(BATCH)).mean()
        losses, rights = zip(
            *(
                masked_cross_entropy(10.0 * vectors @ heads, labels)
                for vectors, heads, labels in zip((passages, queries), heads, labels)
            )
        )
        return identity + ASPECT * sum(losses), (identity, *losses, *rights)

    @jax.jit
    def update(trained, opt, batch):
        (_, aux), gradient = jax.value_and_grad(loss_fn, has_aux=True)(trained, batch)
        updates, opt = optimiser.update(gradient, opt, trained)
        return optax.apply_updates(trained, updates), opt, aux

    trained = (params, heads)
    opt, began = optimiser.init(trained), time.time()
    for step, batch in enumerate(batches(tokenizer, steps), start=1):
        trained, opt, aux = update(trained, opt, batch)
        if step % 50 == 0 or step == steps:
            names = ("identity", "passage aspect", "query aspect", "passage accuracy", "query accuracy")
            say(
                f"encoder {step}/{steps} "
                + " ".join(f"{n} {float(v):.3f}" for n, v in zip(names, aux))
                + f" {time.time() - began:.0f}s"
            )
    return module, trained[0]


def recall(module, params, tokenizer, questions=1500) -> dict[str, float]:
    """recall@1, @3, @40 of ideal one-hop queries over world 0."""
    world, rng = make_world(0), random.Random(1)
    apply = jax.jit(lambda tokens, mask: module.apply({"params": params}, tokens, mask))
    tokens, mask = pack(tokenizer, [f'passage: "{p.title}"\n{p.text}' for p in world.passages])
    vectors = np.concatenate([np.asarray(apply(tokens[i : i + 512], mask[i : i + 512])) for i in range(0, len(tokens), 512)])
    row = {p.id: n for n, p in enumerate(world.passages)}
    queries, golds = [], []
    for _ in range(questions):
        entity = rng.choice(list(world.entities.values()))
        aspect = rng.choice(ASPECTS[entity.kind])
        queries.append("query: " + rng.choice(QUERIES).format(x=entity.name, noun=rng.choice(aspect.nouns)))
        golds.append(row[passage_id(entity.id, aspect.name)])
    found = np.asarray(apply(*pack(tokenizer, queries))) @ vectors.T
    rank = (found > found[np.arange(questions), golds][:, None]).sum(1)
    return {f"recall@{k}": float((rank < k).mean()) for k in (1, 3, 9, 40)}
