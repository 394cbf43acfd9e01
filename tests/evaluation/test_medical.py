"""MIRAGE: reading, which option an answer names, and its file layout read back by its evaluator's rules."""

import dataclasses
import json
import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bridge_jax.data import medical
from bridge_jax.data.medical import asked
from bridge_jax.errors import UserError
from bridge_jax.evaluation import aggregate, mirage
from bridge_jax.evaluation.aggregate import Outcome
from bridge_jax.evaluation.choices import choose

SHARED = Path(__file__).parents[2].parent / "shared" / "data" / "mirage" / "benchmark.json"
FOUR = {"A": "Inhibition of proteasome", "B": "Hyperstabilization", "C": "Free radicals", "D": "Cross-linking of DNA"}
SMALL = {
    "medqa": {
        "0002": {"question": "Which?", "options": FOUR, "answer": "D"},
        "0001": {"question": "Who", "options": FOUR, "answer": "A"},
    },
    "pubmedqa": {"7": {"question": "Is it?", "options": {"A": "yes", "B": "no", "C": "maybe"}, "answer": "A", "PMID": [7]}},
}  # fmt: skip


@pytest.fixture
def file(tmp_path):
    (tmp_path / "mirage").mkdir()
    path = tmp_path / "mirage" / "benchmark.json"
    path.write_text(json.dumps(SMALL))
    return path


def test_loading(file, tmp_path, monkeypatch):
    monkeypatch.setenv("BRIDGE_JAX_DATA", str(tmp_path))
    for spec in ("mirage", str(file)):
        sets = medical.load(spec)
        assert {name: [q.id for q in rows] for name, rows in sets.items()} == {"medqa": ["0001", "0002"], "pubmedqa": ["7"]}
    [question] = medical.load("mirage/medqa", 1)["medqa"]
    assert (question.golds, question.letter, question.dataset) == (("Inhibition of proteasome",), "A", "medqa")
    assert asked(question) == "Who\nOptions:\n" + "\n".join(f"{a}. {b}" for a, b in FOUR.items()) + (
        "\nThe answer is the letter of one option."
    )
    assert medical.load(f"{file}/pubmedqa")["pubmedqa"][0].gold_passage_ids == ("PMID7",)
    assert [medical.is_spec(spec) for spec in ("mirage", "x.json", "x.json/medqa", "nq", "x.jsonl", "a/b")] == [True] * 3 + [
        False
    ] * 3


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"question": " "}, "medqa x: field 'question'"),
        ({"options": {"A": "one"}}, "field 'options'"),
        ({"options": {"A": "one", "b": "two"}}, "field 'options'"),
        ({"answer": "E"}, "field 'answer' is 'E', not one of A, B"),
        ({"PMID": 7}, "field 'PMID'"),
    ],
)
def test_a_bad_entry_is_named(tmp_path, change, words):
    entry = {"question": "Q", "options": {"A": "one", "B": "two"}, "answer": "A"} | change
    path = tmp_path / "b.json"
    path.write_text(json.dumps({"medqa": {"x": entry}}))
    with pytest.raises(UserError, match=re.escape(words)):
        medical.load(str(path))


def test_what_is_not_there_is_named(file, tmp_path, monkeypatch):
    monkeypatch.delenv("BRIDGE_JAX_DATA", raising=False)
    for spec, words in (
        ("mirage", "BRIDGE_JAX_DATA is not set"),
        ("mirage/medqq", "did you mean 'mirage/medqa'"),
        (f"{file}/bioasq", "has no set 'bioasq'; it has medqa, pubmedqa"),
        (f"{tmp_path}/no.json", "no question file"),
    ):
        with pytest.raises(UserError, match=re.escape(words)):
            medical.load(spec)
    monkeypatch.setenv("BRIDGE_JAX_DATA", str(tmp_path / "elsewhere"))
    with pytest.raises(UserError, match="neither"):
        medical.load("mirage")
    for text, words in (("[]", "layout"), ("{", "not JSON"), ("{}", "layout")):
        file.write_text(text)
        with pytest.raises(UserError, match=words):
            medical.load(str(file))


OPTIONS = tuple(FOUR.items())
YES_NO = (("A", "yes"), ("B", "no"), ("C", "maybe"))


@pytest.mark.parametrize(
    ("text", "letter"),
    [
        ("D", "D"), ("d", "D"), (" (D) ", "D"), ("D. Cross-linking of DNA", "D"), ("D Cross-linking of DNA", "D"), ("**D**", "D"),
        ("Option D", "D"), ("The answer is D because", "D"), ("The correct answer to it is: (D).", "D"), ("Answer: D", "D"),
        ("cross-linking of dna", "D"), ("Cross-linking of DNA strands", "D"), ("free radicals, the", "C"), ("A, because", "A"),
        ('{"step_by_step_thinking": "Option A is wrong", "answer_choice": "D"}', "D"), ('{"answer_choice": "D. Cross', "D"),
        ("Option A is wrong. The answer is D.", "D"), ("E", None), ("AB", None), ("", None), ("none of them", None),
        ("A 45-year-old man", None), ("A or B", None), ("A/B", None), ("A, B", None), ("Both option A and option B", None),
        ("The answer is A or B", None), ("Free radicals and cross-linking of DNA", None), (None, None),
    ],
)  # fmt: skip
def test_choose(text, letter):
    assert choose(text, OPTIONS) == letter


