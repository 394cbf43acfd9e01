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
    """One panel a key, in it one labelled line (x values, y values) a key. The legend is for all panels."""
    if pyplot is None:
        return
    figure, axes = pyplot.subplots(1, len(panels), figsize=(5.2 * len(panels), 4), squeeze=False, layout="constrained")
    labels = list(dict.fromkeys(label for curves in panels.values() for label in curves))
    shown = {}
    for axis, (title, curves) in zip(axes[0], panels.items(), strict=True):
        for label, (xs, ys) in curves.items():
            [shown[label]] = axis.plot(xs, ys, markersize=3, **_style(labels.index(label), len(labels)))
        axis.set(title=title, xlabel=x, ylabel=y)
        if logx:
            axis.set_xscale("log")
        if logy:
            axis.set_yscale("log")
        axis.grid(alpha=0.3)
    wanted = {"handles": [shown[label] for label in labels], "labels": labels, "fontsize": 8}
    if len(panels) > 1:
        figure.legend(loc="outside right center", **wanted)
    else:
        axes[0][0].legend(**wanted)
    _write(figure, path)


def _style(number: int, count: int) -> dict:
    """The first one whole and thick, the later ones broken and thinner: of curves that coincide all can be seen."""
    dashes = ((4, 2.5), (5, 2, 1, 2), (1.5, 1.5))[number % 3]
    shown = (number * 1.7, dashes) if number else "-"  # the gaps of two curves with the same dashes lie elsewhere
    width = 2.8 - 1.6 * number / max(count - 1, 1)
    return {"color": f"C{number % 10}", "marker": "os^vD"[number % 5], "linestyle": shown, "linewidth": width}


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
