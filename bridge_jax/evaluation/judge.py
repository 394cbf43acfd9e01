"""Reasoning quality, by a language model behind an endpoint: 0 to 4 by our rubric, times 25.

The judge reads the question (with its options) and what was written, never the passages: it judges whether the reasoning holds, not
whether it found a source. Answers are JSON, checked; one that is not is asked for once more, then the question is `unjudged`. Every
answer is kept by the hash of what was asked, so a judge that goes down loses nothing: the same command goes on.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Mapping, Sequence

import numpy as np

from bridge_jax.data.prompts import fill
from bridge_jax.endpoint import Endpoint, EndpointDown
from bridge_jax.errors import UserError
from bridge_jax.evaluation import provenance
from bridge_jax.evaluation.aggregate import groups, interval
from bridge_jax.retrieval.progress import track

SCALE = 25
HIGHEST = 4
MAX_TOKENS = 256
VOTE_TEMPERATURE = 0.7  # of several votes; a single one is greedy

RUBRIC = """You grade the reasoning that somebody wrote while answering a question. They could search; what they found is left out
and marked [passages]. Do not grade whether the final answer is right as such: grade whether the written reasoning leads to it.

4: every step is needed, correct and follows from what came before; what was looked up is used; the answer follows.
3: sound on the whole, with a gap or an unneeded step that does not change where it leads.
2: some correct steps, but an important one is missing, unsupported or wrong.
1: mostly wrong, irrelevant or repeated; at best a fragment of a reasoning.
0: no reasoning at all, or it has nothing to do with the question.

Question:
{question}

What was written:
{trace}

Answer with JSON and nothing else: {"why": "one sentence", "score": 0, 1, 2, 3 or 4}"""
AGAIN = (
    'That was not of the form asked for. Answer with this JSON and nothing else: {"why": "one sentence", "score": 0, 1, 2, 3 or 4}'
)


def prompt_of(record: Mapping) -> str:
    """What the judge reads of a prediction: question, options, and the trace without its passages."""
    question = record["question"]
    if "options" in record:
        question += "".join(f"\n{letter}. {text}" for letter, text in record["options"].items())
    parts = []
    for step in record["trace"]:
        if step["kind"] == "generated":
            parts.append(step["text"].strip())
        elif step["kind"] == "information":
            parts.append("[passages]")
        elif step["kind"] == "tool":
            parts.append("[a tool's reply]")
    return fill(RUBRIC, question=question, trace="\n".join(parts) or "(nothing)")


def read_verdict(text: str) -> tuple[int, str] | None:
    """(score, why) of a judge's answer; None when it is not the JSON asked for. Text around the object is forgiven."""
    for match in re.finditer(r"\{[^{}]*\}", text):
        try:
            verdict = json.loads(match[0])
            score, why = verdict["score"], verdict["why"]
        except (ValueError, KeyError, RecursionError):
            continue
        if isinstance(score, int) and not isinstance(score, bool) and 0 <= score <= HIGHEST and isinstance(why, str):
            return score, why
    return None


def judge(endpoint: Endpoint, predictions: Mapping[str, Sequence[Mapping]], votes: int = 1, seed: int = 0) -> dict:
    """Grade every prediction `votes` times.

    Returns:
      {"datasets": {set: {"n", "unjudged", "quality" (0 to 100, None: nobody judged), "low", "high"}}, "averages": the same by
      group, "agreement", "scores": {set: {id: {"votes", "why"}}}, "down": why the judge could not be asked further, or None}.
    """
    if votes < 1:
        raise UserError(f"--votes={votes}: must be at least 1")
    scores: dict[str, dict] = {name: {} for name in predictions}
    down = None
    waiting = [(name, record, vote) for name, records in predictions.items() for record in records for vote in range(votes)]
    with track("judging", len(waiting), "votes") as advance:
        step = 4 * endpoint.concurrency
        for at in range(0, len(waiting), step):
            part = waiting[at : at + step]
            try:
                verdicts = _ask(endpoint, [(prompt_of(record), vote) for _, record, vote in part], votes)
            except EndpointDown as error:
                down = str(error)
                break
            for (name, record, _), verdict in zip(part, verdicts, strict=True):
                kept = scores[name].setdefault(record["id"], {"votes": [], "why": []})
                if verdict is not None:
                    kept["votes"].append(verdict[0])
                    kept["why"].append(verdict[1])
            advance(len(part))
    means = {
        name: [SCALE * float(np.mean(kept["votes"])) for kept in scores[name].values() if kept["votes"]] for name in predictions
    }
    return {
        "judge": endpoint.describe() | {"votes": votes, "rubric": provenance.digest([RUBRIC, AGAIN])},
        "datasets": {name: _summary([means[name]], len(records), seed) for name, records in predictions.items()},
        "averages": {
            group: _summary([means[name] for name in names], sum(len(predictions[name]) for name in names), seed)
            for group, names in groups(list(predictions)).items()
        },
        "agreement": agreement([kept["votes"] for found in scores.values() for kept in found.values()]),
        "scores": scores,
        "down": down,
    }


def _ask(endpoint: Endpoint, asked: Sequence[tuple[str, int]], votes: int) -> list[tuple[int, str] | None]:
    requests = [
        {
            "messages": [{"role": "user", "content": prompt}],
            "max_tokens": MAX_TOKENS,
            "temperature": VOTE_TEMPERATURE if votes > 1 else 0.0,
            "vote": vote,
        }
        for prompt, vote in asked
    ]
    said = endpoint.complete_many(requests)
    verdicts = [read_verdict(one.text) for one in said]
    again = [n for n, verdict in enumerate(verdicts) if verdict is None and said[n].finish in ("stop", "length")]
    repeated = endpoint.complete_many(
        [
            requests[n]
            | {
                "messages": [
                    *requests[n]["messages"],
                    {"role": "assistant", "content": said[n].text},
                    {"role": "user", "content": AGAIN},
                ]
            }
            for n in again
        ]
    )
    for n, one in zip(again, repeated, strict=True):
        verdicts[n] = read_verdict(one.text)
    return verdicts


def _summary(parts: Sequence[Sequence[float]], n: int, seed: int) -> dict:
    judged = [part for part in parts if part]
    found = {"n": n, "unjudged": n - sum(map(len, parts)), "quality": None, "low": None, "high": None}
    if judged:
        low, high = interval(judged, seed)
        found |= {"quality": float(np.mean([np.mean(part) for part in judged])), "low": low, "high": high}
    return found


def agreement(votes: Sequence[Sequence[int]]) -> dict | None:
    """Of the questions with several votes: {"questions", "exact", "within_one": shares of pairs of votes, "alpha"}; None without.

    alpha: Krippendorff's, for intervals; None where all votes are the same.
    """
    several = [list(one) for one in votes if len(one) > 1]
    if not several:
        return None
    gaps = np.asarray([abs(a - b) for one in several for a, b in itertools.combinations(one, 2)])
    values = np.asarray([value for one in several for value in one], np.float64)
    n = len(values)
    observed = sum(2 * sum((a - b) ** 2 for a, b in itertools.combinations(one, 2)) / (len(one) - 1) for one in several) / n
    expected = 2 * n * float(np.sum((values - values.mean()) ** 2)) / (n * (n - 1))
    return {
        "questions": len(several),
        "exact": float(np.mean(gaps == 0)),
        "within_one": float(np.mean(gaps <= 1)),
        "alpha": float(1 - observed / expected) if expected else None,
    }
