"""Progress of a long host loop: a bar on a terminal, a plain line now and then elsewhere (logs, notebooks' pipes, CI)."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, Task, TextColumn, TimeRemainingColumn
from rich.text import Text

from bridge_jax.terminal import Remaining

PLAIN_SECONDS = 10.0


@contextlib.contextmanager
def track(label: str, total: int, unit: str, done: int = 0) -> Iterator[Callable[[int], None]]:
    """Yields `advance(n)`. `done` units were finished by an earlier run: they count as progress, not as speed."""
    show = _bar if sys.stderr.isatty() else _lines
    with show(label, total, unit, done) as advance:
        yield advance


class _Rate(ProgressColumn):
    def __init__(self, unit: str, done: int):
        super().__init__()
        self.unit, self.done = unit, done

    def render(self, task: Task) -> Text:
        rate = (task.completed - self.done) / task.elapsed if task.elapsed else 0.0
        return Text(f"{_shown(rate)} {self.unit}/s")


def _shown(rate: float) -> str:
    return f"{rate:,.0f}" if rate >= 10 else f"{rate:.1f}"


@contextlib.contextmanager
def _bar(label, total, unit, done):
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), _Rate(unit, done), TimeRemainingColumn())
    with Progress(*columns, console=Console(file=sys.stderr)) as bar:
        task = bar.add_task(label, total=total, completed=done)
        yield lambda n: bar.advance(task, n)


@contextlib.contextmanager
def _lines(label, total, unit, done):
    begin = spoke = time.monotonic()
    count, ended, left = done, False, Remaining(total, done)

    def advance(n):
        nonlocal count, spoke, ended
        if not n and count == done:
            return
        count += n
        left.step(count)
        now = time.monotonic()
        if ended or (count < total and now - spoke < PLAIN_SECONDS):
            return
        spoke, ended = now, count >= total
        speed = _shown((count - done) / max(now - begin, 1e-9))
        print(f"{label}: {count:,}/{total:,} {unit}, {speed} {unit}/s, {left}", file=sys.stderr, flush=True)

    yield advance
