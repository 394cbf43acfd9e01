"""The report: whole, self-contained, escaped; and the terminal's curves."""

import json
import re
import xml.etree.ElementTree as ET

import pytest

from bridge_jax.errors import UserError
from bridge_jax.report import __main__ as command
from bridge_jax.report import curves, page

EVIL = '<script>alert("x")</script> & <answer>'


def metrics(em, name="two_hop"):
    row = {"n": 40, "em": em, "em_low": em - 0.1, "em_high": em + 0.1, "f1": em, "recall@3": None, "searches": 1.5}
    return {"datasets": {name: row, "one_hop": row}, "averages": {"multi_hop": row, "overall": row}}


@pytest.fixture
def workdir(tmp_path):
    folder = tmp_path / "run"
    (folder / "eval").mkdir(parents=True)
    fields = {"method.name": EVIL, "policy.model": EVIL, "train.seed": 0}
    (folder / "config.json").write_text(json.dumps(fields))
    rows = [{"step": n, "reward/mean": n / 10, "policy/kl": None if n == 2 else 0.1, "time/rollout": 2.0} for n in (1, 2, 3)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for step, em in ((0, 0.25), (3, 0.5)):
        (folder / f"eval/step_{step:06d}.json").write_text(json.dumps({"step": step, **metrics(em, EVIL)}))
    (folder / "eval/step_000003_other_test_all.json").write_text("{}")  # of the evaluate command: not one of the run's own
    return folder


def test_the_command_writes_one_page_that_needs_nothing_else(workdir, capsys):
    assert command.main([f"--workdir={workdir}"]) == 0
    assert capsys.readouterr().out.strip() == str(workdir / "report.html")
    text = (workdir / "report.html").read_text()
    assert not re.search(r"<script|https?://|<link|@import|url\(", text)
    assert "prefers-color-scheme: dark" in text
    assert "&lt;script&gt;alert(&quot;x&quot;)&lt;/script&gt;" in text
    assert ">25.0</td>" in text and ">50.0</td>" in text and "+25.0" in text
    assert "seconds by phase" in text and "entropy of p" not in text  # what was not logged has no chart


def test_every_chart_is_well_formed_and_inside_its_frame(workdir):
    text = page.write_report(workdir).read_text()
    charts = re.findall(r"<svg.*?</svg>", text, re.DOTALL)
    assert len(charts) >= 3
    for chart in charts:
        for line in ET.fromstring(chart).iter("polyline"):
            points = [tuple(map(float, point.split(","))) for point in line.get("points").split()]
            assert all(0 <= x <= curves.WIDTH and 0 <= y <= curves.HEIGHT for x, y in points)


def test_a_run_that_has_not_begun_has_a_page(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    assert "configuration" in page.write_report(tmp_path).read_text()
    assert page.terminal_curves(tmp_path) == ""


def test_a_folder_without_a_run_is_named(tmp_path, capsys):
    assert command.main([f"--workdir={tmp_path / 'nowhere'}"]) == 2
    assert "nowhere holds no run (config.json is missing)" in capsys.readouterr().err


def test_a_damaged_evaluation_is_named(workdir):
    (workdir / "eval/step_000003.json").write_text("{")
    with pytest.raises(UserError, match=r"step_000003\.json is damaged"):
        page.write_report(workdir)


def test_series_leaves_out_what_is_no_number():
    rows = [{"step": 1, "a": 1}, {"step": 2, "a": None}, {"step": 3}, {"step": 4, "a": float("nan")}, {"step": 5, "a": 2.0}]
    assert curves.series(rows, "a") == [(1, 1.0), (5, 2.0)]


def test_sparkline():
    assert curves.sparkline([0, 1, 2, 3, 4, 5, 6, 7]) == curves.BLOCKS
    assert curves.sparkline([2.0, 2.0]) == "▁▁"
    assert curves.sparkline([]) == ""
    assert curves.sparkline([0, 0, 7, 7], width=2) == "▁█"
    assert len(curves.sparkline(range(1000))) == 40


def test_terminal_curves(workdir):
    lines = page.terminal_curves(workdir).splitlines()
    assert lines[0] == "EM (evaluation)  0.250 ▁█ 0.500"
    assert lines[1].startswith("reward           0.100 ▁") and lines[1].endswith("0.300")
    assert len(lines) == 2
