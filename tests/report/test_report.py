"""The report: whole, self-contained, escaped; which rollouts it holds and how; and the terminal's curves."""

import base64
import gzip
import json
import math
import re
import xml.etree.ElementTree as ET

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from made_runs import EVIL, HOSTILE, document, prediction, rollout, run_folder, write_lines

from bridge_jax import train
from bridge_jax.errors import UserError
from bridge_jax.report import __main__ as command
from bridge_jax.report import curves, episodes, layout, page, rollouts, runs
from bridge_jax.training import sparkline as blocks


@pytest.fixture
def workdir(tmp_path):
    return run_folder(tmp_path / "run", name=EVIL)


def unpack(packed):
    return json.loads(gzip.decompress(base64.b64decode(packed)))


def parts(text, name):
    return [unpack(found) for found in re.findall(rf'data-part="{name}">([^<]*)</script>', text)]


def test_the_command_writes_one_page_that_needs_nothing_else(workdir, capsys):
    assert command.main([f"--workdir={workdir}"]) == 0
    assert capsys.readouterr().out.strip() == str(workdir / "report.html")
    text = (workdir / "report.html").read_text()
    assert not re.search(r"https?://|<link|@import|url\(|innerHTML|insertAdjacentHTML|document\.write|eval\(", text)
    assert "default-src 'none'" in text and "unsafe" not in text
    assert "prefers-color-scheme: dark" in text
    assert EVIL not in text and "&lt;script&gt;alert(&quot;x&quot;)&lt;/script&gt;" in text
    assert ">25.0 <small>15-35</small></td>" in text and ">50.0 <small>" in text and "+25.0" in text
    assert "seconds by phase" in text and "entropy of p" not in text  # what was not logged has no chart


def test_every_chart_is_well_formed_and_inside_its_frame(workdir):
    text = page.write_report(workdir).read_text()
    charts = re.findall(r"<svg.*?</svg>", text, re.DOTALL)
    assert len(charts) >= 3
    for chart in charts:
        for line in ET.fromstring(chart).iter("polyline"):
            points = [tuple(map(float, point.split(","))) for point in line.get("points").split()]
            assert all(0 <= x <= curves.WIDTH and 0 <= y <= curves.HEIGHT for x, y in points)
            assert len(line.get("data-values").split()) == len(points)


def test_long_runs_have_thin_lines():
    line = ET.fromstring(re.search(r"<svg.*</svg>", curves.chart("t", {"a": [(n, n) for n in range(10_000)]}))[0]).find("polyline")
    values = [tuple(map(float, pair.split(":"))) for pair in line.get("data-values").split()]
    assert len(values) == 400 and values[0] == (12, 12) and all(math.isclose(a, b, rel_tol=1e-3) for a, b in values)


def test_ticks_and_colours():
    chart = curves.chart("t", {"one": [], "two": [(1, 3.12e-13), (2, 8.19e-5)]})
    ticks = re.findall(r'text-anchor="end">([^<]*)<', chart)
    assert ticks[:3] == ["0", "4.1e-05", "8e-05"] and 'class="c1" points' in chart and '<li class="c1">two</li>' in chart


