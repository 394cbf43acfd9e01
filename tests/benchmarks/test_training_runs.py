"""The runner with stand-ins for training: what is run, what is not run again, what a failure costs, and what is read back."""

import importlib
import json
import os
import signal
import threading

import numpy as np
import outcomes
import pytest
import training_runs as runs

from bridge_jax.evaluation import aggregate

TRAIN = """
import json, os, pathlib, sys
workdir, steps, fail = pathlib.Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3] == "fail"
(workdir / "eval").mkdir(parents=True, exist_ok=True)
path = workdir / "metrics.jsonl"
done = len(path.read_text().splitlines()) if path.exists() else 0
with path.open("a") as file:
    for step in range(done + 1, steps + 1):
        file.write(json.dumps({"step": step, "stage": 1, "time/step": 30.0 if step == 1 else 2.0}) + "\\n")
with (workdir / "calls.txt").open("a") as file:
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    file.write(f"train {steps} {cores}\\n")
if fail:
    sys.exit("error: no such model")
"""
EVALUATE = """
import json, pathlib, sys
workdir, steps = pathlib.Path(sys.argv[1]), int(sys.argv[2])
rows = [{"id": f"q{i}", "em": float(i < steps), "recall@3": None if i == 3 else 0.5} for i in range(4)]
result = {"step": steps, "predictions": {"one_hop": rows, "two_hop": rows[::-1]}}
(workdir / f"eval/step_{steps:06d}_one_hop+two_hop_test_all.json").write_text(json.dumps(result))
"""


class StandIn(runs.Run):
    fail = False

    @property
    def total(self):
        return self.overrides["train.steps"]

    def commands(self, workdir):
        steps = str(self.total)
        return [["-c", TRAIN, str(workdir), steps, "fail" if self.fail else ""], ["-c", EVALUATE, str(workdir), steps]]


class Failing(StandIn):
    fail = True


def made(name, steps=3, kind=StandIn, **fields):
    return kind(name, "configs/mini.py", {"train.steps": steps, **fields})


def calls(root, name):
    return [line.split()[:2] for line in (root / name / "calls.txt").read_text().splitlines()]


def test_a_failing_run_costs_only_itself(tmp_path):
    lines = []
    wanted = [made("a/seed0"), made("b/seed0", kind=Failing), made("c/seed0")]
    failures = runs.execute(wanted, tmp_path, jobs=2, say=lines.append)
    assert len(failures) == 1
    assert "b/seed0" in failures[0] and "error: no such model" in failures[0] and "b-seed0.log" in failures[0]
    assert [runs.finished(run, tmp_path) for run in wanted] == [True, False, True]
    assert lines[-1].startswith("[9/9 steps")
    assert (tmp_path / "a/seed0/calls.txt").read_text() == f"train 3 {runs.shares(2)[0]}\n"
    with pytest.raises(SystemExit, match="no such model"):
        runs.conclude(failures)


def test_finished_runs_rest_and_longer_ones_go_on(tmp_path):
    runs.execute([made("a/seed0")], tmp_path, say=list)
    runs.execute([made("a/seed0"), made("b/seed0")], tmp_path, say=list)
    assert calls(tmp_path, "a/seed0") == [["train", "3"]]
    runs.execute([made("a/seed0", steps=5)], tmp_path, say=list)
    assert calls(tmp_path, "a/seed0") == [["train", "3"], ["train", "5"]]
    short, long = (outcomes.Outcome(made("a/seed0", steps=n), tmp_path) for n in (3, 5))
    assert (short.final["step"], long.final["step"]) == (3, 5)  # both evaluations stay readable
    assert [row["step"] for row in short.metrics] == [1, 2, 3]  # what came after is not the short run's


def test_another_run_in_the_folder_is_refused(tmp_path):
    runs.execute([made("a/seed0")], tmp_path, say=list)
    with pytest.raises(SystemExit, match=r"holds another run .*credit\.tau=0\.5"):
        runs.finished(made("a/seed0", **{"credit.tau": 0.5}), tmp_path)


