"""What each executed search is credited by: the gold answer (METHOD 3) or the next action of a rollout that succeeded (METHOD 12).

A turn is *followed by another search* when its rollout executed one more; all others are last turns. METHOD 12 scores "turns
followed by another generated span" through that span and keeps the paper's l_d "on last turns". An answer is a generated span
too, so on a turn that is followed by the answer the two phrases collide; here last turns keep l_d, for three reasons: l'_d exists
for what l_d cannot see, and after the last hop l_d sees it; all that l'_d would add there is the wording of thought and tags; and
next_action and `credit.first_hop = mask` then act on the same turns, so that they can be compared. Hence such a turn's own
next span is always a search; a sibling's may be an answer.

The span is the rollout's own when it succeeded, else that of a succeeded sibling of its group at the same turn number, scored
after the failed rollout's own history and candidates. `credit.sibling` says which siblings may serve: those with the same tokens up
to the search ("history", METHOD 12), with the same query ("query", for long thoughts, which are never equal twice), or "any". Of
several siblings the first, in sample order, that searched there once more (as the credited rollout did; on a two-hop question an
answer at that point was a lucky one), and only then the first that answered. A span that a corrective observation or the end of the
context cut off is no action and is passed over.

Known limit: on a one-hop question the next action after a miss is to ask again, which is likeliest under an unhelpful passage.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Literal

import numpy as np
from ml_collections import ConfigDict

from bridge_jax.objectives.rewards import normalize_answer
from bridge_jax.rollout.episodes import Episode, Turn

Kind = Literal["answer", "next_action", "both", "masked"]
Author = Literal["own", "sibling"]


@dataclasses.dataclass(frozen=True, eq=False)
class TurnCredit:
    """One executed search and its credit.

    episode, number: which rollout of the step, which of its turns (from 0). kind: "both" is the sum of l_d and l'_d, "masked" no
    credit at all. span, author: the scored next action [S] int32 and whose it is; None without one.
    likelihood: [C] float32, l_d, l'_d or their sum; None before scoring, and when masked.
    """

    episode: int
    number: int
    turn: Turn
    kind: Kind
    span: np.ndarray | None = None
    author: Author | None = None
    likelihood: np.ndarray | None = None


def credit_of(config: ConfigDict, episodes: Sequence[Episode], scores: np.ndarray, episode: int, number: int) -> TurnCredit:
    """The credit, not yet scored, of one turn of a step.

    Args:
      scores: [B] rewards of the episodes, which stand in groups of `config.grpo.group_size`.
    """
    credit, turn = config.credit, episodes[episode].turns[number]
    if not _searched_again(episodes[episode], number):
        return TurnCredit(episode, number, turn, "answer")
    if credit.first_hop == "mask":
        return TurnCredit(episode, number, turn, "masked")
    if credit.target == "answer":
        return TurnCredit(episode, number, turn, "answer")
    found = successful_span(episodes, scores, config.grpo.group_size, episode, number, credit.sibling)
    if found is None:
        return TurnCredit(episode, number, turn, "masked" if credit.no_span == "zero" else "answer")
    return TurnCredit(episode, number, turn, credit.target, *found)


def successful_span(
    episodes: Sequence[Episode], scores: np.ndarray, group_size: int, episode: int, number: int, sibling: str = "history"
) -> tuple[np.ndarray, Author] | None:
    """The next action to score a turn by (see the module's text) and its author; None when no successful rollout has one."""
    ours = _shared(episodes[episode], number, sibling)
    first = episode // group_size * group_size
    group = sorted(range(first, first + group_size), key=lambda i: (i != episode, not _searched_again(episodes[i], number), i))
    for i in group:
        if i != episode and _shared(episodes[i], number, sibling) != ours:
            continue
        if scores[i] >= 1.0 and (span := next_span(episodes[i], number)) is not None:
            return span, "own" if i == episode else "sibling"
    return None


def next_span(episode: Episode, number: int) -> np.ndarray | None:
    """The ids [S] int32 sampled between a turn's observation and the end of the search or answer that follows; None without one."""
    if number >= len(episode.turns):
        return None
    start = episode.turns[number].observation[1]
    if _searched_again(episode, number):
        end = episode.turns[number + 1].history
    elif episode.status == "answered":
        end = len(episode.tokens)
    else:
        return None
    return episode.tokens[start:end] if episode.generated[start:end].all() else None


def _shared(episode: Episode, number: int, sibling: str) -> object:
    """What a sibling must have in common with a rollout at a turn; the prompt they always share. None without such a turn."""
    if number >= len(episode.turns):
        return None
    turn = episode.turns[number]
    if sibling == "history":
        return episode.tokens[: turn.history].tobytes()
    return normalize_answer(turn.query) if sibling == "query" else ""


def _searched_again(episode: Episode, number: int) -> bool:
    return number + 1 < len(episode.turns)