@pytest.mark.parametrize(
    ("text", "letter"), [("yes", "A"), ("No.", "B"), ("Yes, it is", "A"), ("yes or no", None), ("not known", None)]
)
def test_choose_yes_no(text, letter):
    assert choose(text, YES_NO) == letter


def test_an_option_inside_another():
    options = (("A", "DNA"), ("B", "cross-linking of DNA"))
    assert [choose(text, options) for text in ("DNA", "the cross-linking of DNA", "by DNA alone")] == ["A", "B", "A"]
    assert choose("same", (("A", "same"), ("B", "same"))) is None


@settings(max_examples=300, deadline=None)
@given(st.text(alphabet='ABCDEabd answer option is:.,()/"{}\n', max_size=40))
def test_choose_names_an_option_that_is_there(text):
    got = choose(text, OPTIONS)
    assert got is None or (got in FOUR and (got in text or got.lower() in text.lower()))


# ---- MIRAGE's layout and evaluator -----------------------------------------------------------------------------------------------


def locate(text):
    """Its rules, written anew: the first that fits, else "A"."""
    for pattern in (
        r"\s*([ABCD])$", r"\s*([ABCD]) or", r"\s*([ABCD]) and", r"\s*([ABCD])/", r"\s*([ABCD]),", r".*?[Oo]ption ([ABCD])",
        r".*?:\s*([ABCD])", r"\s*([ABCD])\.", r'\s*([ABCD])"', r"\s*([ABCD]):",
    ):  # fmt: skip
        if match := re.match(pattern, text, re.DOTALL):
            return match[1]
    return "A"


def its_accuracy(folder, entries, split):
    right = []
    for id in sorted(entries):
        [text] = json.loads((folder / f"{split}_{id}.json").read_text())[:1]
        right.append(locate(text.split('"answer_choice": "')[-1].strip()) == entries[id]["answer"])
    return float(np.mean(right)), float(np.sqrt(np.mean(right) * (1 - np.mean(right)) / len(right)))


def outcome(question, answer):
    return Outcome(
        question, [], "answered", answer, [("generated", f'Option A? "answer_choice": "B" {answer}')], 5, 3, may_search=False
    )


def test_its_evaluator_reads_our_files(tmp_path):
    if SHARED.is_file():
        sets = medical.load(str(SHARED), 60)
    else:
        (tmp_path / "b.json").write_text(json.dumps(SMALL))
        sets = medical.load(str(tmp_path / "b.json"))
    rng = np.random.default_rng(0)
    predictions = {}
    for name, questions in sets.items():
        rows = []
        for question in questions:
            letter, text = question.options[rng.integers(len(question.options))]
            answer = [letter, f"{letter}. {text}", f"({letter})", "no idea at all"][rng.integers(4)]
            rows.append(aggregate.record(outcome(question, answer), None, 3))
        predictions[name] = rows
    found = aggregate.result(predictions, 3)
    folders = mirage.write(tmp_path / "out", predictions, "OpenAI/gpt-x", (32, "medcorp", "RRF-2"))
    assert [folder.relative_to(tmp_path / "out").parts for folder in folders] == [
        (name, "rag_32", "OpenAI", "gpt-x", "medcorp", "RRF-2") for name in sets
    ]
    for folder, (name, questions) in zip(folders, sets.items()):
        entries = {q.id: {"answer": q.letter} for q in questions}
        theirs, error = its_accuracy(folder, entries, "dev" if name == "medmcqa" else "test")
        row = found["datasets"][name]
        lucky = sum(r["choice"] is None and r["letter"] == "A" for r in predictions[name])
        assert theirs == pytest.approx(row["accuracy"] + lucky / row["n"])
        if not lucky:
            assert error == pytest.approx(row["standard_error"])
        assert row["unparseable"] == sum(r["choice"] is None for r in predictions[name]) == row["reasons"].get("unparseable", 0)
        assert row["standard_error"] == pytest.approx(np.sqrt(row["em"] * (1 - row["em"]) / row["n"]))
    assert mirage.write(tmp_path / "cot", predictions, "m", None)[0].parts[-2:] == ("cot", "m")
    odd = dataclasses.replace(next(iter(sets.values()))[0], id="../a/b")
    [place] = mirage.write(tmp_path / "odd", {"x": [aggregate.record(outcome(odd, "A"), None, 3)]}, "../m", None)
    assert place.resolve().is_relative_to(tmp_path / "odd") and [file.parent for file in place.iterdir()] == [place]
    assert found["averages"]["medical"]["em"] == pytest.approx(np.mean([row["em"] for row in found["datasets"].values()]))
