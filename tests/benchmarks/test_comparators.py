"""The comparators' runs with real models: their configurations hold, and what the tables say is what the runs' metrics say."""

import json

import agentic_kill
import comparators_pocket
import judge
import pytest

from bridge_jax import config as configuration
from bridge_jax.errors import UserError


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


def test_questions_are_those_such_a_policy_can_answer(shared, tmp_path):
    rows = [json.loads(line) for line in (tmp_path / "questions.jsonl").read_text().splitlines()]
    assert len(rows) > 30
    assert all(row["golden_answers"][0].lower() in ("yes", "no") or row["golden_answers"][0] in row["question"] for row in rows)
    with pytest.raises(UserError, match="no policy there"):
        comparators_pocket.pocket(tmp_path, tmp_path / "nothing")


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
