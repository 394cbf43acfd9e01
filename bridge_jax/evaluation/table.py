"""Evaluation results as tables for a terminal (rich) and, unchanged, for a log."""

from __future__ import annotations

from collections.abc import Mapping

from rich.table import Table

_STYLE = {"title_justify": "left", "box": None, "padding": (0, 1, 0, 0)}  # narrow: a row fits into 80 columns
LABELS = {"single_hop": "single-hop avg", "multi_hop": "multi-hop avg", "overall": "average"}


def results_table(result: Mapping, title: str = "") -> Table:
    """One row a data set, then the averages. `result`: of `evaluation.run.evaluate_sets`."""
    k = result["k"]
    table = Table(title=title or None, **_STYLE)
    table.add_column("data set", overflow="fold", min_width=8)
    for name in ("n", "EM", "95 %", "F1", "sub-EM", *dict.fromkeys(("R@3", f"R@{k}")), "searches", "tokens"):
        table.add_column(name, justify="right", no_wrap=True)
    for name, row in _rows(result):
        table.add_row(
            name,
            str(row["n"]),
            _percent(row["em"]),
            f"{_percent(row['em_low'])}-{_percent(row['em_high'])}",
            _percent(row["f1"]),
            _percent(row["sub_em"]),
            *(_percent(row[column]) for column in dict.fromkeys(("recall@3", f"recall@{k}"))),
            f"{row['searches']:.2f}",
            f"{row['generated_tokens']:.0f}",
        )
    return table


def comparison_table(before: Mapping, after: Mapping, labels: tuple[str, str] = ("before", "after"), title: str = "") -> Table:
    """Two evaluations of the same data sets: each metric as `before -> after`; the EM column carries both 95 % intervals."""
    table = Table(title=title or None, **_STYLE)
    table.add_column("data set", overflow="fold", min_width=8)
    table.add_column("n", justify="right")
    table.add_column("", no_wrap=True)
    for name in ("EM", "95 %", "F1", "R@3", "searches", "answered"):
        table.add_column(name, justify="right", no_wrap=True)
    after_rows = dict(_rows(after))
    for name, old in _rows(before):
        new = after_rows.get(name)
        if new is None:
            continue
        for first, label, row in ((True, labels[0], old), (False, labels[1], new)):
            answered = f"{row['statuses']['answered'] / row['n']:.0%}" if "statuses" in row else ""
            table.add_row(
                name if first else "",
                str(row["n"]) if first else "",
                label,
                _percent(row["em"]),
                f"{_percent(row['em_low'])}-{_percent(row['em_high'])}",
                _percent(row["f1"]),
                _percent(row["recall@3"]),
                f"{row['searches']:.2f}",
                answered,
            )
    return table


def _rows(result: Mapping) -> list[tuple[str, Mapping]]:
    """Data sets, then averages; a lone data set is its own average."""
    rows = list(result["datasets"].items())
    if len(rows) > 1:
        overall = result["averages"]["overall"]["datasets"]
        rows += [(LABELS[name], row) for name, row in result["averages"].items() if name == "overall" or row["datasets"] != overall]
    return rows


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.1f}"
