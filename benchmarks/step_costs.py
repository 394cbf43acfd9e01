"""Seconds a training step takes, row by row, from one measurement on an idle machine (`method_cost.py`).

A run's own clock is no measure here: runs of an ablation stand beside each other, and what else the machine does falls on some of
them. Evaluations and compilation are not in it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import method_cost
from training_runs import RESULTS, Run

# Of each stage of a row: the measured row that does the same work. Rows that are measured themselves stand for themselves.
SAME = {
    "rag_then_rl": ("retriever_stage", "vt_search"),
    "rl_then_rag": ("vt_search", "retriever_stage"),
    "decoupled_rl": ("bridge",),
    "decoupled_rag": ("bridge",),
    "replug": ("bridge",),
    "replug_pdist": ("bridge",),
}


class StepCosts:
    """measured: {row: seconds a step}."""

    def __init__(self, measured: Mapping[str, float]):
        self._measured = measured

    @classmethod
    def read(cls, config: str, folder: Path = RESULTS) -> StepCosts:
        """Of a config file; knows no row where it was not measured."""
        path = folder / f"{method_cost.NAME}.json"
        found = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        return cls(found["step_seconds"] if found.get("config") == config else {})

    def of(self, row: str) -> tuple[float, ...] | None:
        """Seconds a step, one number a stage; None for a row that was not measured."""
        names = SAME.get(row, (row,))
        return tuple(self._measured[name] for name in names) if all(name in self._measured for name in names) else None

    def until(self, row: str, run: Run, step: int) -> float | None:
        """Seconds of the first `step` loop steps of a run of the row."""
        costs = self.of(row)
        if costs is None:
            return None
        a_stage = run.total // len(costs)
        return sum(cost * min(max(step - n * a_stage, 0), a_stage) for n, cost in enumerate(costs))
