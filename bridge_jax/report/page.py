"""A run's report: one HTML file that needs nothing else, from `metrics.jsonl`, `eval/` and `config.json`."""

from __future__ import annotations

import html
import json
from collections.abc import Mapping, Sequence

from bridge_jax.errors import UserError
from bridge_jax.evaluation.table import LABELS
from bridge_jax.files import AnyPath, as_path, write_text
from bridge_jax.report.curves import chart, series, sparkline
from bridge_jax.training.metrics import read_metrics

# title -> {label: metric}; what a run did not log is left out.
CHARTS = {
    "reward": {"reward": "reward/mean"},
    "recall of training searches": {"recall@3": "retrieval/recall@3", "answer in top 3": "retrieval/answer_in_top3"},
    "searches a rollout": {"searches": "rollout/searches"},
    "share without advantage": {"groups": "reward/zero_advantage_groups", "credited turns": "credit/zero_advantage_turns"},
    "largest responsibility": {"w (posterior)": "credit/weight_max", "p (retriever alone)": "credit/weight_max_p"},
    "entropy of p": {"entropy": "credit/p_entropy"},
    "policy: KL to the reference": {"KL": "policy/kl"},
    "policy: entropy": {"entropy": "policy/entropy"},
    "retriever: distance to its start": {"1 - cos": "retriever/drift"},
    "retriever: RAG loss": {"NLL": "retriever/rag_nll"},
    "gradient norms": {"policy": "policy/grad_norm", "retriever": "retriever/grad_norm"},
    "seconds by phase": {
        "rollout": "time/rollout", "score": "time/score", "retriever": "time/retriever", "policy": "time/policy",
    },
}  # fmt: skip

STYLE = """
:root { color-scheme: light dark; --ink: #1b1f24; --dim: #667; --paper: #fff; --line: #ddd;
  --c0: #2563eb; --c1: #d97706; --c2: #059669; --c3: #be185d; --up: #047857; --down: #b91c1c; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e8eb; --dim: #99a; --paper: #14171a; --line: #333a41;
  --c0: #7aa2ff; --c1: #f0b45a; --c2: #4cc9a0; --c3: #f178b6; --up: #4cc9a0; --down: #ff8f8f; } }
.c0 { --c: var(--c0); } .c1 { --c: var(--c1); } .c2 { --c: var(--c2); } .c3 { --c: var(--c3); }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper);
  max-width: 1080px; margin: 2em auto; padding: 0 1em; }
h1 { font-size: 1.4em; } h2 { font-size: 1.1em; margin-top: 2em; } .dim { color: var(--dim); }
table { border-collapse: collapse; } .scroll { overflow-x: auto; }
th, td { padding: .25em .9em .25em 0; text-align: right; border-bottom: 1px solid var(--line); }
th:first-child, td:first-child { text-align: left; } tr.average td { font-weight: 600; }
.up { color: var(--up); } .down { color: var(--down); }
.charts { display: grid; grid-template-columns: repeat(auto-fill, minmax(320px, 1fr)); gap: 1em; }
figure { margin: 0; } figcaption { font-size: .85em; } figcaption span { margin-left: .7em; color: var(--c); }
svg { width: 100%; } svg text { font-size: 10px; fill: var(--dim); } .grid { stroke: var(--line); }
polyline { fill: none; stroke: var(--c); stroke-width: 1.6; } circle { fill: var(--c); }
pre { font-size: .8em; overflow-x: auto; }
"""


def write_report(workdir: AnyPath) -> AnyPath:
    """Write `<workdir>/report.html`; returns its path.

    Raises:
      UserError: the folder holds no run, or a damaged one.
    """
    workdir = as_path(workdir)
    path = workdir / "report.html"
    write_text(path, page(workdir.name, _config(workdir), read_metrics(workdir / "metrics.jsonl"), evaluations(workdir)))
    return path


def evaluations(workdir: AnyPath) -> list[dict]:
    """The run's own evaluations, by step.

    Raises:
      UserError: one of them is damaged.
    """
    found = []
    for path in sorted((as_path(workdir) / "eval").glob("step_??????.json")):
        try:
            found.append(json.loads(path.read_text(encoding="utf-8")))
        except ValueError as error:
            raise UserError(f"{path} is damaged ({error}): delete it") from error
    return found


def _config(workdir: AnyPath) -> dict:
    path = workdir / "config.json"
    if not path.is_file():
        raise UserError(f"{workdir} holds no run ({path.name} is missing): give the folder of a run as --workdir")
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"{path} is not readable JSON ({error})") from error


