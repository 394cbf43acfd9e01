"""What the benchmark scripts make of finished runs, on runs made by hand."""

from types import SimpleNamespace

import ablation
import compilations
import first_hop
import method_cost
import pytest
import training_runs as runs
from step_costs import StepCosts

SETS = ("one_hop", "two_hop")


class Stub:
    """A finished run: `right` of 10 questions a set at its end, fewer on the way."""

    def __init__(self, right, steps=4, method="bridge"):
        self.run = runs.Run("stub/seed0", "configs/mini.py", {"train.steps": steps, "method.name": method})
        count = {"count/policy_updates": 1, "count/retriever_updates": 1, "count/rollouts": 8}
        self.metrics = [{"step": n, **{name: n * value for name, value in count.items()}} for n in range(1, steps + 1)]
        self.final = self._evaluation(steps, right, 10)
        self._right, self._steps = right, steps

    def _evaluation(self, step, right, questions):
        rows = [{"id": f"q{i}", "em": float(i < right), "recall@3": 0.5} for i in range(questions)]
        return {"step": step, "predictions": dict.fromkeys(SETS, rows)}

    def on_the_way(self):
        return list(range(0, self._steps + 1, 2))

    def at(self, step):
        return self._evaluation(step, self._right - (self._steps - step), 5)


COSTS = StepCosts({"bridge": 3.0, "vt_search": 1.0, "two_state": 6.0, "retriever_stage": 2.0})


@pytest.fixture
def rows():
    made = {"bridge": 8, "vt_search": 4, "two_state": 8}
    return {name: ablation.Row(name, {"method.name": name}, [Stub(right)] * 2) for name, right in made.items()}


def test_a_row_has_the_keys_that_others_rely_on(rows):
    row = ablation.line("vt_search", rows["vt_search"].finals, rows, COSTS)
    assert row["multi_hop_em"] == row["overall_em"] == 0.4
    assert row["low"] < 0.4 < row["high"]
    assert row["minus_bridge"]["multi_hop"]["mean"] == pytest.approx(-0.4)
    assert row["minus_vt_search"]["overall"]["mean"] == 0.0
    assert row["seconds"] == 4.0 and row["step_seconds"] == (1.0,) and row["rollouts"] == 32 and row["seeds"] == 2


def test_rows_of_different_seeds_share_the_first_ones(rows):
    rows["bridge"].outcomes = [Stub(8), Stub(8), Stub(2)]
    row = ablation.line("vt_search", rows["vt_search"].finals, rows, COSTS)
    assert row["minus_bridge"]["multi_hop"]["mean"] == pytest.approx(-0.4)


def test_an_option_is_compared_with_the_row_that_differs_in_one_thing(rows):
    rows |= {name: ablation.Row(name, {}, [Stub(right)] * 2) for name, right in (("bridge_llds", 7), ("bridge_minibatches", 5))}
    row = ablation.line("bridge_llds", rows["bridge_llds"].finals, rows, COSTS)
    assert row["minus_bridge_minibatches"]["multi_hop"]["mean"] == pytest.approx(0.2)
    assert "seconds" not in row  # its steps were not measured


def test_a_dearer_row_is_read_at_the_first_evaluation_after_the_budget(rows):
    outcome = rows["two_state"].outcomes[0]
    assert [ablation.crossing("two_state", outcome, budget, COSTS)["step"] for budget in (12.0, 13.0, 999.0)] == [2, 4, 4]
    assert ablation.crossing("two_state", outcome, 13.0, COSTS) is outcome.final  # all questions, not those of the way
    early = ablation.line("two_state", [outcome.at(2)] * 2, rows, COSTS)
    assert early["questions"] == {"one_hop": 5, "two_hop": 5}
    assert early["minus_bridge"]["overall"]["mean"] == 0.0  # 5 of 5 here, and bridge is right on these five as well
    assert early["seconds"] == 12.0


def test_fewer_questions_at_the_end_than_on_the_way(rows):
    for row in rows.values():
        row.outcomes[0].final = row.outcomes[0]._evaluation(4, 2, 3)
    outcome = rows["two_state"].outcomes[0]
    early = ablation.line("two_state", [outcome.at(2)], rows, COSTS)
    assert early["minus_bridge"]["overall"]["mean"] == pytest.approx(1 / 3)  # of the three questions that both have


def test_a_cheaper_row_goes_on_for_the_seconds_that_are_left(rows):
    assert ablation.cheaper(rows["vt_search"], 12.5, COSTS) and not ablation.cheaper(rows["two_state"], 12.5, COSTS)
    run = ablation.longer_runs(rows["vt_search"], 12.5, COSTS)[0]
    assert run.overrides["train.steps"] == 13 and run.name == "stub/seed0"