def test_a_run_that_has_not_begun_has_a_page(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    text = page.write_report(tmp_path).read_text()
    assert "Configuration" in text and "No rollouts were logged" in text
    assert page.terminal_curves(tmp_path) == ""


def test_a_folder_without_a_run_is_named(tmp_path, workdir, capsys):
    assert command.main([f"--workdir={tmp_path / 'nowhere'}"]) == 2
    assert "nowhere holds no run (config.json is missing)" in capsys.readouterr().err
    assert command.main([f"--workdir={workdir}", f"--workdir={workdir}"]) == 2
    assert "is given twice" in capsys.readouterr().err
    assert command.main([f"--workdir={workdir}", "--budget=0"]) == 2
    assert "--budget=0" in capsys.readouterr().err


def test_a_damaged_evaluation_is_named(workdir):
    for damaged in ("{", "[]", '{"step": 3}'):
        (workdir / "eval/step_000003.json").write_text(damaged)
        with pytest.raises(UserError, match=r"step_000003\.json is damaged"):
            page.write_report(workdir)


def test_the_light_page_says_how_to_get_the_rollouts(workdir):
    whole = page.write_report(workdir).read_text()
    light = page.write_report(workdir, light=True).read_text()
    assert "data-part" not in light and f"python -m bridge_jax.report --workdir={workdir}" in light
    assert len(parts(whole, "block")) == 1


def test_a_run_under_way_writes_the_light_page_and_never_stops_for_it(workdir, caplog):
    train.report_so_far(workdir)
    assert "Before and after 3 steps" in (workdir / "report.html").read_text()
    (workdir / "eval/step_000003.json").write_text("{")
    train.report_so_far(workdir)
    assert "was not written" in caplog.text and "step_000003.json is damaged" in caplog.text


def test_the_layout_holds_every_episode(workdir):
    text = page.write_report(workdir).read_text()
    [index], [block] = parts(text, "index"), parts(text, "block")
    rows = [json.loads(line) for path in sorted(workdir.glob("rollouts/*")) for line in path.read_text().splitlines()]
    count = len(rows) + 8
    assert len(block["episodes"]) == count and {len(index[name]) for name in layout.COLUMNS} == {count}
    for n, row in enumerate(rows):
        question = index["questions"][index["question"][n]]
        assert question == [row["id"], index["datasets"].index(row["dataset"]), row["question"], row["golds"]]
        assert (index["step"][n], index["sample"][n], index["reward"][n]) == (row["step"], row["sample"], row["reward"])
        assert (index["answer"][n], index["queries"][n]) == (row["answer"], [row["turns"][0]["query"]])
        trace = [(episodes.KINDS[kind], block["texts"][text]) for kind, text in block["episodes"][n]["trace"]]
        assert trace == [(part["kind"], part["text"]) for part in row["trace"]]
        [[query, _, credit, _, shown, documents, gold, score, p, l, w]] = block["episodes"][n]["searches"]  # noqa: E741
        given = row["turns"][0]["documents"]
        assert (query, credit, shown, gold) == (row["turns"][0]["query"], "answer", 3, [1])
        assert [block["documents"][place] for place in documents] == [[found["id"], found["title"]] for found in given]
        for name, values in (("score", score), ("p", p), ("l", l), ("w", w)):
            assert values == pytest.approx([found[name] for found in given], abs=0.05 if name == "l" else 5e-4)
    assert len(block["documents"]) < sum(len(row["turns"][0]["documents"]) for row in rows) / 8  # each once
    assert index["source"] == [0] * len(rows) + [1] * 8
    [[*_, documents, gold, _, p, l, w]] = block["episodes"][-1]["searches"]  # noqa: E741
    assert [block["documents"][place] for place in documents] == [
        ["p1", "Passage 1"],
        ["p2", "Passage 2"],
    ]  # titles of the rollouts
    odds = math.exp(0.25 / 0.5)
    assert p == pytest.approx([odds / (1 + odds), 1 / (1 + odds)], abs=1e-3) and (gold, l, w) == ([1], None, None)


def test_what_is_no_rollout_is_named_and_left_out(tmp_path, capsys):
    good = rollout(1, 0, 0, True)
    broken = [
        json.dumps(good)[:40],
        "[]",
        good | {"trace": None, "turns": "x"},
        {name: value for name, value in good.items() if name != "question"},
        good | {"trace": [{"kind": "song", "text": "la"}]},
        good | {"step": "one"},
        good | {"turns": [{"query": "q", "documents": [5]}]},
    ]
    folder = run_folder(tmp_path / "run", rollouts={1: [good, *broken, "", good]}, steps=(1,), group=1)
    write_lines(folder / "rollouts/step_000002.jsonl", [])
    (folder / "rollouts/step_000003.jsonl").write_bytes(b"\xff\xfe\n" + json.dumps(good | {"step": 3}).encode())  # no last newline
    chosen = rollouts.choose(runs.read_runs([folder]))
    assert chosen.count == 3 + 8
    assert "run/rollouts/step_000001.jsonl, line 2, was skipped" in chosen.notes[0]
    assert "'turns' is a str" in chosen.notes[2] and "'question' is missing" in chosen.notes[3] and "song" in chosen.notes[4]
    assert chosen.notes[-1] == "3 more lines were skipped."
    assert all(note.split(",")[0] in page.write_report(folder).read_text() for note in chosen.notes[:5])
    wrong = prediction(0, True) | {"turns": [{"query": "q", "ids": ["a"], "scores": [], "shown": 0}]}
    with pytest.raises(ValueError, match="more ids than scores"):
        episodes.from_prediction(wrong, 1.0, {})


def test_numbers_that_are_none_stay_json(tmp_path):
    odd = rollout(1, 0, 0, True)
    odd["turns"][0]["documents"] = [document(0) | {"p": math.nan, "l": -math.inf, "w": None, "score": 10**400}]
    folder = run_folder(tmp_path / "run", rollouts={1: [odd]}, steps=(1,))
    [block] = parts(page.write_report(folder).read_text(), "block")
    assert block["episodes"][0]["searches"][0][-4:] == [[None]] * 4


def test_hostile_text_stays_packed(tmp_path):
    evil = rollout(1, 0, 0, True, text=HOSTILE + "\ud800")
    evil["trace"][1]["text"] = HOSTILE
    folder = run_folder(tmp_path / "run", rollouts={1: [evil]}, steps=(1,))
    text = page.write_report(folder).read_text()
    assert "onerror" not in text and "\u202e" not in text
    [index] = parts(text, "index")
    assert index["questions"][0][2] == HOSTILE + "?"  # half a surrogate is no text


def test_beyond_the_budget_an_even_choice_is_kept_and_told(tmp_path):
    steps = range(1, 9)
    lines = {
        step: [rollout(step, q, s, q % 2, text=f"{step} {q} {'x' * q}") for q in range(40) for s in range(4)] for step in steps
    }
    folder = run_folder(tmp_path / "run", rollouts=lines, steps=tuple(steps), group=4)
    everything = rollouts.choose(runs.read_runs([folder]))
    assert everything.count == 8 * 160 + 8 and not everything.notes
    size = layout.packed_bytes(everything.index, everything.blocks)
    for part, budget in ((0.5, size // 2), (0.05, size // 20)):
        few = rollouts.choose(runs.read_runs([folder]), budget)
        assert layout.packed_bytes(few.index, few.blocks) <= budget
        index = unpack(few.index)
        kept = [index["step"][n] for n in range(few.count) if index["source"][n] == 0]
        assert len(kept) % 4 == 0 and len(kept) >= part * 0.4 * 1280  # whole groups, and most of what fits
        if part == 0.5:
            assert {kept.count(step) for step in steps} <= {kept.count(1), kept.count(1) + 4, kept.count(1) - 4}
        assert re.match(rf"run: {len(kept) // 4} of 320 questions of its logged rollouts are here", few.notes[0])
        assert few.notes[0] in page.write_report(folder, budget=budget).read_text()


def test_runs_keep_the_same_questions(tmp_path):
    lines = {1: [rollout(1, q, 0, True, text=f"{q} {'y' * q}") for q in range(200)]}
    folders = [run_folder(tmp_path / name, rollouts=lines, steps=(1,), group=1, method=name) for name in ("one", "two")]
    chosen = rollouts.choose(runs.read_runs(folders), 20_000)
    index = unpack(chosen.index)
    kept = [
        {index["question"][n] for n in range(chosen.count) if (index["run"][n], index["source"][n]) == (run, 0)} for run in (0, 1)
    ]
    assert kept[0] == kept[1] and 10 < len(kept[0]) < 200


def test_several_runs_share_charts(tmp_path):
    folders = [run_folder(tmp_path / name / "seed0", method=name) for name in ("bridge", "vt")]
    text = page.write_report(folders, tmp_path / "both.html").read_text()
    assert "2 runs" in text and text.count("bridge/seed0") > 3 and text.count('data-label="vt/seed0"') > 3
    assert [run["method"] for run in parts(text, "runs")[0]] == ["bridge", "vt"]
    assert "method.name = &#x27;vt&#x27;" in text and text.count("policy.model") == 1  # the second's differences only


FIELDS = [*rollout(1, 0, 0, True), *"documents query kind text p w ids scores shown em prediction".split()]
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(FIELDS), inner, max_size=8),
    max_leaves=20,
)


@settings(deadline=None)
@given(JSON, st.sampled_from([None, "trace", "turns", "golds", "question", "reward", "sample", "answer"]))
def test_any_json_is_an_episode_or_a_value_error(value, field):
    for row in (value, rollout(1, 0, 0, True) | {field: value}, {**prediction(0, True), field: value}):
        for read in (episodes.from_rollout, lambda row: episodes.from_prediction(row, 0.1, {})):
            try:
                episode = read(row)
            except ValueError:
                continue
            made = layout.Layout()
            made.add(0, 0, 1, episode)
            made.finish()  # packs: nothing of it is no JSON


def test_series_leaves_out_what_is_no_number():
    rows = [{"step": 1, "a": 1}, {"step": 2, "a": None}, {"step": 3}, {"step": 4, "a": float("nan")}, {"step": 5, "a": 2.0}]
    assert curves.series(rows, "a") == [(1, 1.0), (5, 2.0)]


def test_sparkline():
    assert blocks.sparkline([0, 1, 2, 3, 4, 5, 6, 7]) == blocks.BLOCKS
    assert blocks.sparkline([2.0, 2.0]) == "▁▁"
    assert blocks.sparkline([]) == ""
    assert blocks.sparkline([0, 0, 7, 7], width=2) == "▁█"
    assert len(blocks.sparkline(range(1000))) == 40


def test_terminal_curves(workdir):
    lines = page.terminal_curves(workdir).splitlines()
    assert lines[0] == "EM (evaluation)  0.250 ▁█ 0.500"
    assert lines[1].startswith("reward           0.100 ▁") and lines[1].endswith("0.300")
    assert len(lines) == 2
