"""The comparators' runs with real models: their configurations hold, and what the tables say is what the runs' metrics say."""

import json
import sys

import agentic_kill
import comparators_pocket
import endpoint_server
import judge
import pytest

from bridge_jax import config as configuration
from bridge_jax.data.qa import Question


def loaded(config, overrides):
    return configuration.load(f"{comparators_pocket.runs.HOME}/configs/{config}.py", [f"{k}={v}" for k, v in overrides.items()])


@pytest.fixture
def shared(tmp_path):
    (tmp_path / "warmstart").mkdir()
    (tmp_path / "warmstart" / "config.json").write_text("{}")
    return comparators_pocket.pocket(tmp_path, tmp_path / "warmstart")


@pytest.mark.parametrize("name", comparators_pocket.METHODS)
def test_every_method_s_settings_are_a_configuration(shared, name):
    config = loaded("pocket", shared | {"method.name": name} | comparators_pocket.METHODS[name])
    assert config.train.questions % config.grpo.minibatch_questions == 0 and config.method.name == name.removesuffix("_ppo")


def test_questions_are_those_such_a_policy_can_answer(shared, tmp_path, monkeypatch):
    assert len((tmp_path / "questions.jsonl").read_text().splitlines()) > 30
    known = [
        Question("named", "Which is older, Rome or Milan?", ("Rome",), (), ""),
        Question("to be found", "Who founded Rome?", ("Romulus",), (), ""),
        Question("yes", "Is Rome older than Milan?", ("Yes", "it is"), (), ""),
    ]
    monkeypatch.setattr(comparators_pocket, "load_questions", lambda *_: known)
    comparators_pocket.pocket(tmp_path / "own", tmp_path / "warmstart")
    rows = [json.loads(line) for line in (tmp_path / "own" / "questions.jsonl").read_text().splitlines()]
    assert rows == [
        {"id": "named", "question": "Which is older, Rome or Milan?", "golden_answers": ["Rome"]},
        {"id": "yes", "question": "Is Rome older than Milan?", "golden_answers": ["Yes", "it is"]},
    ]


def test_without_a_policy_nothing_is_run(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(endpoint_server, "version", lambda python: pytest.fail("before the policy was looked for"))
    for script in (comparators_pocket, judge):
        monkeypatch.setattr("sys.argv", ["x", f"--warmstart={tmp_path / 'nothing'}", f"--root={tmp_path / 'runs'}"])
        assert script.main() == 2
        assert "no policy there" in capsys.readouterr().err


def test_the_judge_s_rounds_are_configurations(shared):
    url = {"agentic.judge": "http://127.0.0.1:1/v1", "agentic.judge_model": "small"}
    assert loaded("mini", agentic_kill.OVERRIDES | judge.ROUND | url).agentic.candidates == 20
    own = shared | comparators_pocket.METHODS["agentic_r"] | {"method.name": "agentic_r", "agentic.judge": "policy"}
    assert loaded("pocket", own).agentic.judge == "policy"


def test_a_row_of_the_table():
    step = {"time/rollout": 3.2, "time/score": 2.0, "time/retriever": 0.2, "retriever/distil_kl": 0.5, "reward/mean": 0.25}
    found = {"seconds": 61.4, "peak_bytes": 3 * 2**30, "steps": [step, step]}
    last = comparators_pocket.table({"replug": found, "search_r1": {"failed": "no model"}}).splitlines()[2:]
    row = "| `replug` | 6 | 4 | - | - | - | - | 61 | 3.0 GiB | KL 0.50, reward 0.25 |"
    assert last == [row, "| `search_r1` | failed: no model |"]


def test_what_shows_that_a_step_did_its_work():
    agentic = {
        "agentic/candidates/rows": 5, "agentic/global/completions": 20, "agentic/global/right": 7, "agentic/pairs/rows": 3,
        "agentic/local/judge_calls": 5, "agentic/encoder_training/loss_first": 1.5,
        "agentic/encoder_training/loss_last_epoch": 0.25,
    }  # fmt: skip
    said = "5 searches, 20 completions (7 right), 3 teach; InfoNCE 1.50, then 0.25; judge calls 5"
    assert comparators_pocket.facts([agentic]) == said
    picked = [{"selection/kept": 4}, {"count/rollouts": 12, "sft/heldout_before": 2.0, "sft/heldout_after": 1.5}]
    assert comparators_pocket.facts(picked) == "4 of 12 rollouts kept; held-out loss 2.00, then 1.50"
    grpo = [{"reward/mean": 0.5, "policy/grad_norm": 0.1234}, {"reward/mean": 0.75, "policy/grad_norm": 0.2}]
    assert comparators_pocket.facts(grpo) == "reward 0.50, 0.75; gradient of the policy 0.123, 0.200"


def test_a_method_is_a_process_and_its_result_keeps_the_settings(tmp_path, monkeypatch, capsys, shared):
    step = 'open(sys.argv[1] + "/metrics.jsonl", "a").write(\'{"step": 1, "reward/mean": 0.5, "policy/grad_norm": 1.0}\\n\')'
    seen = []

    def command(workdir, overrides):
        seen.append(overrides["method.name"])
        fails = 'sys.exit("error: no such model")' if overrides["method.name"] == "replug" else step
        return [sys.executable, "-c", f"import sys; {fails}", str(workdir)]

    monkeypatch.setattr(comparators_pocket, "command", command)
    monkeypatch.setattr(comparators_pocket.runs, "RESULTS", tmp_path)
    old = {"seconds": 9.0, "peak_bytes": 0, "changes": {}, "steps": [{"reward/mean": 0.0, "policy/grad_norm": 0.0}]}
    path = tmp_path / "comparators_pocket.json"
    path.write_text(json.dumps({"machine": {"cpu": "old"}, "settings": {}, "methods": {"r1_searcher": old, "replug": old}}))
    (tmp_path / "runs" / "search_r1").mkdir(parents=True)
    (tmp_path / "runs" / "search_r1" / "metrics.jsonl").write_text('{"step": 1, "of": "a run that was stopped"}\n')

    def main(methods):
        monkeypatch.setattr(
            "sys.argv", ["x", f"--only={methods}", f"--warmstart={tmp_path / 'warmstart'}", f"--root={tmp_path / 'runs'}"]
        )
        return comparators_pocket.main()

    assert main("search_r1,replug") == 0
    result = json.loads(path.read_text())
    assert result["machine"] == {"cpu": "old"} and result["methods"]["r1_searcher"] == old
    found = result["methods"]["search_r1"]
    assert found["steps"] == [{"reward/mean": 0.5, "policy/grad_norm": 1.0}] and found["peak_bytes"] > 0
    assert found["machine"]["cores"] and found["settings"]["grpo.group_size"] == "5"
    assert result["methods"]["replug"]["failed"] == "error: no such model"

    assert main("search_r1,replug,r1_searcher") == 0
    assert seen == ["search_r1", "replug", "replug", "r1_searcher"], "what is measured is not measured again"
    again = json.loads(path.read_text())
    assert again["methods"]["search_r1"] == found and list(again) == ["methods"], "every method has its own machine now"

    monkeypatch.setitem(comparators_pocket.METHODS["search_r1"], "grpo.group_size", 6)
    with pytest.raises(SystemExit, match=r"search_r1 was measured with another grpo\.group_size: delete it"):
        main("search_r1")
