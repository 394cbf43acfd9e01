"""The audit of the credit, on turns whose numbers are worked out by hand, and against the retriever's loss."""

import math
from types import SimpleNamespace

import numpy as np
import pytest

from bridge_jax.objectives.rag import responsibilities
from bridge_jax.training.credit_audit import audit, posterior, step_metrics, summarise
from bridge_jax.training.next_action import TurnCredit


class Rows:
    """A corpus of which only ids are looked up: passage `p7` is row 7."""

    def row_of(self, passage_id):
        if int(passage_id[1:]) > 90:
            raise KeyError(passage_id)
        return int(passage_id[1:])


def make_turn(rows, scores, shown=1):
    return SimpleNamespace(rows=np.asarray(rows, np.int32), scores=np.asarray(scores, np.float32), shown=shown)


def make_episode(golds, gold_ids, *turns):
    return SimpleNamespace(question=SimpleNamespace(golds=golds, gold_passage_ids=gold_ids), turns=turns)


def logs(*probabilities):
    return np.log(np.asarray(probabilities, np.float32))


TWO_HOPS = make_episode(
    ("Oslo",), ("p1", "p2"),
    make_turn([1, 5, 2], logs(0.5, 0.25, 0.25)),  # both gold passages are candidates: the first hop's is what it is about
    make_turn([1, 2, 6], logs(0.5, 0.25, 0.25)),  # the first was shown: now it is the second's
)  # fmt: skip
COMPARISON = make_episode(("No",), ("p3", "p4"), make_turn([8, 4, -1], logs(0.5, 0.5, 0.5)))
NOTHING = make_episode(("x",), ("p99",), make_turn([8, 9, -1], logs(0.75, 0.25, 0.5)))
EPISODES = [TWO_HOPS, COMPARISON, NOTHING, make_episode(("x",), (), make_turn([1, 2, 3], logs(0.5, 0.25, 0.25)))]
CREDITS = [
    TurnCredit(0, 0, TWO_HOPS.turns[0], "next_action", np.arange(2), "own", logs(0.1, 0.1, 0.2)),  # w .4 .2 .4
    TurnCredit(0, 1, TWO_HOPS.turns[1], "answer", likelihood=logs(0.1, 0.6, 0.2)),  # w .2 .6 .2
    TurnCredit(1, 0, COMPARISON.turns[0], "answer", likelihood=np.append(logs(0.2, 0.6), -np.inf)),  # w .25 .75
    TurnCredit(2, 0, NOTHING.turns[0], "masked"),
    TurnCredit(3, 0, EPISODES[3].turns[0], "both", np.arange(1), "sibling", logs(0.5, 0.5, 0.5)),
]


@pytest.fixture(scope="module")
def rows():
    return audit(EPISODES, SimpleNamespace(credits=CREDITS), np.asarray([0.0, 0.5, -0.5, 0.0]), Rows(), 1.0)


def test_rows_by_hand(rows):
    assert all(isinstance(value, int | float) for row in rows for value in row.values())
    assert len({tuple(sorted(row)) for row in rows}) == 1
    first, second, comparison, missing, unnamed = rows
    expected = {
        "episode": 0, "turn": 1, "advantage": 0, "golds": 2, "yes_no": 0, "hop": 1, "credit_answer": 0, "credit_next_action": 1,
        "masked": 0, "own_span": 1, "sibling_span": 0, "zero_advantage": 1, "p_entropy": 1.5 * math.log(2), "p_max": 0.5,
        "w_max": 0.4, "gold_in_candidates": 1, "p_gold": 0.5, "w_gold": 0.4, "argmax_p_gold": 1, "argmax_l_gold": 0,
        "argmax_w_gold": 1,
    }  # fmt: skip
    assert first == pytest.approx(expected, abs=1e-6)
    assert (second["hop"], second["turn"], second["argmax_p_gold"], second["argmax_w_gold"]) == (2, 2, 0, 1)
    assert second["w_gold"] == pytest.approx(0.6, abs=1e-6) == second["w_max"]
    assert (comparison["hop"], comparison["yes_no"], comparison["zero_advantage"]) == (2, 1, 0)
    assert comparison["w_gold"] == pytest.approx(0.75, abs=1e-6) and comparison["p_entropy"] == pytest.approx(math.log(2))
    assert (missing["hop"], missing["gold_in_candidates"], missing["p_gold"], missing["masked"]) == (1, 0, 0, 1)
    assert missing["p_max"] == pytest.approx(0.75) and math.isnan(missing["w_max"]) and math.isnan(missing["argmax_w_gold"])
    assert (unnamed["hop"], unnamed["credit_answer"], unnamed["credit_next_action"], unnamed["sibling_span"]) == (0, 1, 1, 1)
    assert math.isnan(unnamed["p_gold"]) and math.isnan(unnamed["argmax_l_gold"])


def test_summary_groups(rows):
    summary = summarise(rows)
    assert set(summary) == {
        "all", "turn1", "turn2", "hop1", "hop2", "golds2/turn1", "golds2/turn2", "golds1/turn1", "yes_no", "other_answers",
        "answer", "next_action", "masked", "own_span", "sibling_span", "answer/hop2", "next_action/hop1", "masked/hop1",
        "own_span/hop1",
    }  # fmt: skip
    assert summary["all"]["turns"] == 5 and summary["all"]["zero_advantage"] == pytest.approx(0.6)
    assert summary["all"]["argmax_w_gold"] == pytest.approx(1.0)  # of the three that have it
    assert summary["all"]["gold_in_candidates"] == pytest.approx(0.75)
    assert summary["hop2"]["w_gold"] == pytest.approx((0.6 + 0.75) / 2)
    assert "w_max" not in summary["masked"] and summary["masked"]["p_max"] == pytest.approx(0.75)


def test_step_metrics(rows):
    assert step_metrics([]) == {}
    metrics = step_metrics(rows)
    assert metrics["credit/weight_max_p"] == pytest.approx((0.5 + 0.5 + 0.5 + 0.75 + 0.5) / 5)
    assert metrics["credit/gold_in_candidates/turn1"] == pytest.approx(2 / 3)
    assert metrics["credit/argmax_gold/turn2"] == 1.0
    masked = step_metrics(rows[3:4])
    assert set(masked) == {"credit/weight_max_p", "credit/gold_in_candidates", "credit/gold_in_candidates/turn1"}


def test_posterior_is_that_of_the_loss():
    rng = np.random.default_rng(0)
    scores, likelihood = rng.normal(size=(2, 5, 7)).astype(np.float32)
    real = rng.random((5, 7)) > 0.3
    real[0] = True
    log_p, w = responsibilities(scores, 9 * likelihood, 0.3, real)
    for u in range(5):
        got_p, got_w = posterior(scores[u], np.where(real[u], 9 * likelihood[u], -np.inf), 0.3, real[u])
        np.testing.assert_allclose(got_p, np.exp(log_p[u]) * real[u], atol=1e-6)
        np.testing.assert_allclose(got_w, w[u] * real[u], atol=1e-6)
    assert posterior(scores[0], None, 1.0, real[0])[1] is None
