"""What a run writes as it goes: `metrics.jsonl`, `rollouts/step_*.jsonl`, and the optional TensorBoard and W&B writers."""

from __future__ import annotations

import json
import math
import os
import tempfile
from collections.abc import Iterable
from pathlib import Path

from bridge_jax.errors import UserError
from bridge_jax.files import AnyPath, append_text, as_path, is_remote, make_folder, upload, write_text


class RunLog:
    """`metrics.jsonl` (one object a step, key `step`) and `rollouts/`, cut back to the checkpoint on a resume.

    Args:
      workdir: the run's folder, on this machine or in a bucket.
      start: steps up to this one are kept; later rows and rollout files belong to work that will be done again.
      writes: False for all processes of a run but one: nothing is written, or cut back.
    """

    def __init__(
        self,
        workdir: AnyPath,
        start: int,
        tensorboard: bool = False,
        wandb: str = "",
        config: dict | None = None,
        writes: bool = True,
    ):
        self.workdir = as_path(workdir)
        self.path = self.workdir / "metrics.jsonl"
        self.rollouts = self.workdir / "rollouts"
        self._writes = writes
        if not writes:
            return
        make_folder(self.rollouts)
        _truncate(self.path, start)
        for file in self.rollouts.glob("step_*.jsonl"):
            if int(file.stem.removeprefix("step_")) > start:
                file.unlink()
        self._writers = [
            writer for writer in (_tensorboard(self.workdir, tensorboard), _wandb(self.workdir, wandb, config)) if writer
        ]

    def write(self, row: dict[str, float]) -> None:
        """Append one step's metrics; non-finite numbers become null, so that the file stays JSON."""
        if not self._writes:
            return
        clean = {key: _number(value) for key, value in row.items()}
        append_text(self.path, json.dumps(clean) + "\n")
        for writer in self._writers:
            writer(clean)

    def amend(self, step: int, fields: dict[str, float]) -> None:
        """Set fields of a step's row that is there already."""
        if self._writes:
            rows = [row | fields if row["step"] == step else row for row in read_metrics(self.path)]
            write_text(self.path, _lines(rows))

    def write_rollouts(self, step: int, rows: Iterable[dict]) -> None:
        if not self._writes:
            return
        text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        write_text(self.rollouts / f"step_{step:06d}.jsonl", text)


def read_metrics(path: AnyPath) -> list[dict]:
    """The rows of a `metrics.jsonl`; a half-written last line (the run was killed) is left out."""
    path, rows = as_path(path), []
    if path.exists():
        for line in path.read_text(encoding="utf-8").split("\n"):
            try:
                row = json.loads(line)
            except ValueError:
                continue
            if isinstance(row, dict) and isinstance(row.get("step"), int):
                rows.append(row)
    return rows


def _truncate(path: AnyPath, start: int) -> None:
    if not path.exists():
        return
    kept = [row for row in read_metrics(path) if row["step"] <= start]
    write_text(path, _lines(kept))


def _lines(rows: Iterable[dict]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def _number(value) -> float | int | str | None:
    if isinstance(value, str):
        return value
    value = value.item() if hasattr(value, "item") else value
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _tensorboard(workdir: AnyPath, on: bool):
    if not on:
        return None
    try:
        from tensorboardX import SummaryWriter
    except ImportError as error:
        raise UserError("config.train.tensorboard needs tensorboardX: pip install 'bridge-jax[tensorboard]'") from error
    folder = workdir / "tensorboard"
    spool = Path(tempfile.mkdtemp(prefix="tensorboard-")) if is_remote(workdir) else folder
    writer = SummaryWriter(str(spool))

    def write(row):
        for key, value in row.items():
            if isinstance(value, int | float):
                writer.add_scalar(key, value, row["step"])
        writer.flush()
        if spool != folder:
            upload(spool, folder)

    return write


def _wandb(workdir: AnyPath, project: str, config: dict | None):
    if not project:
        return None
    try:
        import wandb
    except ImportError as error:
        raise UserError("config.train.wandb needs wandb: pip install 'bridge-jax[wandb]'") from error
    folder = tempfile.mkdtemp(prefix="wandb-") if is_remote(workdir) else str(workdir)
    run = wandb.init(project=project, dir=folder, config=config, resume="allow", id=_run_id(workdir))
    return lambda row: run.log({k: v for k, v in row.items() if v is not None}, step=row["step"])


def _run_id(workdir: AnyPath) -> str:
    """One W&B run a folder: a rerun of the command goes on in the same run."""
    path = workdir / "wandb_id"
    if not path.exists():
        write_text(path, os.urandom(6).hex())
    return path.read_text(encoding="utf-8").strip()
