"""Episodes -> the padded arrays of one step. Lengths fall into few buckets, so that few programs are compiled."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import numpy as np
from ml_collections import ConfigDict

from bridge_jax.mesh import batch_sharding
from bridge_jax.models import e5
from bridge_jax.objectives.bilevel import Rollouts, Turns
from bridge_jax.rollout.episodes import Episode
from bridge_jax.training.assets import Assets
from bridge_jax.training.next_action import TurnCredit

LENGTH_BUCKETS = 8  # padded rollout lengths there may be


def rollout_length(longest: int, limit: int) -> int:
    """T: `longest` rounded up to one of LENGTH_BUCKETS equal steps of `limit`, each a multiple of 64."""
    step = -(-limit // (64 * LENGTH_BUCKETS)) * 64
    return -(-longest // step) * step


def pack_rollouts(
    episodes: Sequence[Episode], rewards: np.ndarray, advantages: np.ndarray, trained: np.ndarray, limit: int
) -> Rollouts:
    """B rollouts as rows [B, T]: prompt, then everything that followed.

    Args:
      rewards, advantages: [B] float32. trained: [B] bool, False for rows that count nowhere (environment faults, filtered groups).
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
    advantages, rewards = np.asarray(advantages, np.float32), np.asarray(rewards, np.float32)
    return Rollouts(tokens, positions, segments, mask, logps, advantages, rewards=rewards)


def executed_searches(episodes: Sequence[Episode]) -> list[tuple[int, int]]:
    """(episode number, turn number) of every turn. Those of environment faults are left out: their rollouts carry no outcome."""
    return [(i, t) for i, e in enumerate(episodes) if e.status != "environment_fault" for t in range(len(e.turns))]


def choose(credits: Sequence[TurnCredit], limit: int, seed: int, step: int) -> list[TurnCredit]:
    """Up to `limit` of a step's turns, zero-advantage ones included; a seeded draw from more."""
    if len(credits) <= limit:
        return list(credits)
    keep = np.random.default_rng([seed, step]).choice(len(credits), limit, replace=False)
    return [credits[i] for i in sorted(keep)]


def turn_rows(config: ConfigDict) -> int:
    """U: rows of the turn arrays, the same every step: as many turns as can be credited, in whole minibatches."""
    most = min(config.credit.max_turns, config.train.questions * config.grpo.group_size * max(1, config.rollout.max_searches))
    return -(-most // config.credit.minibatch) * config.credit.minibatch


def pack_turns(assets: Assets, credits: Sequence[TurnCredit], advantages: np.ndarray, rows: int) -> Turns:
    """Scored turns as arrays of `rows` rows; rows beyond them have mask False.

    Args:
      credits: masked ones, which have no row, come last. advantages: [B] of the episodes.
    """
    credits = [credit for credit in credits if credit.kind != "masked"]
    C, U = assets.engine.candidates, len(credits)
    ids = e5.tokenize(assets.encoder, [credit.turn.query for credit in credits], kind="query") or [[]]
    query_tokens, query_mask = e5.pad(assets.encoder, ids, rows)
    found = np.full((rows, C), -1, np.int32)
    likelihood, turn_advantages = np.full((rows, C), -np.inf, np.float32), np.zeros(rows, np.float32)
    for u, credit in enumerate(credits):
        found[u] = credit.turn.rows
        if credit.likelihood is not None:
            likelihood[u] = credit.likelihood
    turn_advantages[:U] = advantages[[credit.episode for credit in credits]]
    doc_mask = (found >= 0) & np.isfinite(likelihood)
    vectors = np.zeros((rows, C, assets.index.dim), np.float32)
    vectors[:U] = assets.index.vectors(np.maximum(found[:U], 0))
    mask = doc_mask.any(1)  # False too for a gold answer without a token of its own
    return Turns(query_tokens, query_mask, vectors, doc_mask, np.where(doc_mask, likelihood, 0.0), turn_advantages, mask)


def place(batch: Rollouts | Turns, mesh):
    """On the devices: leading axes split over the mesh's batch axes where they divide."""
    if mesh is None:
        return jax.tree.map(jax.numpy.asarray, batch)
    ways = mesh.shape["data"] * mesh.shape["fsdp"]
    whole = jax.sharding.NamedSharding(mesh, jax.P())
    return jax.tree.map(lambda x: jax.device_put(x, batch_sharding(mesh) if x.shape[0] % ways == 0 else whole), batch)
