"""Which episodes of a run the report holds: all, or within a budget of bytes an even choice over steps.

What is chosen depends on positions alone: of every step the first questions (which the stream drew at random), of every evaluated
set the first ones of a fixed shuffle. Steps and runs on the same questions therefore keep the same ones, and can be compared; and
no more is read of the files of a step than what is kept.
"""

from __future__ import annotations

import functools
import itertools
import json
import math
import random
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from bridge_jax.files import AnyPath
from bridge_jax.report.episodes import Episode, from_prediction, from_rollout
from bridge_jax.report.layout import Layout, pack, packed_bytes
from bridge_jax.report.runs import Run, evaluation, evaluation_files, file_state

BUDGET = 64 * 2**20  # bytes of a page's packed episodes
TRAINING, EVALUATION = 0, 1
PROBE = 64  # episodes whose packed size tells that of the others
COUNTED = 2**32  # bytes: of larger folders the rollouts are not counted, but estimated


class Chosen(NamedTuple):
    """The packed episodes of a report and what a reader should know about them."""

    index: str
    blocks: list[str]
    notes: list[str]
    count: int


class _Source(NamedTuple):
    """Rollouts of one step, or one evaluation's predictions of one data set."""

    kind: int
    groups: int  # questions
    order: Callable[[int], Sequence[int]]  # which so many of them
    episodes: Callable[[set[int], list[str]], Iterator[tuple[int, Episode]]]  # (those groups, faults)
    size: int  # bytes when packed, estimated


def choose(runs: Sequence[Run], budget: int = BUDGET) -> Chosen:
    """The episodes of `runs`; each run gets the same part of the budget, and half of that is the evaluations' if need be."""
    _predictions.cache_clear()  # a run under way writes files anew
    sources = [_sources(run) for run in runs]
    scale = 1.0
    while True:  # sizes are estimates: where they were too low, choose again
        layout, notes, faults = Layout(), [], []
        for number, (run, parts) in enumerate(zip(runs, sources, strict=True)):
            notes += _add(layout, number, run, parts, scale * budget / len(runs), faults)
        index, blocks = layout.finish()
        size = packed_bytes(index, blocks)
        if size <= budget or scale < 1e-4:
            return Chosen(index, blocks, notes + _told(faults), len(layout))
        scale *= 0.9 * budget / size


def _add(layout: Layout, number: int, run: Run, sources: list[_Source], budget: float, faults: list[str]) -> list[str]:
    """Add a run's episodes to the layout; returns what was left out, in words."""
    notes, need = [], {kind: sum(source.size for source in sources if source.kind == kind) for kind in (TRAINING, EVALUATION)}
    for kind, words in ((TRAINING, "questions of its logged rollouts"), (EVALUATION, "evaluated questions")):
        part = max(budget / 2, budget - need[1 - kind])
        share = min(1.0, part / max(1, need[kind]))
        mine = [source for source in sources if source.kind == kind]
        kept = total = position = 0
        for source in mine:
            count = int((position + source.groups) * share) - int(position * share)
            position += source.groups
            kept, total = kept + count, total + source.groups
            for step, episode in source.episodes(set(source.order(count)), faults) if count else ():
                layout.add(number, kind, step, episode)
        if kept < total:
            notes.append(
                f"{run.name}: {kept:,} of {total:,} {words} are here, chosen evenly over steps: all would exceed the page budget "
                f"(--budget, in MB). The files in {'eval' if kind else 'rollouts'}/ hold every one."
            )
    return notes


def _told(faults: list[str]) -> list[str]:
    return [*faults[:5], f"{len(faults) - 5} more lines were skipped."] if len(faults) > 5 else faults


def _sources(run: Run) -> list[_Source]:
    titles: dict[str, str] = {}
    group = run.config.get("grpo.group_size")
    group = group if isinstance(group, int) and group > 0 else 1
    training = list(_training(run, group, titles))
    return [*training, *_evaluated(run, titles)]


