"""What the report reads of a run's folder, rollouts aside: its configuration, metrics and evaluations."""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from typing import NamedTuple

from bridge_jax.errors import UserError
from bridge_jax.files import AnyPath, as_path
from bridge_jax.training.metrics import read_metrics


class Run(NamedTuple):
    folder: AnyPath
    name: str  # tells it from the other runs of the report
    config: dict
    rows: list[dict]  # of metrics.jsonl
    evaluations: list[dict]  # by step, without the predictions


def read_runs(workdirs: Sequence[AnyPath]) -> list[Run]:
    """Raises UserError: a folder holds no run, or a damaged one; the same folder twice."""
    folders = [as_path(workdir) for workdir in workdirs]
    for at, folder in enumerate(folders):
        if folder in folders[:at]:
            raise UserError(f"--workdir={folder} is given twice: give each run once")
    names = _names(folders)
    return [
        Run(folder, name, config(folder), read_metrics(folder / "metrics.jsonl"), evaluations(folder))
        for folder, name in zip(folders, names, strict=True)
    ]


def config(workdir: AnyPath) -> dict:
    path = as_path(workdir) / "config.json"
    if not path.is_file():
        raise UserError(f"{workdir} holds no run ({path.name} is missing): give the folder of a run as --workdir")
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"{path} is not readable JSON ({error})") from error
    if not isinstance(fields, dict):
        raise UserError(f"{path} is not a run's configuration: an object with fields is expected")
    return fields


def evaluations(workdir: AnyPath) -> list[dict]:
    """The run's own evaluations, by step, without their predictions.

    Raises:
      UserError: one of them is damaged.
    """
    return [_summary(path, *file_state(path)) for path in evaluation_files(workdir)]


def evaluation_files(workdir: AnyPath) -> list[AnyPath]:
    """`eval/step_<n>.json`; those of the `evaluate` command have longer names."""
    return sorted((as_path(workdir) / "eval").glob("step_??????.json"))


def evaluation(path: AnyPath) -> dict:
    """One evaluation with its predictions. Raises UserError where it is damaged."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        found["step"], found["datasets"], found["averages"]  # all that reads it relies on them
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path} is damaged ({error}): delete it") from error
    return found


@functools.lru_cache(maxsize=256)
def _summary(path: AnyPath, size: int, changed: float) -> dict:
    """Kept: a run under way writes its page after each evaluation, and one with all predictions may have 100 MB."""
    return {key: value for key, value in evaluation(path).items() if key != "predictions"}


def file_state(path: AnyPath) -> tuple[int, float]:
    """(bytes, time of the last change)"""
    stat = path.stat()
    return (stat.length, stat.mtime) if hasattr(stat, "length") else (stat.st_size, stat.st_mtime)


def _names(folders: Sequence[AnyPath]) -> list[str]:
    """The shortest ends of the paths that tell them apart: `bridge/seed0`, `vt/seed0`."""
    for depth in range(1, max((len(folder.parts) for folder in folders), default=1) + 1):
        names = ["/".join(folder.parts[-depth:]) for folder in folders]
        if len(set(names)) == len(names):
            return names
    return [str(folder) for folder in folders]
