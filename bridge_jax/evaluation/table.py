"""Evaluation results as tables for a terminal (rich) and, unchanged, for a log."""

from __future__ import annotations

from collections.abc import Mapping

from rich.markup import escape
from rich.table import Table

from bridge_jax.terminal import visible

_STYLE = {"title_justify": "left", "box": None, "padding": (0, 1, 0, 0)}  # narrow: a row fits into 80 columns
LABELS = {"single_hop": "single-hop avg", "multi_hop": "multi-hop avg", "medical": "medical avg", "overall": "average"}


def unmarked(text: str) -> str:
    """A name from a file, a path or a model: no markup, and nothing that a terminal would obey."""
    return escape(visible(text))


def results_table(result: Mapping, title: str = "") -> Table:
    """One row a data set, then the averages. `result`: of `evaluation.run.evaluate_sets`."""
    k = result["k"]
    table = Table(title=unmarked(title) or None, **_STYLE)
    table.add_column("data set", overflow="fold", min_width=8)
    timed = any(row.get("latency") is not None for row in result["datasets"].values())
    for name in ("n", "EM", "95 %", "F1", "sub-EM", *dict.fromkeys(("R@3", f"R@{k}")), "searches", "tokens", *(["s"] * timed)):
        table.add_column(name, justify="right", no_wrap=True)
    for name, row in _rows(result):
        table.add_row(
            unmarked(name),
            str(row["n"]),
            _percent(row["em"]),
            f"{_percent(row['em_low'])}-{_percent(row['em_high'])}",
            _percent(row["f1"]),
            _percent(row["sub_em"]),
            *(_percent(row[column]) for column in dict.fromkeys(("recall@3", f"recall@{k}"))),
            f"{row['searches']:.2f}",
            f"{row['generated_tokens']:.0f}",
            *([f"{row['latency']:.1f}"] if timed else []),
        )
    return table


def medical_table(result: Mapping) -> Table:
    """Accuracy with its standard error, a row a multiple-choice set, and their mean."""
    table = Table(title="multiple choice", **_STYLE)
    table.add_column("data set", overflow="fold", min_width=8)
    for name in ("n", "accuracy", "s.e.", "unparseable", "no search"):
        table.add_column(name, justify="right", no_wrap=True)
    rows = {name: row for name, row in result["datasets"].items() if "accuracy" in row}
    for name, row in rows.items():
        cells = (
            str(row["n"]),
            _percent(row["accuracy"]),
            _percent(row["standard_error"]),
            str(row["unparseable"]),
            str(row["no_search"]),
        )
        table.add_row(unmarked(name), *cells)
    if len(rows) > 1:
        table.add_row(LABELS["medical"], "", _percent(sum(row["accuracy"] for row in rows.values()) / len(rows)), "", "", "")
    return table


def against_table(found: Mapping, title: str = "") -> Table:
    """`paired.compare`: EM of both, the difference with its 95 % interval, wins and losses, and the differences of the others."""
    table = Table(title=unmarked(title) or None, **_STYLE)
    table.add_column("data set", overflow="fold", min_width=8)
    for name in ("n", "EM", "other", "diff", "95 %", "won", "lost", "p", "F1", "R@3"):
        table.add_column(name, justify="right", no_wrap=True)
    rows = list(found["datasets"].items())
    if len(rows) > 1:
        rows += [(LABELS[name], row) for name, row in found["averages"].items() if name == "overall" or row["n"] != _total(found)]
    for name, row in rows:
        em = row["em"]
        others = [_percent(row[metric]["difference"], signed=True) if row[metric] else "-" for metric in ("f1", "recall@3")]
        table.add_row(
            unmarked(name),
            str(row["n"]),
            _percent(em["ours"]),
            _percent(em["theirs"]),
            _percent(em["difference"], signed=True),
            f"{_percent(em['low'], signed=True)} to {_percent(em['high'], signed=True)}",
            str(em["wins"]),
            str(em["losses"]),
            f"{em['p']:.3f}",
            *others,
        )
    return table


def judge_table(found: Mapping, title: str = "") -> Table:
    """`judge.judge`: quality with its 95 % interval, a row a set, then averages; below, how far votes agree."""
    table = Table(title=unmarked(title) or None, **_STYLE)
    table.add_column("data set", overflow="fold", min_width=8)
    for name in ("n", "quality", "95 %", "unjudged"):
        table.add_column(name, justify="right", no_wrap=True)
    rows = list(found["datasets"].items())
    if len(rows) > 1:
        rows.append((LABELS["overall"], found["averages"]["overall"]))
    for name, row in rows:
        judged = row["quality"] is not None
        quality, spread = (f"{row['quality']:.1f}", f"{row['low']:.1f}-{row['high']:.1f}") if judged else ("-", "-")
        table.add_row(unmarked(name), str(row["n"]), quality, spread, str(row["unjudged"]))
    if found["agreement"]:
        same = found["agreement"]
        alpha = "-" if same["alpha"] is None else f"{same['alpha']:.2f}"
        table.caption = f"votes agree in {same['exact']:.0%}, within one in {same['within_one']:.0%}; Krippendorff's alpha {alpha}"
        table.caption_justify = "left"
    return table


def _total(found: Mapping) -> int:
    return found["averages"]["overall"]["n"]


def comparison_table(before: Mapping, after: Mapping, labels: tuple[str, str] = ("before", "after"), title: str = "") -> Table:
    """Two evaluations of the same data sets: each metric as `before -> after`; the EM column carries both 95 % intervals."""
    table = Table(title=unmarked(title) or None, **_STYLE)
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
                unmarked(name) if first else "",
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


def _percent(value: float | None, signed: bool = False) -> str:
    return "-" if value is None else f"{100 * value:{'+' if signed else ''}.1f}"
