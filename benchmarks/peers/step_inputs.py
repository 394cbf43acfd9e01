"""Rollouts for the benchmark of the update: given ids, log-probs and advantages, the same for every engine."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import numpy as np

GROUP = 8


@dataclasses.dataclass(frozen=True)
class Rollout:
    """prompt [P] int32, tokens [T] int32, generated [T] bool, logps [T] float32 (the sampler's)."""

    prompt: np.ndarray
    tokens: np.ndarray
    generated: np.ndarray
    logps: np.ndarray
    advantage: float


def dense(rng: np.random.Generator, vocab: int, groups: int, prompt: int, response: int) -> list[Rollout]:
    """All of one length, all tokens after the prompt generated."""
    return _rollouts(rng, vocab, [(prompt, [(True, response)])] * groups * GROUP)


def ragged(rng: np.random.Generator, vocab: int, groups: int, scale: int) -> list[Rollout]:
    """As search agents write them; the mean is half of the longest.

    In units of `scale` tokens: a group's prompt 2 to 3; 0 to 4 searches, most often 1 or 2, each 0.5 to 1.5 of thought and query,
    then 2 to 3 of passages, which are not trained on; the answer 0.25 to 1.
    """
    spans = []
    for _ in range(groups):
        prompt = int(rng.integers(2 * scale, 3 * scale))
        for searches in rng.choice(5, GROUP, p=(0.1, 0.35, 0.3, 0.15, 0.1)):
            turns = []
            for _ in range(searches):
                turns += [(True, int(rng.integers(scale // 2, 3 * scale // 2))), (False, int(rng.integers(2 * scale, 3 * scale)))]
            spans.append((prompt, [*turns, (True, int(rng.integers(scale // 4, scale)))]))
    return _rollouts(rng, vocab, spans)


def _rollouts(rng: np.random.Generator, vocab: int, spans: Sequence[tuple[int, list[tuple[bool, int]]]]) -> list[Rollout]:
    """Random ids; log-probs near those of a model that knows nothing, so that some ratios are beyond the clip."""
    found = []
    for prompt, parts in spans:
        generated = np.concatenate([np.full(length, mine) for mine, length in parts])
        logps = rng.normal(-np.log(vocab), 0.2, len(generated)).astype(np.float32)
        ids = rng.integers(1, vocab, prompt + len(generated), dtype=np.int32)
        found.append(Rollout(ids[:prompt], ids[prompt:], generated, np.where(generated, logps, 0), float(rng.normal())))
    return found


def padded(rollouts: Sequence[Rollout]) -> dict[str, np.ndarray]:
    """As Tunix and TRL take them: prompts [B, P] padded on the left, the rest [B, T] on the right, both to the longest."""
    B, P, T = len(rollouts), max(len(r.prompt) for r in rollouts), max(len(r.tokens) for r in rollouts)
    arrays = {
        "prompt_ids": np.zeros((B, P), np.int32),
        "prompt_mask": np.zeros((B, P), np.int32),
        "completion_ids": np.zeros((B, T), np.int32),
        "completion_mask": np.zeros((B, T), np.int32),
        "trained": np.zeros((B, T), np.int32),
        "old_logps": np.zeros((B, T), np.float32),
        "advantages": np.asarray([r.advantage for r in rollouts], np.float32),
    }
    for b, rollout in enumerate(rollouts):
        start, end = P - len(rollout.prompt), len(rollout.tokens)
        arrays["prompt_ids"][b, start:], arrays["prompt_mask"][b, start:] = rollout.prompt, 1
        arrays["completion_ids"][b, :end], arrays["completion_mask"][b, :end] = rollout.tokens, 1
        arrays["trained"][b, :end], arrays["old_logps"][b, :end] = rollout.generated, rollout.logps
    return arrays


def write(path: Path, rollouts: Sequence[Rollout]) -> None:
    np.savez(path, **padded(rollouts))


def read(path: Path) -> list[Rollout]:
    """What `write` wrote."""
    arrays = np.load(path)
    given = [arrays[name] for name in ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask", "trained", "old_logps")]
    return [
        Rollout(prompt[real > 0], ids[there > 0], trained[there > 0] > 0, logps[there > 0], float(advantage))
        for prompt, real, ids, there, trained, logps, advantage in zip(*given, arrays["advantages"])
    ]
