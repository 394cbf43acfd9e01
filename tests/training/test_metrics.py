"""metrics.jsonl survives kills: half lines are dropped, rows past the checkpoint are cut, the rest stays to the byte."""

import json
import math

from bridge_jax.training.metrics import RunLog, read_metrics


def test_rows_are_cut_back_to_the_checkpoint(tmp_path):
    log = RunLog(tmp_path, start=0)
    for step in range(1, 6):
        log.write({"step": step, "reward/mean": 0.1 * step})
        log.write_rollouts(step, [{"step": step, "text": "line\u2028separator"}])
    whole = (tmp_path / "metrics.jsonl").read_bytes()
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 6, "rew')
    RunLog(tmp_path, start=3)
    assert [row["step"] for row in read_metrics(tmp_path / "metrics.jsonl")] == [1, 2, 3]
    assert whole.startswith((tmp_path / "metrics.jsonl").read_bytes())
    assert sorted(p.name for p in (tmp_path / "rollouts").iterdir()) == [f"step_{i:06d}.jsonl" for i in (1, 2, 3)]
    assert json.loads((tmp_path / "rollouts" / "step_000002.jsonl").read_text().split("\n")[0])["text"] == "line\u2028separator"


def test_non_finite_numbers_stay_json(tmp_path):
    RunLog(tmp_path, start=0).write({"step": 1, "a": math.nan, "b": math.inf, "c": 1.5})
    assert read_metrics(tmp_path / "metrics.jsonl") == [{"step": 1, "a": None, "b": None, "c": 1.5}]
