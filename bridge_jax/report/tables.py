"""The report's tables as HTML: runs beside each other, and one run's evaluations before and after. All text in them is escaped."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence

from bridge_jax.evaluation.table import LABELS
from bridge_jax.report.runs import Run


def tiles(run: Run) -> str:
    """What one looks at first: the average before and after, in points, or the last reward of a run without evaluations."""
    found = []
    if run.evaluations:
        old, new = (run.evaluations[at]["averages"].get("overall", {}) for at in (0, -1))
        for column, label in (("em", "exact match"), ("f1", "F1"), ("recall@3", "recall@3")):
            if new.get(column) is not None:
                found.append((label, _points(new[column]), _from(old.get(column), new[column]) if len(run.evaluations) > 1 else ""))
        if new.get("searches") is not None:
            known = len(run.evaluations) > 1 and old.get("searches") is not None
            before = f'<span class="dim">from {old["searches"]:.2f}</span>' if known else ""
            found.append(("searches a question", f"{new['searches']:.2f}", before))
    if run.rows:
        last = run.rows[-1]
        if isinstance(last.get("reward/mean"), int | float):
            found.append(("reward of the last step", f"{last['reward/mean']:.3f}", ""))
        found.append(("steps", str(last["step"]), f'<span class="dim">{_duration(run.rows)}</span>'))
    cells = [f"<div><dt>{label}</dt><dd>{value} <small>{more}</small></dd></div>" for label, value, more in found]
    return f'<dl class="tiles">{"".join(cells)}</dl>' if cells else ""


def runs_table(runs: Sequence[Run]) -> str:
    """One row a run: the average of its first and its last evaluation."""
    head = "".join(
        f'<th scope="col">{name}</th>' for name in ("run", "method", "seed", "steps", "time", "EM", "recall@3", "searches")
    )
    lines = []
    for number, run in enumerate(runs):
        ends = [found["averages"].get("overall", {}) for found in (run.evaluations[:1] + run.evaluations[-1:])]
        cells = [str(run.config.get(field, "")) for field in ("method.name", "train.seed")]
        cells += [str(run.rows[-1]["step"]) if run.rows else "0", _duration(run.rows)]
        cells += [_arrow([_points(row.get(column)) for row in ends]) for column in ("em", "recall@3")]
        cells.append(_arrow([f"{row['searches']:.2f}" if row.get("searches") is not None else "-" for row in ends]))
        name = f'<th scope="row" class="c{number % 8}"><span class="dot"></span>{html.escape(run.name)}</th>'
        lines.append(f"<tr>{name}{''.join(f'<td>{html.escape(cell)}</td>' for cell in cells)}</tr>")
    return _table(f"<thead><tr>{head}</tr></thead><tbody>{''.join(lines)}</tbody>")


def comparison(before: Mapping, after: Mapping) -> str:
    """EM with its 95 % interval, F1, recall@3 and searches of each data set and average, before and after, in points."""
    columns = (("em", "EM"), ("f1", "F1"), ("recall@3", "recall@3"))
    wide = "".join(f'<th scope="colgroup" colspan="3">{label}</th>' for _, label in columns)
    narrow = '<th scope="col">before</th><th scope="col">after</th><th scope="col">change</th>' * len(columns)
    head = f'<tr><th scope="col" rowspan="2">data set</th><th scope="col" rowspan="2">n</th>{wide}'
    head += f'<th scope="col" rowspan="2">searches</th></tr><tr>{narrow}</tr>'
    lines = []
    old_rows, new_rows = dict(_rows(before)), dict(_rows(after))
    for key in [key for key in old_rows if key in new_rows]:
        old, new = old_rows[key], new_rows[key]
        kind, name = key
        cells = [
            f'<th scope="row">{html.escape(LABELS.get(name, name) if kind == "average" else name)}</th><td>{int(new["n"])}</td>'
        ]
        for column, _ in columns:
            for row in (old, new):
                band = f" <small>{100 * row['em_low']:.0f}-{100 * row['em_high']:.0f}</small>" if column == "em" else ""
                cells.append(f"<td>{_points(row[column])}{band}</td>")
            cells.append(f"<td>{_change(old[column], new[column])}</td>")
        cells.append(f"<td>{old['searches']:.2f} → {new['searches']:.2f}</td>")
        lines.append(f'<tr class="{kind}">{"".join(cells)}</tr>')
    return _table(f"<thead>{head}</thead><tbody>{''.join(lines)}</tbody>")


def _table(inner: str) -> str:
    return f'<div class="scroll" tabindex="0"><table>{inner}</table></div>'


def _rows(result: Mapping) -> list[tuple[tuple[str, str], Mapping]]:
    """(("set" | "average", name), metrics); an average of all sets that is the overall one again is left out."""
    sets = [(("set", name), row) for name, row in result["datasets"].items()]
    if len(sets) < 2:
        return sets
    averages = result["averages"]
    everything = averages.get("overall", {}).get("datasets")
    return sets + [
        (("average", name), row)
        for name, row in averages.items()
        if name == "overall" or everything is None or row.get("datasets") != everything
    ]


def _points(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.1f}"


def _arrow(ends: Sequence[str]) -> str:
    return " → ".join(dict.fromkeys(ends) if len(ends) > 1 and ends[0] == ends[1] else ends) or "-"


def _from(old: float | None, new: float) -> str:
    return "" if old is None else f'<span class="dim">from {_points(old)}</span> {_change(old, new)}'


def _change(old: float | None, new: float | None) -> str:
    if old is None or new is None:
        return ""
    change = 100 * (new - old)
    return f'<span class="{"up" if change > 0 else "down" if change < 0 else "dim"}">{change:+.1f}</span>'


def _duration(rows: Sequence[Mapping]) -> str:
    """Of the steps themselves."""
    seconds = sum(row["time/step"] for row in rows if isinstance(row.get("time/step"), int | float))
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
