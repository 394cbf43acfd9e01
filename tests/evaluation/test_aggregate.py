"""Aggregation on hand-made records: closed forms, the bootstrap against a plain one, recall by passage id."""

import dataclasses

import numpy as np
import pytest

from bridge_jax.data.medical import MedicalQuestion
from bridge_jax.data.qa import Question
from bridge_jax.evaluation import aggregate
from bridge_jax.evaluation.table import comparison_table, medical_table, results_table
from bridge_jax.retrieval.corpus import Passage
from bridge_jax.rollout.episodes import Episode, Turn


class Pages(list):
    """A corpus."""

    def row_of(self, id):
        return {page.id: row for row, page in enumerate(self)}[id]

    def contents(self, row):
        return f'"{self[row].title}"\n{self[row].text}'


CORPUS = Pages(Passage(f"p{n}", f"Title {n}", "the city of Oslo" if n == 4 else "text") for n in range(10))


def turn(*rows):
    return Turn("q", 0, np.asarray(rows, np.int32), np.linspace(1, 0, len(rows), dtype=np.float32), 2, (0, 1))


def episode(answer="Oslo", golds=("Oslo",), gold_ids=("p1", "p7"), turns=(), status="answered"):
    return Episode(
        Question("a", "Where?", golds, gold_ids, "hotpotqa"), 0, 0, np.zeros(3, np.int32), np.zeros(5, np.int32),
        np.asarray([1, 1, 0, 0, 1], bool), np.zeros(5, np.float32), list(turns), status, answer, [("generated", "x")],
    )  # fmt: skip


def row(em, dataset="hotpotqa", recall=1.0, searches=1, status="answered", **more):
    return {"em": em, "f1": em, "sub_em": em, "recall@3": recall, "recall@5": recall, "searches": searches, "generated_tokens": 10,
            "status": status, "reason": "correct" if em else "wrong answer", "dataset": dataset} | more  # fmt: skip


def test_record_scores_and_recall_by_id():
    got = aggregate.record(episode(turns=[turn(1, 2, 3, 4, 5), turn(6, 5, 4, 7, 8)]), CORPUS, 5)
    assert (got["em"], got["f1"], got["sub_em"], got["reason"]) == (1.0, 1.0, 1.0, "correct")
    assert (got["recall@3"], got["recall@5"]) == (0.5, 1.0)  # p1 is first of the first search, p7 fourth of the second
    assert (got["searches"], got["generated_tokens"]) == (2, 3)
    assert got["turns"][1] == {
        "query": "q",
        "ids": ["p6", "p5", "p4", "p7", "p8"],
        "scores": [1.0, 0.75, 0.5, 0.25, 0.0],
        "shown": 2,
    }
    assert got["prompt_tokens"] == 3 + 2  # the prompt, and what it read in between
    # the same passage found twice counts once
    assert aggregate.recall(episode(turns=[turn(1, 2, 3), turn(1, 2, 3)]), CORPUS, 3) == 0.5


def test_record_without_answer_search_or_ids():
    got = aggregate.record(episode(answer=None, status="truncated"), CORPUS, 5)
    assert (got["em"], got["f1"], got["sub_em"], got["reason"], got["prediction"]) == (0.0, 0.0, 0.0, "cut off", None)
    assert got["recall@3"] == got["recall@5"] == 0.0
    assert aggregate.record(episode(answer="the city of Oslo"), CORPUS, 5) | {
        "em": 0.0,
        "sub_em": 1.0,
        "f1": 0.5,
    } == aggregate.record(episode(answer="the city of Oslo"), CORPUS, 5)


@pytest.mark.parametrize(
    ("golds", "ids", "rows", "expected"),
    [
        (("Oslo",), ("p1", "p7"), (1, 2, 3, 4, 5), ("id", 0.5, 0.5)),
        (("Oslo",), (), (1, 2, 3, 4, 5), ("answer", 0.0, 1.0)),  # by the answer's text: p4 is fourth
        (("Oslo",), ("wiki-7",), (4, 2, 3), ("answer", 1.0, 1.0)),  # ids of another corpus say nothing here
        (("Oslo",), ("wiki-7", "p4"), (4, 2, 3), ("id", 0.5, 0.5)),
        (("slo", "cit"), (), (4, 2, 3), ("answer", 0.0, 0.0)),  # whole words
        (("yes",), (), (4, 2, 3), (None, None, None)),
        (("No.", "maybe"), ("wiki-7",), (4, 2, 3), (None, None, None)),
        (("yes",), ("p4",), (4, 2, 3), ("id", 1.0, 1.0)),
        (("The",), (), (4, 2, 3), (None, None, None)),  # nothing is left of it
        (("Oslo",), (), (), ("answer", 0.0, 0.0)),
    ],
)
def test_recall_by_id_or_by_answer(golds, ids, rows, expected):
    got = aggregate.record(episode(golds=golds, gold_ids=ids, turns=[turn(*rows)] if rows else []), CORPUS, 5)
    assert (got["recall_by"], got["recall@3"], got["recall@5"]) == expected


