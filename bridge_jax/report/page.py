"""A run's report, or that of several runs: one HTML file that needs nothing else and asks nothing of the network.

The light page has tables and curves, and is written after every evaluation while a run is under way. The whole one also has the
rollouts for its browser; it is written at the end of a run and by `python -m bridge_jax.report`.

Nothing in it is trusted: text in the markup is escaped here; questions, passages and what the policy wrote are packed (`layout`)
and shown by scripts as text nodes. The page's Content-Security-Policy names the style and the script by their hashes and allows
nothing else, no connection and no image.
"""

from __future__ import annotations

import base64
import hashlib
import html
from collections.abc import Mapping, Sequence
from importlib import resources

from bridge_jax.evaluation.table import LABELS
from bridge_jax.files import AnyPath, as_path, write_text
from bridge_jax.report import rollouts, tables
from bridge_jax.report.curves import chart, series
from bridge_jax.report.layout import pack
from bridge_jax.report.runs import Run, evaluations, read_runs
from bridge_jax.training.metrics import read_metrics
from bridge_jax.training.sparkline import sparkline

# title -> {label: metric}; what a run did not log is left out.
CHARTS = {
    "reward": {"reward": "reward/mean"},
    "recall of training searches": {"recall@3": "retrieval/recall@3", "answer in top 3": "retrieval/answer_in_top3"},
    "searches a rollout": {"searches": "rollout/searches"},
    "share without advantage": {"groups": "reward/zero_advantage_groups", "credited turns": "credit/zero_advantage_turns"},
    "credit: largest share of a document": {"w (posterior)": "credit/weight_max", "p (retriever alone)": "credit/weight_max_p"},
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

PAGE = ("page.css",), ("dom.js", "curves.js")  # styles and scripts
BROWSER = ("browser.css",), ("data.js", "filter.js", "list.js", "episode.js", "compare.js", "browser.js")


def write_report(
    workdirs: AnyPath | Sequence[AnyPath], out: AnyPath | None = None, light: bool = False, budget: int = rollouts.BUDGET
) -> AnyPath:
    """Write the report of one run or several; returns its path.

    Args:
      out: the file; None: `<workdir>/report.html` of the first run.
      light: without rollouts, which takes milliseconds.
      budget: of bytes for the packed rollouts; beyond, an even choice of them is kept, and the page says so.

    Raises:
      UserError: a folder holds no run, or a damaged one.
    """
    folders = [as_path(folder) for folder in (workdirs if isinstance(workdirs, list | tuple) else [workdirs])]
    runs = read_runs(folders)
    path = folders[0] / "report.html" if out is None else as_path(out)
    text = page(runs, None if light else rollouts.choose(runs, budget))
    write_text(path, text.encode("utf-8", "replace").decode("utf-8"))
    return path


def page(runs: Sequence[Run], chosen: rollouts.Chosen | None) -> str:
    """The whole page; every text in it is escaped or packed."""
    title = html.escape(", ".join(run.name for run in runs))
    style, script = (_assets(names + more if chosen else names) for names, more in zip(PAGE, BROWSER, strict=True))
    policy = f"default-src 'none'; style-src '{_hash(style)}'; script-src '{_hash(script)}'; base-uri 'none'; form-action 'none'"
    head = [
        '<meta charset="utf-8">',
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        '<meta name="color-scheme" content="light dark">',
        f"<title>{title} - bridge_jax</title><style>{style}</style>",
    ]
    body = [
        _header(runs, title, chosen),
        "<main>",
        *_results(runs),
        *_curves(runs),
        *_browser(runs, chosen),
        *_settings(runs),
        "</main>",
    ]
    body.append(f"<script>{script}</script>")
    return "\n".join(['<!doctype html>\n<html lang="en">', "<head>", *head, "</head>", "<body>", *body, "</body></html>\n"])


def _header(runs: Sequence[Run], title: str, chosen: rollouts.Chosen | None) -> str:
    known = (("method", "method.name"), ("policy", "policy.model"), ("retriever", "retriever.encoder"))
    known += (("questions a step", "train.questions"), ("rollouts a question", "grpo.group_size"), ("seed", "train.seed"))
    facts = [
        f"<li>{label} <b>{html.escape(str(runs[0].config[field]))}</b></li>"
        for label, field in known
        if all(field in run.config and run.config[field] == runs[0].config.get(field) for run in runs)
    ]
    links = [("results", "Results"), ("curves", "Curves"), ("rollouts", "Rollouts"), ("settings", "Configuration")]
    links = [f'<a href="#{place}">{name}</a>' for place, name in links if place != "rollouts" or chosen]
    heading = title if len(runs) == 1 else f"{len(runs)} runs"
    return (
        f'<header><p class="mark">bridge_jax</p><h1>{heading}</h1><nav aria-label="sections">{"".join(links)}</nav>'
        f'<ul class="facts">{"".join(facts)}</ul></header>'
    )


def _results(runs: Sequence[Run]) -> list[str]:
    parts = ['<section id="results">', "<h2>Results</h2>"]
    parts.append(tables.tiles(runs[0]) if len(runs) == 1 else tables.runs_table(runs))
    for run in runs:
        if len(run.evaluations) > 1:
            first, last = run.evaluations[0], run.evaluations[-1]
            heading = f"Before and after {int(last['step'])} steps"
            note = '<p class="dim">Greedy, in points; EM with its 95 % interval.</p>'
            table = f"{note}{tables.comparison(first, last)}"
            if len(runs) == 1:
                parts += [f"<h3>{heading}</h3>", table]
            else:
                parts.append(f"<details><summary>{html.escape(run.name)}: {heading.lower()}</summary>{table}</details>")
    return [*parts, "</section>"]


def _curves(runs: Sequence[Run]) -> list[str]:
    lines = _lines(runs[0]) if len(runs) == 1 else _beside(runs)
    charts = [found for title, of in lines.items() if (found := chart(title, of))]
    if not charts:
        return []
    note = '<p class="dim">Values where the pointer rests, or with the arrow keys.</p>'
    return ['<section id="curves"><h2>Curves</h2>', note, f'<div class="charts">{"".join(charts)}</div></section>']


def _lines(run: Run) -> dict[str, dict]:
    return _evaluation_lines(run.evaluations) | {
        title: {label: series(run.rows, name) for label, name in lines.items()} for title, lines in CHARTS.items()
    }


def _beside(runs: Sequence[Run]) -> dict[str, dict]:
    """One chart a metric, one line a run: title -> {run: points}."""
    charts: dict[str, dict] = {}
    for run in runs:
        for title, lines in _lines(run).items():
            for label, points in lines.items():
                charts.setdefault(title if len(lines) == 1 else f"{title}: {label}", {})[run.name] = points
    return charts


def _evaluation_lines(evaluated: Sequence[Mapping]) -> dict[str, dict]:
    lines = {}
    for metric, title in (("em", "evaluation: exact match"), ("recall@3", "evaluation: recall@3")):
        found = {
            LABELS.get(group, group): [
                (result["step"], result["averages"][group][metric])
                for result in evaluated
                if result["averages"].get(group, {}).get(metric) is not None
            ]
            for group in LABELS
        }
        overall = found.get(LABELS["overall"])
        lines[title] = {
            label: points for label, points in found.items() if label == LABELS["overall"] or (points and points != overall)
        }
    return lines


def _browser(runs: Sequence[Run], chosen: rollouts.Chosen | None) -> list[str]:
    """The markup that the scripts fill, and the packed data; in a light page how to get it."""
    opening = '<section id="rollouts"><h2>Rollouts</h2>'
    if chosen is None:
        command = html.escape("python -m bridge_jax.report " + " ".join(f"--workdir={run.folder}" for run in runs))
        return [
            opening,
            f'<p>They come into this page when the run has ended, or now by <code class="command">{command}</code></p></section>',
        ]
    notes = "".join(f'<li dir="auto">{html.escape(note)}</li>' for note in chosen.notes)
    parts = [opening, f'<ul class="notes" aria-label="about the choice">{notes}</ul>' if notes else ""]
    if not chosen.count:
        return [*parts, "<p>No rollouts were logged (<code>config.train.log_rollouts_every</code>).</p></section>"]
    described = [{"name": run.name, "method": str(run.config.get("method.name", ""))} for run in runs]
    data = [("runs", pack(described)), ("index", chosen.index), *(("block", block) for block in chosen.blocks)]
    stored = [f'<script type="application/octet-stream" data-part="{part}">{packed}</script>' for part, packed in data]
    return [*parts, _asset("browser.html"), *stored, "</section>"]


def _settings(runs: Sequence[Run]) -> list[str]:
    parts = ['<section id="settings"><h2>Configuration</h2>']
    first = runs[0].config
    for number, run in enumerate(runs):
        fields = run.config.items() if not number else [(k, v) for k, v in run.config.items() if first.get(k, run) != v]
        text = html.escape("\n".join(f"{key} = {value!r}" for key, value in sorted(fields)))
        words = "" if not number else ": what differs from the first"
        parts.append(f"<details><summary>{html.escape(run.name)}{words}</summary><pre>{text}</pre></details>")
    return [*parts, "</section>"]


def _assets(names: Sequence[str]) -> str:
    return "\n" + "\n".join(_asset(name) for name in names)


def _asset(name: str) -> str:
    return resources.files(__package__).joinpath("assets", name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode("utf-8")).digest()).decode("ascii")


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
