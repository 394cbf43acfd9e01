"""What finished runs left behind, as arrays over seeds and questions."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from training_runs import Run, evaluation_of

from bridge_jax.training.metrics import read_metrics


class Outcome:
    """What a finished run left behind up to its last step. (Its folder may hold more: the same run, trained longer.)"""

    def __init__(self, run: Run, root: Path):
        self.run, self.workdir = run, root / run.name
        self.metrics = [row for row in read_metrics(self.workdir / "metrics.jsonl") if row["step"] <= run.total]
        self._final = evaluation_of(run, root)

    @functools.cached_property
    def final(self) -> dict:
        """The evaluation at the end, on `run.limit` questions a set."""
        return self._read(self._final)

    def on_the_way(self) -> list[int]:
        """Steps at which `train` evaluated."""
        steps = (int(path.stem.removeprefix("step_")) for path in (self.workdir / "eval").glob("step_??????.json"))
        return sorted(step for step in steps if step <= self.run.total)

    def at(self, step: int) -> dict:
        """The evaluation that `train` made after `step`, on `data.eval_limit` questions a set."""
        return self._read(f"step_{step:06d}.json")

    def _read(self, name: str) -> dict:
        return json.loads((self.workdir / "eval" / name).read_text(encoding="utf-8"))

    def rollout_rows(self) -> list[dict]:
        """All logged rollouts, in order."""
        paths = sorted((self.workdir / "rollouts").glob("step_*.jsonl"))
        rows = [json.loads(line) for path in paths for line in path.read_text(encoding="utf-8").splitlines()]
        return [row for row in rows if row["step"] <= self.run.total]


def scores(evaluations: Sequence[dict], metric: str = "em", only: Mapping[str, Sequence[str]] | None = None) -> dict:
    """{set: [seeds, questions] float64} of a metric, from one evaluation a seed; `only`: question ids by set."""
    table = {}
    for name in evaluations[0]["predictions"]:
        rows = [{row["id"]: row for row in result["predictions"][name]} for result in evaluations]
        ids = only[name] if only else list(rows[0])
        table[name] = np.asarray([[float(of_seed[i][metric] or 0.0) for i in ids] for of_seed in rows])
    return table


def question_ids(evaluation: dict) -> dict[str, list[str]]:
    return {name: [row["id"] for row in rows] for name, rows in evaluation["predictions"].items()}
