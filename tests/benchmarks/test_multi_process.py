"""What two layouts of a run are compared by."""

import json

import agentic_processes
import multi_process
import pytest


class Finished(multi_process.Bench):
    """Runs that lie there: {name: [(what was rolled out, metrics) a step]}."""

    def __init__(self, folder, runs):
        self.folder = folder
        for name, steps in runs.items():
            (folder / name / "rollouts").mkdir(parents=True)
            for step, (trace, metrics) in enumerate(steps, 1):
                row = {"id": "q", "sample": 0, "trace": trace, "turns": [{"query": "who"}]}
                (folder / name / "rollouts" / f"step_{step:06d}.jsonl").write_text(json.dumps(row) + "\n")
                with (folder / name / "metrics.jsonl").open("a") as file:
                    file.write(json.dumps({"step": step, "time/step": float(step), **metrics}) + "\n")


def test_the_largest_difference_is_of_steps_with_the_same_rollouts(tmp_path):
    alone = [("a", {"loss": 1.0, "reward": 0.5}), ("b", {"loss": 2.0, "reward": 0.5})]
    two = [("a", {"loss": 1.25, "reward": 0.5, "time/step": 9.0}), ("other", {"loss": 9.0, "reward": 0.0})]
    bench = Finished(tmp_path, {"alone": alone, "two": two})
    assert bench.compared("two") == {"steps_with_the_same_rollouts": 1, "largest_relative_difference": ["loss", 0.25]}


def test_without_such_a_step_there_is_no_difference(tmp_path):
    bench = Finished(tmp_path, {"alone": [("a", {"loss": 1.0})], "two": [("b", {"loss": 1.0})]})
    assert bench.compared("two") == {"steps_with_the_same_rollouts": 0, "largest_relative_difference": None}


@pytest.mark.parametrize("same", [True, False])
def test_rows_that_differ_are_a_failure(tmp_path, monkeypatch, capsys, same):
    """Two stand-ins of runs: the second one's pairs, and with them its steps, are others."""
    rounds = {}

    def run(self, name, processes, devices, **fields):
        rounds[name] = count = 2 if same or processes == 1 else 3
        folder = self.folder / name / "agentic_r" / "round_1"
        (folder / "encoder_training").mkdir(parents=True)
        for stage in agentic_processes.STAGES:
            (folder / f"{stage}.jsonl").write_text('{"scores": [0.5]}\n' * (count if stage == "pairs" else 1))
        (folder / "encoder_training" / "metrics.jsonl").write_text('{"loss": 0.5}\n' * count)
        Finished(self.folder, {f"{name}/": [("a", {"loss": 1.0})]})
        return 1.0

    monkeypatch.setattr(agentic_processes.World, "run", run)
    monkeypatch.setattr(agentic_processes, "ROOT", tmp_path)
    monkeypatch.setattr("sys.argv", ["agentic_processes.py"])
    (tmp_path / "benchmarks" / "results").mkdir(parents=True)
    if same:
        agentic_processes.main()
    else:
        with pytest.raises(SystemExit, match="not the same: grpo: pairs, ppo: pairs"):
            agentic_processes.main()
    result = json.loads((tmp_path / "benchmarks" / "results" / "agentic_processes.json").read_text())
    assert len(rounds) == 4 and result["ppo"]["largest_difference_of_a_loss"] == (0.0 if same else None)
