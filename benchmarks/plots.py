"""Plots beside the results, with matplotlib (`pip install 'bridge-jax[bench]'`). Without it they are left out, and it says so."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

try:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
except ImportError:
    pyplot = None
    print("no plots: pip install 'bridge-jax[bench]' for matplotlib", file=sys.stderr)

Curve = tuple[Sequence[float], Sequence[float]]


def lines(path: Path, panels: Mapping[str, Mapping[str, Curve]], x: str, y: str, logx: bool = False, logy: bool = False) -> None:
    """One panel a key, in it one labelled line (x values, y values) a key."""
    if pyplot is None:
        return
    figure, axes = pyplot.subplots(1, len(panels), figsize=(5.2 * len(panels), 4), squeeze=False, layout="constrained")
    for axis, (title, curves) in zip(axes[0], panels.items(), strict=True):
        for n, (label, (xs, ys)) in enumerate(curves.items()):
            axis.plot(xs, ys, label=label, marker="o", markersize=3, color=f"C{n % 10}", linestyle="-" if n < 10 else "--")
        axis.set(title=title.replace("_", " "), xlabel=x, ylabel=y)
        if logx:
            axis.set_xscale("log")
        if logy:
            axis.set_yscale("log")
        axis.grid(alpha=0.3)
    axes[0][-1].legend(fontsize=8)
    _write(figure, path)


def bars(path: Path, values: Mapping[str, Mapping[str, float]], x: str) -> None:
    """One horizontal bar a key: {"mean", "low", "high"}."""
    if pyplot is None:
        return
    figure, axis = pyplot.subplots(figsize=(6.5, 0.32 * len(values) + 1.2), layout="constrained")
    ordered = sorted(values.items(), key=lambda item: item[1]["mean"])
    means = [found["mean"] for _, found in ordered]
    errors = [[f["mean"] - f["low"] for _, f in ordered], [f["high"] - f["mean"] for _, f in ordered]]
    axis.barh([name for name, _ in ordered], means, xerr=errors, color="C0", ecolor="0.3", capsize=2)
    axis.set(xlabel=x)
    axis.grid(axis="x", alpha=0.3)
    _write(figure, path)


def _write(figure, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110, metadata={"Software": None})  # no version in the file: the same bytes again
    pyplot.close(figure)
