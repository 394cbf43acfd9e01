"""Which steps of a measurement count."""

import method_cost


def test_steps_with_a_compilation_do_not_count():
    rows = [{"step": n, "compilations/update": 3, "rollout/compilations": 0} for n in range(6)]
    assert [row["step"] for row in method_cost.usual(rows)] == [2, 3, 4, 5]
    rows[3]["rollout/compilations"] = 2
    for row in rows[5:]:
        row["compilations/update"] = 4
    assert [row["step"] for row in method_cost.usual(rows)] == [2, 4]
    assert [row["step"] for row in method_cost.usual(rows[:2] + rows[5:])] == [5]  # none left otherwise