def test_multiple_choice():
    options = (("A", "Lyon"), ("B", "Oslo"))
    question = MedicalQuestion("m", "Which?", ("Oslo",), (), "medqa", options=options, letter="B")
    said = {"B": (1.0, "correct"), "oslo": (1.0, "correct"), "Lyon": (0.0, "wrong answer"), "dunno": (0.0, "unparseable")}
    said |= {None: (0.0, "no answer")}
    rows = []
    for answer, (em, reason) in said.items():
        rows.append(aggregate.record(dataclasses.replace(episode(answer=answer, turns=[turn(1, 2)]), question=question), CORPUS, 2))
        assert (rows[-1]["em"], rows[-1]["reason"], rows[-1]["f1"]) == (em, reason, None)
    fault = dataclasses.replace(episode(answer="B", status="environment_fault"), question=question)
    assert aggregate.record(fault, CORPUS, 2)["em"] == 0.0
    got = aggregate.summarise(rows, 2)
    assert (got["accuracy"], got["unparseable"], got["f1"]) == (0.4, 2, None)
    assert got["standard_error"] == pytest.approx(np.sqrt(0.4 * 0.6 / 5))
    text = text_of(medical_table({"datasets": {"medqa": got, "mmlu": got | {"accuracy": 0.6}, "nq": {"em": 1.0}}}))
    assert "40.0" in text and "21.9" in text and "50.0" in text and "nq" not in text
    assert aggregate.groups(["medqa", "nq"]) == {"single_hop": ["nq"], "medical": ["medqa"], "overall": ["medqa", "nq"]}


def test_summary_counts_and_means():
    rows = [
        row(1.0, recall_by="id"),
        row(0.0, searches=0, recall=0.0, status="no_answer"),
        row(0.0, recall=None),
        row(1.0, recall=0.5),
    ]
    got = aggregate.summarise(rows, 5)
    assert (got["n"], got["em"], got["searches"], got["no_search"], got["recall_by"]) == (4, 0.5, 0.75, 1, {"id": 1, "answer": 0})
    assert got["recall@3"] == pytest.approx(0.5)  # (1 + 0 + 0.5) / 3: the one without ids is left out
    assert got["statuses"] == {"answered": 3, "no_answer": 1, "truncated": 0, "context_full": 0, "environment_fault": 0}
    assert got["reasons"] == {"correct": 2, "wrong answer": 2}
    assert got["em_low"] <= got["em"] <= got["em_high"]
    assert aggregate.summarise([row(1.0, recall=None)], 5)["recall@3"] is None


def test_averages_weigh_sets_equally_and_name_the_multi_hop_ones():
    records = {
        "hotpotqa": [row(1.0)] * 30,
        "embedded/2wiki": [row(0.0)] * 10,
        "nq": [row(1.0, recall=None)] * 3 + [row(0.0, recall=None)],
    }
    got = aggregate.averages(records, 5)
    assert got["multi_hop"]["datasets"] == ["hotpotqa", "embedded/2wiki"] and got["multi_hop"]["em"] == 0.5
    assert got["overall"]["em"] == pytest.approx((1 + 0 + 0.75) / 3) and got["overall"]["n"] == 44
    assert got["overall"]["recall@3"] == 1.0  # of the sets that have one
    assert got["multi_hop"]["em_low"] == got["multi_hop"]["em_high"] == 0.5  # no spread inside either set
    assert "multi_hop" not in aggregate.averages({"nq": records["nq"]}, 5)


def test_interval_is_the_bootstrap():
    values = (np.random.default_rng(1).random(80) < 0.3).astype(float)
    rng = np.random.default_rng(7)
    plain = np.quantile([rng.choice(values, 80).mean() for _ in range(4000)], [0.025, 0.975])
    np.testing.assert_allclose(aggregate.interval([values], 0), plain, atol=0.02)
    assert aggregate.interval([values], 3) == aggregate.interval([values], 3)
    assert aggregate.interval([[1.0] * 5], 0) == (1.0, 1.0)
    # two sets: the interval of the mean of means is narrower than that of one of them
    both, one = aggregate.interval([values, values], 0), aggregate.interval([values], 0)
    assert both[1] - both[0] < one[1] - one[0]


def text_of(table):
    from rich.console import Console

    console = Console(width=140, record=True, quiet=False, file=__import__("io").StringIO())
    console.print(table)
    return console.export_text()


def result(records, k=5):
    datasets = {name: aggregate.summarise(rows, k) for name, rows in records.items()}
    return {"datasets": datasets, "averages": aggregate.averages(records, k), "k": k}


def test_tables():
    before = result({"hotpotqa": [row(0.0)] * 4, "nq": [row(0.0, recall=None)] * 2})
    after = result({"hotpotqa": [row(1.0)] * 3 + [row(0.0)], "nq": [row(0.0, recall=None)] * 2, "musique": [row(1.0)]})
    text = text_of(results_table(before, "step 3"))
    assert "step 3" in text and "hotpotqa" in text and "R@5" in text and "multi-hop avg" in text and " - " in text
    timed = result({"nq": [row(0.0, latency=2.5)] * 2})
    assert "2.5" in text_of(results_table(timed)) and text_of(results_table(before)).count(" s ") == 0
    text = text_of(comparison_table(before, after, ("start", "end")))
    lines = [line for line in text.splitlines() if "start" in line or "end" in line]
    assert "musique" not in text  # only what both have
    assert "0.0" in lines[0] and "75.0" in lines[1] and "hotpotqa" in lines[0]
    lone = result({"hotpotqa": [row(0.0)] * 4})
    assert "average" not in text_of(results_table(lone))  # it would repeat the one row
    sly = result({"[/b]\x1b]0;x\x07": [row(0.0)] * 4})  # a name in a file, a path
    for table in (results_table(sly, "[/c] step"), comparison_table(sly, sly, title="[/c] step")):
        text = text_of(table)
        assert "[/b]\ufffd]0;x\ufffd" in text and "[/c] step" in text and "\x1b" not in text


def test_recall_at_three_when_three_are_the_candidates():
    got = aggregate.record(dataclasses.replace(episode(), turns=[turn(1, 2, 3)]), CORPUS, 3)
    assert got["recall@3"] == 0.5 and list(aggregate.summarise([got], 3)).count("recall@3") == 1
