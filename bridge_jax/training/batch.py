"""Episodes -> the padded arrays of one step. Lengths fall into few buckets, so that few programs are compiled."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import numpy as np
from ml_collections import ConfigDict

from bridge_jax.mesh import batch_sharding
from bridge_jax.models import e5
from bridge_jax.objectives.bilevel import Rollouts, Turns
from bridge_jax.rollout.episodes import Episode, Turn
from bridge_jax.training.assets import Assets

LENGTH_BUCKETS = 8  # padded rollout lengths there may be


def rollout_length(longest: int, limit: int) -> int:
    """T: `longest` rounded up to one of LENGTH_BUCKETS equal steps of `limit`, each a multiple of 64."""
    step = -(-limit // (64 * LENGTH_BUCKETS)) * 64
    return -(-longest // step) * step


def pack_rollouts(episodes: Sequence[Episode], advantages: np.ndarray, trained: np.ndarray, limit: int) -> Rollouts:
    """B rollouts as rows [B, T]: prompt, then everything that followed.

    Args:
      advantages: [B] float32. trained: [B] bool, False for rows that count nowhere (environment faults, filtered groups).
      limit: the longest row there can be, in tokens.
    """
    B = len(episodes)
    # An episode without a token (its prompt was too long) leaves its row empty.
    T = rollout_length(max((len(e.prompt) + len(e.tokens) for e in episodes if len(e.tokens)), default=1), limit)
    tokens, segments = np.zeros((B, T), np.int32), np.zeros((B, T), np.int32)
    mask, logps = np.zeros((B, T), bool), np.zeros((B, T), np.float32)
    for b, episode in enumerate(episodes):
        if not len(episode.tokens):
            continue
        start, end = len(episode.prompt), len(episode.prompt) + len(episode.tokens)
        tokens[b, :start], tokens[b, start:end] = episode.prompt, episode.tokens
        segments[b, :end] = 1
        mask[b, start:end] = episode.generated & trained[b]
        logps[b, start:end] = episode.logps
    positions = np.broadcast_to(np.arange(T, dtype=np.int32), (B, T))
    return Rollouts(tokens, positions, segments, mask, logps, np.asarray(advantages, np.float32))


def choose_turns(episodes: Sequence[Episode], limit: int, seed: int, step: int) -> list[tuple[int, Turn]]:
    """Up to `limit` executed searches as (episode number, turn), zero-advantage ones included; a seeded draw when there are more.

    Searches of environment faults are left out: their rollouts carry no outcome.
    """
    turns = [(i, turn) for i, e in enumerate(episodes) if e.status != "environment_fault" for turn in e.turns]
    if len(turns) > limit:
        keep = np.random.default_rng([seed, step]).choice(len(turns), limit, replace=False)
        turns = [turns[i] for i in sorted(keep)]
    return turns


def turn_rows(config: ConfigDict) -> int:
    """U: rows of the turn arrays, the same every step: as many turns as can be credited, in whole minibatches."""
    most = min(config.credit.max_turns, config.train.questions * config.grpo.group_size * max(1, config.rollout.max_searches))
    return -(-most // config.credit.minibatch) * config.credit.minibatch


def pack_turns(
    assets: Assets, turns: Sequence[tuple[int, Turn]], likelihoods: Sequence[np.ndarray], advantages: np.ndarray, rows: int
) -> Turns:
    """Credited turns as arrays of `rows` rows; rows beyond `turns` are padding.

    Args:
      likelihoods: l [C] of each turn; -inf for what could not be scored. advantages: [B] of the episodes.
    """
    C, D = assets.engine.candidates, assets.index.dim
    ids = e5.tokenize(assets.encoder, [turn.query for _, turn in turns], kind="query") or [[]]
    query_tokens, query_mask = e5.pad(assets.encoder, ids, rows)
    vectors, doc_mask = np.zeros((rows, C, D), np.float32), np.zeros((rows, C), bool)
    likelihood, turn_advantages = np.zeros((rows, C), np.float32), np.zeros(rows, np.float32)
    for u, ((episode, turn), l_d) in enumerate(zip(turns, likelihoods, strict=True)):
        doc_mask[u] = (turn.rows >= 0) & np.isfinite(l_d)
        vectors[u] = assets.index.vectors(np.maximum(turn.rows, 0))
        likelihood[u] = np.where(doc_mask[u], l_d, 0.0)
        turn_advantages[u] = advantages[episode]
    mask = doc_mask.any(1)  # a gold answer without a token of its own cannot be scored
    return Turns(query_tokens, query_mask, vectors, doc_mask, likelihood, turn_advantages, mask)


def place(batch: Rollouts | Turns, mesh):
    """On the devices: leading axes split over the mesh's batch axes where they divide."""
    if mesh is None:
        return jax.tree.map(jax.numpy.asarray, batch)
    ways = mesh.shape["data"] * mesh.shape["fsdp"]
    whole = jax.sharding.NamedSharding(mesh, jax.P())
    return jax.tree.map(lambda x: jax.device_put(x, batch_sharding(mesh) if x.shape[0] % ways == 0 else whole), batch)
