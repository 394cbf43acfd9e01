"""Answer rewards: exact match, token F1, sub-string match, and the reason behind every score.

Source: METHOD 2 (the normalisation is the one of SQuAD and Search-R1, so published EM numbers compare). Plain Python, no arrays.
Only *generated* answers reach these functions: finding the answer in a rollout is `rollout.protocol`'s business.
"""

from __future__ import annotations

import dataclasses
import math
import re
import string
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from bridge_jax.errors import UserError

_PUNCTUATION = str.maketrans("", "", string.punctuation)
_ARTICLES = re.compile(r"\b(?:a|an|the)\b")
_YES_NO = frozenset({"yes", "no", "noanswer"})

REASONS = ("correct", "wrong answer", "no answer", "cut off", "no search result", "environment fault")


def normalize_answer(text: str) -> str:
    """Lower-case, delete ASCII punctuation, delete the whole words a/an/the, collapse white space.

    Punctuation goes before articles, as in the reference: `A.I.` becomes `ai`, and the `a` of `a-b` stays (`ab`).
    """
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def _check_golds(golds: Sequence[str]) -> None:
    # A lone string would be read as a list of letters and reward the answer "P" for "Paris".
    if isinstance(golds, str):
        raise TypeError("golds must be a list of strings, not one string")


def _same(text: str, gold: str) -> bool:
    left, right = normalize_answer(text), normalize_answer(gold)
    if left or right:
        return left == right
    # Both vanish ("A", "The The", "???"): normalised, every such answer would equal every other and the empty one.
    return bool(text.strip()) and text.lower().split() == gold.lower().split()


def exact_match(text: str | None, golds: Sequence[str]) -> float:
    """1.0 when the normalised `text` equals a normalised gold answer, else 0.0. An empty prediction never matches."""
    _check_golds(golds)
    return float(text is not None and any(_same(text, gold) for gold in golds))


def sub_em(text: str | None, golds: Sequence[str]) -> float:
    """1.0 when some normalised gold answer occurs inside the normalised `text` (as characters, like Search-R1's), else 0.0."""
    _check_golds(golds)
    if text is None:
        return 0.0
    prediction = normalize_answer(text)
    inside = any(gold and gold in prediction for gold in map(normalize_answer, golds))
    return float(inside or exact_match(text, golds))


def f1(text: str | None, golds: Sequence[str]) -> float:
    """Best token F1 over the gold answers, in [0, 1].

    As HotpotQA scores it: a yes/no answer (on either side) is right or wrong, it earns no partial overlap.
    """
    _check_golds(golds)
    return max((_f1_one(text, gold) for gold in golds), default=0.0) if text is not None else 0.0


def _f1_one(text: str, gold: str) -> float:
    if _same(text, gold):
        return 1.0
    left, right = normalize_answer(text), normalize_answer(gold)
    if left in _YES_NO or right in _YES_NO:
        return 0.0
    prediction, truth = left.split(), right.split()
    common = sum((Counter(prediction) & Counter(truth)).values())
    # 2PR/(P+R) with P = common/|prediction| and R = common/|truth|
    return 2.0 * common / (len(prediction) + len(truth)) if common else 0.0


Reward = Callable[[Any], float]  # of an Episode; what `config.reward.function` names


def own_reward(reward: Reward, episode: Any) -> float:
    """What a reward of one's own gives an Episode.

    Raises:
      UserError: it returned something else than a finite number.
    """
    score = reward(episode)
    try:
        number = float(score)
    except (TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number):
        raise UserError(
            f"config.reward.function returned {score!r} for question {episode.question.id!r}; it must be a finite number"
        )
    return number


def score_episode(answer: str | None, status: str, golds: Sequence[str], had_search_result: bool) -> tuple[float, str]:
    """The reward of one rollout and why it got it.

    answer: text of the last generated <answer>, or None. status: `Episode.status`. had_search_result: at least one search
    of the rollout returned passages. Returns (0.0 or 1.0, one of REASONS). An environment fault scores 0 but must be left
    out of the update (`valid` of `grpo.group_advantages`). A wrong answer given without a single search result is reported as
    "no search result": it says where to look first.
    """
    if status == "environment_fault":
        return 0.0, "environment fault"
    if answer is None or not answer.strip():
        return 0.0, "cut off" if status in ("truncated", "context_full") else "no answer"
    if exact_match(answer, golds):
        return 1.0, "correct"
    return 0.0, "wrong answer" if had_search_result else "no search result"


# R1-Searcher's (arXiv 2503.05592): half for the format and half for having searched; then F1, and -2 for a wrong format.
FORMAT_SHARE, SEARCH_SHARE, FORMAT_PENALTY = 0.5, 0.5, 2.0


@dataclasses.dataclass(frozen=True)
class Judged:
    """What a reward may look at. em: `score_episode`'s. searches: executed ones. well_formed: see there."""

    em: float
    answer: str | None
    golds: Sequence[str]
    searches: int
    well_formed: bool


REWARDS: dict[str, Callable[[Judged], float]] = {
    "em": lambda judged: judged.em,
    "format_search": lambda judged: FORMAT_SHARE * judged.well_formed + SEARCH_SHARE * (judged.searches > 0),
    "f1_format": lambda judged: f1(judged.answer, judged.golds) - FORMAT_PENALTY * (not judged.well_formed),
}


def well_formed(status: str, answer: str | None, trace: Sequence[tuple[str, str]]) -> bool:
    """Whether a rollout kept to the protocol throughout: it gave an answer that is not empty, never had to be corrected (a tool's
    reply is no correction), and closed every <think> it opened before its action (one without any thought is as good).

    trace: `Episode.trace`.
    """
    if status != "answered" or not (answer or "").strip() or any(kind == "corrective" for kind, _ in trace):
        return False
    return all(_thoughts_closed(text) for kind, text in trace if kind == "generated")


def _thoughts_closed(text: str) -> bool:
    tags = re.findall(r"</?think>", text)
    return tags == ["<think>", "</think>"] * (len(tags) // 2)