def page(name: str, config: Mapping, rows: Sequence[Mapping], evaluated: Sequence[Mapping]) -> str:
    """The whole page; every text in it is escaped."""
    title = html.escape(f"{config.get('method.name', '')}: {name}")
    known = (("policy", "policy.model"), ("retriever", "retriever.encoder"), ("questions a step", "train.questions"))
    known += (("rollouts a question", "grpo.group_size"), ("seed", "train.seed"))
    facts = [f"{len(rows)} steps", *(f"{label} {config[field]}" for label, field in known if field in config)]
    body = [f"<h1>{title}</h1>", f'<p class="dim">{html.escape(" · ".join(facts))}</p>']
    if len(evaluated) > 1:
        last = evaluated[-1]
        body += [f"<h2>Before and after {int(last['step'])} steps (greedy)</h2>", comparison(evaluated[0], last)]
    charts = [chart(label, lines) for label, lines in (_evaluation_lines(evaluated) | _metric_lines(rows)).items()]
    body += ["<h2>Over the steps</h2>", f'<div class="charts">{"".join(charts)}</div>'] if any(charts) else []
    settings = html.escape("\n".join(f"{key} = {value!r}" for key, value in sorted(config.items())))
    body.append(f"<details><summary>configuration</summary><pre>{settings}</pre></details>")
    head = '<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
    head += f"<title>{title}</title><style>{STYLE}</style>"
    return "\n".join(['<!doctype html>\n<html lang="en">', f"<head>{head}</head>", "<body>", *body, "</body></html>\n"])


def comparison(before: Mapping, after: Mapping) -> str:
    """EM with its 95 % interval, F1, recall@3 and searches of each data set and average, before and after, in points."""
    columns = (("em", "EM"), ("f1", "F1"), ("recall@3", "recall@3"))
    head = "".join(f"<th>{label} before</th><th>after</th><th>change</th>" for _, label in columns)
    lines = [f"<tr><th>data set</th><th>n</th>{head}<th>searches</th></tr>"]
    old_rows, new_rows = dict(_rows(before)), dict(_rows(after))
    for key in [key for key in old_rows if key in new_rows]:
        old, new = old_rows[key], new_rows[key]
        kind, name = key
        cells = [f"<td>{html.escape(LABELS.get(name, name) if kind == 'average' else name)}</td><td>{int(new['n'])}</td>"]
        for column, _ in columns:
            for row in (old, new):
                band = f' title="95 %: {100 * row["em_low"]:.1f} to {100 * row["em_high"]:.1f}"' if column == "em" else ""
                cells.append(f"<td{band}>{_points(row[column])}</td>")
            cells.append(_change(old[column], new[column]))
        cells.append(f"<td>{old['searches']:.2f} → {new['searches']:.2f}</td>")
        lines.append(f'<tr class="{kind}">{"".join(cells)}</tr>')
    return f'<div class="scroll"><table>{"".join(lines)}</table></div>'


def _rows(result: Mapping) -> list[tuple[tuple[str, str], Mapping]]:
    """(("set" | "average", name), metrics)"""
    sets = [(("set", name), row) for name, row in result["datasets"].items()]
    return sets + ([(("average", name), row) for name, row in result["averages"].items()] if len(sets) > 1 else [])


def _points(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.1f}"


def _change(old: float | None, new: float | None) -> str:
    if old is None or new is None:
        return "<td></td>"
    change = 100 * (new - old)
    return f'<td class="{"up" if change > 0 else "down" if change < 0 else "dim"}">{change:+.1f}</td>'


def _evaluation_lines(evaluated: Sequence[Mapping]) -> dict[str, dict]:
    lines = {}
    for metric, title in (("em", "evaluation: exact match"), ("recall@3", "evaluation: recall@3")):
        lines[title] = {
            LABELS.get(group, group): [
                (result["step"], result["averages"][group][metric])
                for result in evaluated
                if result["averages"].get(group, {}).get(metric) is not None
            ]
            for group in LABELS
        }
    return lines


def _metric_lines(rows: Sequence[Mapping]) -> dict[str, dict]:
    return {title: {label: series(rows, name) for label, name in lines.items()} for title, lines in CHARTS.items()}


def terminal_curves(workdir: AnyPath) -> str:
    """The same in a few characters: reward and recall@3 by training step, EM by evaluation; first and last value beside each."""
    rows = read_metrics(as_path(workdir) / "metrics.jsonl")
    found = {
        "EM (evaluation)": [value for _, value in _evaluation_lines(evaluations(workdir))["evaluation: exact match"]["average"]],
        "reward": [value for _, value in series(rows, "reward/mean")],
        "recall@3": [value for _, value in series(rows, "retrieval/recall@3")],
    }
    return "\n".join(
        f"{name:<16} {values[0]:.3f} {sparkline(values)} {values[-1]:.3f}" for name, values in found.items() if len(values) > 1
    )
