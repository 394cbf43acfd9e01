"""What a person sees while `train` runs: one live bar on a terminal, one plain line a step elsewhere."""

from __future__ import annotations

import sys
import time

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn


class Display:
    """Context manager; `step(n, metrics)` after each step, `say(text)` for everything else (both to stderr). `quiet`: neither."""

    def __init__(self, total: int, start: int, quiet: bool = False):
        self.console = Console(file=sys.stderr, highlight=False, quiet=quiet)
        self._total, self._start, self._begin = total, start, time.monotonic()
        self._progress = None
        if self.console.is_terminal:
            columns = (TextColumn("step"), MofNCompleteColumn(), BarColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
            self._progress = Progress(*columns, TextColumn("ETA"), TimeRemainingColumn(), console=self.console)
            self._task = self._progress.add_task("first step: compiling", total=total, completed=start)

    def __enter__(self) -> Display:
        if self._progress:
            self._progress.start()
        return self

    def __exit__(self, *exc) -> None:
        if self._progress:
            self._progress.stop()

    def say(self, text: str) -> None:
        self.console.print(text, markup=False, soft_wrap=True)

    def step(self, number: int, metrics: dict[str, float]) -> None:
        text = summary(metrics)
        if self._progress:
            self._progress.update(self._task, completed=number, description=text)
        else:
            done = number - self._start
            left = (time.monotonic() - self._begin) / done * (self._total - number)
            self.say(f"step {number}/{self._total}  {text}  ETA {_clock(left)}")


def summary(metrics: dict[str, float]) -> str:
    """`reward 0.12  recall@3 0.31  412 tokens/s  83 s`: the figures one looks at while waiting."""
    parts = [f"reward {metrics['reward/mean']:.3f}"]
    if "retrieval/recall@3" in metrics:
        parts.append(f"recall@3 {metrics['retrieval/recall@3']:.3f}")
    parts.append(f"searches {metrics['rollout/searches']:.2f}")
    parts.append(f"{metrics['rollout/tokens_per_second']:.0f} tokens/s")
    parts.append(f"{metrics['time/step']:.1f} s")
    return "  ".join(parts)


def _clock(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}"
