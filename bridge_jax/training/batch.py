"""Episodes -> the packed arrays of one step. Lengths fall into few buckets, so that few programs are compiled."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import numpy as np
from ml_collections import ConfigDict

from bridge_jax.mesh import BATCH, batch_ways, put
from bridge_jax.models import e5
from bridge_jax.objectives.bilevel import Rollouts, Turns
from bridge_jax.rollout.episodes import Episode
from bridge_jax.training import packing as packings
from bridge_jax.training.assets import Assets
from bridge_jax.training.next_action import TurnCredit
from bridge_jax.training.packing import Packing

LENGTH_BUCKETS = 8  # padded rollout lengths there may be


def row_widths(longest: int, limit: int) -> range:
    """T of rows: `longest` rounded up to one of LENGTH_BUCKETS steps of `limit`, each a multiple of 64, and on to its double, but
    no further than `limit` rounded up."""
    step = -(-limit // (64 * LENGTH_BUCKETS)) * 64
    first, last = (-(-length // step) * step for length in (longest, limit))
    return range(first, min(2 * first, last) + 1, step)


def pack_rollouts(
    config: ConfigDict, mesh, episodes: Sequence[Episode], rewards: np.ndarray, advantages: np.ndarray, trained: np.ndarray
) -> Rollouts:
    """A step's rollouts, packed. One without a trained token counts nowhere and takes no place.

    Args:
      rewards, advantages: [B] float32. trained: [B] bool, False for rollouts that count nowhere (faults, filtered groups).
    """
    lengths = [
        len(e.prompt) + len(e.tokens) if wanted and np.any(e.generated) else 0 for e, wanted in zip(episodes, trained, strict=True)
    ]
    widths = row_widths(max(1, *lengths), config.rollout.max_prompt_tokens + config.rollout.max_response_tokens)
    minibatch = config.grpo.minibatch_questions * config.grpo.group_size
    packing = packings.pack(lengths, minibatch, config.grpo.microbatch, widths, batch_ways(mesh))
    return lay_out(packing, episodes, rewards, advantages, trained)


def lay_out(
    packing: Packing, episodes: Sequence[Episode], rewards: np.ndarray, advantages: np.ndarray, trained: np.ndarray
) -> Rollouts:
    """The arrays [S, P, R, T] of a packing: of each rollout its prompt, then everything that followed. Arguments as above."""
    P, R, T = packing.shape

    def zeros(dtype):
        return np.zeros((len(packing.minibatches), P, R, T), dtype)

    tokens, positions, segments, mask = zeros(np.int32), zeros(np.int32), zeros(np.int32), zeros(bool)
    logps, advantage, reward = zeros(np.float32), zeros(np.float32), zeros(np.float32)
    for s, rows in enumerate(packing.minibatches):
        for number, row in enumerate(rows):
            at = (s, *divmod(number, R))
            start = 0
            for segment, b in enumerate(row, 1):
                episode = episodes[b]
                own, end = start + len(episode.prompt), start + len(episode.prompt) + len(episode.tokens)
                tokens[at][start:own], tokens[at][own:end] = episode.prompt, episode.tokens
                positions[at][start:end] = np.arange(end - start)
                segments[at][start:end] = segment
                mask[at][own:end] = episode.generated & trained[b]
                logps[at][own:end] = episode.logps
                advantage[at][start:end], reward[at][start:end] = advantages[b], rewards[b]
                start = end
    return Rollouts(tokens, positions, segments, mask, logps, advantage, rewards=reward)


def packing_fill(rollouts: Rollouts) -> float:
    """Real tokens / computed tokens; 0 when there are none."""
    real = np.asarray(rollouts.segment_ids) > 0
    computed = np.any(real, (2, 3)).sum() * real[0, 0].size  # empty micro-batches are left out
    return float(real.sum() / max(computed, 1))


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
    """On the devices: the rows split over the mesh's batch axes where they divide. All processes hold the same batch."""
    if mesh is None:
        return jax.device_put(batch)
    axis = 2 if isinstance(batch, Rollouts) else 0
    split, whole = (jax.sharding.NamedSharding(mesh, jax.P(*(None,) * axis, rows)) for rows in (BATCH, None))
    return jax.tree.map(lambda x: put(x, whole if x.shape[axis] % batch_ways(mesh) else split), batch)