def _training(run: Run, group: int, titles: dict[str, str]) -> Iterator[_Source]:
    files = sorted((run.folder / "rollouts").glob("step_*.jsonl"))
    sizes = [file_state(path)[0] for path in files]
    a_line, ratio = _typical_line(files[len(files) // 2]) if files else (1.0, 1.0)
    for path, size in zip(files, sizes, strict=True):
        lines = _lines(path) if sum(sizes) <= COUNTED else math.ceil(size / a_line)

        def episodes(wanted, faults, path=path):
            return _rollouts(run, path, group, wanted, faults, titles)

        yield _Source(TRAINING, -(-lines // group), range, episodes, int(size * ratio))


def _rollouts(
    run: Run, path: AnyPath, group: int, wanted: set[int], faults: list[str], titles: dict[str, str]
) -> Iterator[tuple[int, Episode]]:
    with path.open("rb") as file:
        for number, line in enumerate(itertools.islice(file, (max(wanted) + 1) * group)):
            if number // group not in wanted or not line.strip():
                continue
            try:
                row = json.loads(line.decode("utf-8"))
                episode = from_rollout(row)
                step = row.get("step")
                if not isinstance(step, int):
                    raise ValueError("'step' is no number")
            except (ValueError, RecursionError) as error:  # JSON's and UTF-8's errors are ValueErrors
                faults.append(f"{run.name}/rollouts/{path.name}, line {number + 1}, was skipped: {_short(error)}.")
                continue
            titles.update(found for search in episode.searches for found in search.documents)
            yield step, episode


def _evaluated(run: Run, titles: dict[str, str]) -> Iterator[_Source]:
    tau = run.config.get("credit.tau")
    tau = float(tau) if isinstance(tau, int | float) and tau > 0 else 1.0
    for path in evaluation_files(run.folder):
        for name, rows in _predictions(path)[1].items():

            def episodes(wanted, faults, path=path, name=name):
                step, predictions = _predictions(path)
                for number, row in enumerate(predictions[name]):
                    if number in wanted:
                        try:
                            yield step, from_prediction(row, tau, titles)
                        except ValueError as error:
                            where = f"{run.name}/eval/{path.name}, {name}, prediction {number + 1}"
                            faults.append(f"{where}, was skipped: {_short(error)}.")

            order = functools.partial(_shuffled, len(rows))
            yield _Source(EVALUATION, len(rows), order, episodes, len(rows) * len(pack(rows[:PROBE])) // len(rows[:PROBE]))


@functools.lru_cache(maxsize=1)  # one evaluation may be 100 MB: no more than one at a time
def _predictions(path: AnyPath) -> tuple[int, dict[str, list]]:
    """(step, {data set: predictions})"""
    found = evaluation(path)
    predictions = found.get("predictions")
    sets = predictions.items() if isinstance(predictions, dict) else ()
    return found["step"], {name: rows for name, rows in sets if isinstance(rows, list) and rows}


def _shuffled(n: int, count: int) -> list[int]:
    """The first `count` of a shuffle of range(n) that is always the same: a smaller choice is part of a larger one."""
    order = list(range(n))
    random.Random(n).shuffle(order)
    return order[:count]


def _lines(path: AnyPath) -> int:
    lines, last = 0, b""
    with path.open("rb") as file:
        while piece := file.read(1 << 20):
            lines, last = lines + piece.count(b"\n"), piece
    return lines + (last[-1:] not in (b"", b"\n"))


def _typical_line(path: AnyPath) -> tuple[float, float]:
    """(bytes of a line, packed over raw bytes) of a file of rollouts, from its first lines."""
    raw, layout = 0, Layout()
    with path.open("rb") as file:
        for line, _ in zip(file, range(PROBE)):
            try:
                layout.add(0, TRAINING, 0, from_rollout(json.loads(line.decode("utf-8"))))
                raw += len(line)
            except (ValueError, RecursionError):
                continue
    return (raw / len(layout), packed_bytes(*layout.finish()) / raw) if raw else (1000.0, 1.0)


def _short(error: Exception) -> str:
    return " ".join(str(error).split())[:160]