def test_stopped_itself_it_stops_its_runs(tmp_path):
    class Sleeping(StandIn):
        def commands(self, workdir):
            workdir.mkdir(parents=True)
            note = f"import os, time; open({str(workdir / 'pid')!r}, 'w').write(str(os.getpid())); time.sleep(60)"
            return [["-c", note]]

    timer = threading.Timer(3.0, os.kill, (os.getpid(), signal.SIGTERM))
    timer.start()
    with pytest.raises(SystemExit, match="terminated"):
        runs.execute([Sleeping("a/seed0", "configs/mini.py", {"train.steps": 1})], tmp_path, say=list)
    pid = int((tmp_path / "a/seed0/pid").read_text())
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_cores_are_dealt_out_without_overlap(monkeypatch):
    monkeypatch.setattr(runs.os, "sched_getaffinity", lambda pid: {0, 1, 2, 3, 4}, raising=False)
    assert runs.shares(2) == [[0, 1, 2], [3, 4]]
    assert runs.shares(5) == [[0], [1], [2], [3], [4]]
    assert runs.shares(7)[5:] == [[0], [1]]


def test_words_of_a_run():
    run = runs.Run("a/seed1", "configs/mini.py", {"data.train": ("mini/one_hop", "mini/two_hop"), "train.seed": 1})
    assert run.words() == [
        "--config=configs/mini.py", "--config.data.eval_split=test", "--config.data.train=mini/one_hop,mini/two_hop",
        "--config.train.seed=1",
    ]  # fmt: skip


def test_total_counts_both_stages():
    run = runs.Run("a/seed1", "configs/mini.py", {"method.name": "rag_then_rl", "train.steps": 7})
    assert run.total == 14


def test_what_is_read_back(tmp_path):
    runs.execute([made("a/seed0"), made("a/seed1", steps=2)], tmp_path, say=list)
    found = [outcomes.Outcome(made(f"a/seed{n}", steps=3 - n), tmp_path) for n in (0, 1)]
    table = outcomes.scores([outcome.final for outcome in found])
    np.testing.assert_array_equal(table["one_hop"], [[1, 1, 1, 0], [1, 1, 0, 0]])
    np.testing.assert_array_equal(table["two_hop"], [[0, 1, 1, 1], [0, 0, 1, 1]])
    only = outcomes.scores([found[0].final], only={"one_hop": ["q3", "q0"], "two_hop": ["q0"]})
    np.testing.assert_array_equal(only["one_hop"], [[0, 1]])
    assert aggregate.groups(list(table)) == {
        "single_hop": ["one_hop"], "multi_hop": ["two_hop"], "overall": ["one_hop", "two_hop"],
    }  # fmt: skip
    assert json.loads((tmp_path / "a/seed0/finished.json").read_text())["definition"][0] == "--config=configs/mini.py"


@pytest.mark.parametrize(
    ("script", "word", "said"),
    [
        ("ablation", "--seeds=0", "--seeds: 0: must be at least 1"),
        ("ablation", "--seeds=many", "--seeds: invalid whole_number value: 'many'"),
        ("ablation", "--jobs=0", "--jobs: 0: must be at least 1"),
        ("first_hop", "--steps=-1", "--steps: -1: must be at least 0"),
        ("fidelity", "--limit=-1", "--limit: -1: must be at least 0"),
        ("method_cost", "--config=nope.py", "nope.py does not exist"),
        ("method_cost", "--rounds=0", "--rounds: 0: must be at least 1"),
        ("credit_audit", "--rows=foo", "--rows: there is no 'foo'; there are agentic_r, "),
        ("grpo_step", "--peers-python=/nope", "--peers-python: /nope is no program"),
        ("grpo_step", "--cases=dense,foo", "--cases: there is no 'foo'; there are dense, ragged, full_vocab"),
        ("rollout", "--groups=1,0", "--groups: 0: must be at least 1"),
        ("end_to_end", "--name=../../x", "--name: '../../x': letters, digits"),
        ("mini_world", "--split=foo", "error: 'mini/one_hop' has no split 'foo'"),
    ],
)
def test_a_wrong_argument_is_told_in_one_line(script, word, said, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", [script, word])
    with pytest.raises(SystemExit) as ended:
        raise SystemExit(importlib.import_module(script).main())
    assert ended.value.code == 2
    assert said in capsys.readouterr().err.splitlines()[-1]