def test_stages_cost_what_their_work_costs():
    run = Stub(1, steps=3, method="rag_then_rl").run
    assert run.total == 6 and COSTS.of("rag_then_rl") == (2.0, 1.0) and COSTS.of("rl_then_rag") == (1.0, 2.0)
    assert [COSTS.until("rag_then_rl", run, step) for step in (0, 2, 3, 5)] == [0.0, 4.0, 6.0, 8.0]
    assert COSTS.until("bridge_anchor", run, 3) is None and StepCosts({}).of("bridge") is None


def test_the_curve_is_over_the_evaluations_on_the_way(rows):
    found = ablation.curve(rows["bridge"], COSTS)
    assert found["steps"] == [0, 2, 4] and found["seconds"] == [0.0, 6.0, 12.0]
    assert found["multi_hop"] == [0.8, 1.0, 1.0]
    assert "seconds" not in ablation.curve(rows["bridge"], StepCosts({}))


def test_first_hop_shares_the_runs_of_the_ablation():
    args = runs.parser("", seeds=1).parse_args([])
    known = ablation.known_rows(args)
    shared = {"paper": "bridge", "mask": "bridge_mask", "next_action": "bridge_next_action", "paper_anchor": "bridge_anchor"}
    for variant, row in shared.items():
        [ours] = first_hop.runs_of("mixed", variant, args)
        [theirs] = ablation.runs_of(row, known[row], args, ablation.base(args))
        assert (ours.name, ours.words()) == (theirs.name, theirs.words())


def test_recall_by_hop():
    def row(*found):
        return {"gold_passage_ids": ["a", "b"], "turns": [{"ids": list(ids)} for ids in found]}

    evaluation = {"predictions": {"two_hop": [row("axyz"), row("xyzb", "ab"), row()], "one_hop": [row("ab")]}}
    found = first_hop.by_hop([evaluation])
    assert found["hop1"]["two_hop"].tolist() == [[1.0, 1.0, 0.0]]
    assert found["hop2"]["two_hop"].tolist() == [[0.0, 1.0, 0.0]]
    assert list(found["hop1"]) == ["two_hop"]


def test_cost_ratios():
    def process(step, update, compiled):
        times = {"time/step": [step, step], "time/score": [update, update], "time/policy": [1.0, 1.0]}
        return times | {"compiled_bytes": compiled, "measured_bytes": 2 * compiled, "programs": {"policy": compiled}}

    vt = {"time/step": [4.0, 4.0], "time/policy": [1.0, 1.0], "compiled_bytes": 1, "measured_bytes": 1, "programs": {}}
    found = method_cost.compared({"bridge": [process(5.0, 1.0, 40)], "two_state": [process(9.0, 4.0, 100)], "vt_search": [vt]})
    assert found["bridge_over_vt_search"] == 1.25
    assert found["one_state_time_saving"] == pytest.approx(0.6)
    assert found["one_state_memory_saving"] == pytest.approx(0.6)


def test_rows_are_runnable_configurations():
    args = runs.parser("", seeds=1).parse_args([])
    known = ablation.known_rows(args)
    assert known["vt_search_2g"]["grpo.group_size"] == 8
    groups = ablation.rows_of(4)
    assert {"replug", "replug_pdist"} <= set(groups["comparators"])
    assert not {"replug", "replug_pdist"} & set(groups["main"])  # the paper's table is of the paper's methods
    for name, changes in known.items():
        [run] = ablation.runs_of(name, changes, args, ablation.base(args))
        assert run.total > 0, name
    for world in first_hop.WORLDS:
        for variant in first_hop.VARIANTS:
            assert first_hop.runs_of(world, variant, args)[0].total > 0
    quick = runs.parser("", seeds=1).parse_args(["--quick"])
    assert all(ablation.runs_of(name, changes, quick, ablation.base(quick))[0].total <= 4 for name, changes in known.items())


def test_new_programs_are_those_that_a_total_grew_by():
    rows = [(3, 4, 2), (0, 4, 3), (1, 6, 3)]
    metrics = [{"rollout/compilations": r, "compilations/score": s, "compilations/update": u} for r, s, u in rows]
    found = {part: counts.tolist() for part, counts in compilations.new_programs(metrics).items()}
    assert found == {"rollouts": [3, 0, 1], "scoring": [4, 0, 2], "updates": [2, 1, 0]}
    summary = compilations.summary([SimpleNamespace(metrics=metrics)])
    assert (summary["programs_of_first_step"], summary["programs_of_later_steps"], summary["last_step"]) == (9, 4, 3)
    assert compilations.new_programs([*metrics, {"compilations/score": 1, "compilations/update": 3}]) is None  # another process
