"""What a person sees while `train` runs: one live panel on a terminal, one plain line a step elsewhere.

The panel has its place at the bottom of the terminal; what is said goes above it. It steps aside for an evaluation, which shows a
progress of its own.
"""

from __future__ import annotations

import os
import sys
import time
from collections import defaultdict, deque

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from bridge_jax.terminal import Remaining, clock
from bridge_jax.training.sparkline import sparkline

# label -> metric, of the panel
SHOWN = {
    "reward": "reward/mean",
    "recall@3": "retrieval/recall@3",
    "searches": "rollout/searches",
    "KL": "policy/kl",
    "no advantage": "reward/zero_advantage_groups",
    "credit, largest w": "credit/weight_max",
}
PHASES = ("rollout", "score", "retriever", "policy")
SPARK = 24  # steps of a sparkline


class Display:
    """Context manager; `phase(name)` when one begins, `step(n, metrics)` after each step, `say(text)` for everything else.

    All of it goes to stderr. quiet: nothing does. A terminal that cannot move its cursor, and one that a CI system plays, get plain
    lines.
    """

    def __init__(self, total: int, start: int, quiet: bool = False):
        self.console = Console(file=sys.stderr, highlight=False, quiet=quiet)
        self._total, self._done, self._begin = total, start, time.monotonic()
        self._left = Remaining(total, start)
        self._phase, self._phase_began = "starting", time.monotonic()
        self._last: dict[str, float] = {}
        self._past: dict[str, deque] = defaultdict(lambda: deque(maxlen=SPARK))
        self._live = None
        if self.console.is_terminal and not self.console.is_dumb_terminal and not quiet and not os.environ.get("CI"):
            self._live = Live(console=self.console, get_renderable=self._panel, refresh_per_second=4, transient=True)

    def __enter__(self) -> Display:
        self._show()
        return self

    def __exit__(self, *exc) -> None:
        self._hide()

    def say(self, text: str) -> None:
        self.console.print(text, markup=False, soft_wrap=True)

    def phase(self, name: str) -> None:
        self._phase, self._phase_began = name, time.monotonic()
        if name == "evaluation":
            self._hide()
        else:
            self._show()

    def step(self, number: int, metrics: dict[str, float]) -> None:
        self._done, self._last = number, metrics
        self._left.step(number)
        for label, name in SHOWN.items():
            if isinstance(metrics.get(name), int | float):
                self._past[label].append(float(metrics[name]))
        if self._live is None:
            self.say(f"step {number}/{self._total}  {summary(metrics)}  {self._left}")

    def _show(self) -> None:
        if self._live and not self._live.is_started:
            self._live.start()

    def _hide(self) -> None:
        if self._live and self._live.is_started:
            self._live.stop()

    def _panel(self) -> RenderableType:
        now = time.monotonic()
        head = Table.grid(expand=True, padding=(0, 2, 0, 0))
        for ratio in (None, 1, None, None):
            head.add_column(ratio=ratio, no_wrap=True)
        phase = Text(f"{self._phase} {clock(now - self._phase_began)}", style="cyan")
        head.add_row(Text(f"step {self._done}/{self._total}", "bold"), ProgressBar(self._total, self._done), phase, str(self._left))
        parts: list[RenderableType] = [head]
        if self._last:
            parts += [self._figures(), Text(_costs(self._last), style="dim", no_wrap=True, overflow="ellipsis")]
        return Panel(Group(*parts), title=f"training {clock(now - self._begin)}", title_align="left", border_style="dim")

    def _figures(self) -> Table:
        """Two metrics a line, each with its last value and its course."""
        table = Table.grid(padding=(0, 2, 0, 0))
        cells = [
            (Text(label, "dim"), Text(f"{past[-1]:.3g}", "bold"), Text(sparkline(past), "green"))
            for label in SHOWN
            if (past := self._past.get(label))
        ]
        for at in range(0, len(cells), 2):
            table.add_row(*(cell for group in cells[at : at + 2] for cell in group))
        return table


def summary(metrics: dict[str, float]) -> str:
    """`reward 0.12  recall@3 0.31  412 tokens/s  83 s`: the figures one looks at while waiting."""
    parts = [f"reward {metrics['reward/mean']:.3f}"]
    if "retrieval/recall@3" in metrics:
        parts.append(f"recall@3 {metrics['retrieval/recall@3']:.3f}")
    parts.append(f"searches {metrics['rollout/searches']:.2f}")
    parts.append(f"{metrics['rollout/tokens_per_second']:.0f} tokens/s")
    parts.append(f"{metrics['time/step']:.1f} s")
    return "  ".join(parts)


def _costs(metrics: dict[str, float]) -> str:
    """Where the last step's time went."""
    parts = [f"{name} {metrics[f'time/{name}']:.1f}" for name in PHASES if f"time/{name}" in metrics]
    return f"last step {metrics['time/step']:.1f} s: {'  '.join(parts)}  ({metrics['rollout/tokens_per_second']:.0f} tokens/s)"
