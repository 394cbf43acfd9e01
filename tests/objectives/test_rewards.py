"""Rewards against a second implementation that shares no code with the first, on real gold answers and on arbitrary text."""

import json
import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bridge_jax.objectives.rewards import REASONS, exact_match, f1, normalize_answer, score_episode, sub_em

GOLDS = [json.loads(line) for line in (Path(__file__).parent / "fixtures" / "golds.jsonl").read_text().split("\n") if line]
ASCII_PUNCTUATION = {chr(c) for c in range(33, 127) if not chr(c).isalnum()}


def normalize_by_hand(text):
    """A scanner over characters: drops punctuation, cuts into runs of word characters and of the rest, drops article runs."""
    kept = [c for c in text.lower() if c not in ASCII_PUNCTUATION]
    runs, kind = [], None
    for c in kept:
        new_kind = c.isalnum() or c == "_"
        if new_kind != kind:
            runs.append("")
            kind = new_kind
        runs[-1] += c
    runs = [" " if run in ("a", "an", "the") else run for run in runs]
    words, word = [], ""
    for c in "".join(runs) + " ":
        if c.isspace():
            words += [word] if word else []
            word = ""
        else:
            word += c
    return " ".join(words)


messy = st.text(
    st.one_of(
        st.sampled_from(list("aAnN tThHeE.,'-_&\t\n")),
        st.characters(codec="utf-8", exclude_categories=("Cs", "Mn", "Mc", "Me")),
    ),
    max_size=30,
)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("The Beatles", "beatles"),
        ("A.I.", "ai"),
        ("a-b", "ab"),
        ("  An   apple,\ta day ", "apple day"),
        ("U.S.A.", "usa"),
        ("Theatre", "theatre"),
        ("Rock & Roll", "rock roll"),
        ("São Paulo", "são paulo"),
        ("", ""),
        ("The", ""),
    ],
)
def test_normalize_by_example(text, expected):
    assert normalize_answer(text) == expected


@settings(max_examples=300, deadline=None)
@given(messy)
def test_normalize_equals_the_scanner(text):
    assert normalize_answer(text) == normalize_by_hand(text)
    assert normalize_answer(text) == " ".join(normalize_answer(text).split())


def test_every_real_gold_matches_itself_and_its_disguises():
    assert len(GOLDS) > 200
    for row in GOLDS:
        for gold in row["golds"]:
            assert normalize_answer(gold) == normalize_by_hand(gold)
            louder = gold.upper() if gold.upper().lower() == gold.lower() else gold  # not for the German sharp s
            for disguise in (gold, louder, f"  the {gold}. ", re.sub(r"\s", "  ", gold)):
                if normalize_answer(gold) or disguise.strip().lower() == gold.strip().lower():
                    assert exact_match(disguise, row["golds"]) == 1.0, (row["id"], disguise)
                    assert f1(disguise, row["golds"]) == 1.0
                    assert sub_em(disguise, row["golds"]) == 1.0


def test_real_golds_do_not_match_other_questions_by_accident():
    for row, other in zip(GOLDS, GOLDS[1:] + GOLDS[:1]):
        expected = bool({normalize_by_hand(g) for g in row["golds"]} & {normalize_by_hand(g) for g in other["golds"]})
        assert any(exact_match(gold, other["golds"]) for gold in row["golds"]) == expected


@settings(max_examples=300, deadline=None)
@given(messy, st.lists(messy, min_size=1, max_size=3))
def test_metrics_by_hand(text, golds):
    prediction = normalize_by_hand(text).split()
    if not prediction or any(not normalize_by_hand(g) for g in golds):
        return
    truths = [normalize_by_hand(g).split() for g in golds]
    assert exact_match(text, golds) == float(prediction in truths)
    assert sub_em(text, golds) == float(any(" ".join(t) in " ".join(prediction) for t in truths))
    best = 0.0
    for truth in truths:
        rest, hits = list(truth), 0
        for word in prediction:
            if word in rest:
                rest.remove(word)
                hits += 1
        if prediction != truth and any(side in (prediction, truth) for side in (["yes"], ["no"], ["noanswer"])):
            hits = 0
        precision, recall = hits / len(prediction), hits / len(truth)
        best = max(best, 2 * precision * recall / (precision + recall) if hits else 0.0)
    assert f1(text, golds) == pytest.approx(best)


@pytest.mark.parametrize("empty", [None, "", "  ", "the", "a", "!!!", "The The."])
@pytest.mark.parametrize("golds", [["Paris"], ["an"], ["???"], [""], []])
def test_an_empty_prediction_never_matches(empty, golds):
    assert exact_match(empty, golds) == f1(empty, golds) == sub_em(empty, golds) == 0.0


def test_golds_that_normalise_to_nothing_still_have_their_own_answer():
    assert exact_match("The The", ["the the"]) == 1.0
    assert exact_match("A", ["A"]) == 1.0
    assert exact_match("A", ["The"]) == 0.0
    assert sub_em("anything at all", ["The"]) == 0.0


def test_one_string_is_not_a_list_of_golds():
    for metric in (exact_match, f1, sub_em):
        with pytest.raises(TypeError, match="list of strings"):
            metric("P", "Paris")


def test_yes_and_no_earn_no_partial_credit():
    assert f1("yes it is", ["yes"]) == 0.0
    assert f1("yes", ["yes, they are"]) == 0.0
    assert f1("Yes.", ["yes"]) == 1.0


@pytest.mark.parametrize(
    ("answer", "status", "searched", "expected"),
    [
        ("the Paris!", "answered", True, (1.0, "correct")),
        ("Paris", "answered", False, (1.0, "correct")),
        ("London", "answered", True, (0.0, "wrong answer")),
        ("London", "answered", False, (0.0, "no search result")),
        (None, "no_answer", True, (0.0, "no answer")),
        ("  ", "answered", True, (0.0, "no answer")),
        (None, "truncated", True, (0.0, "cut off")),
        (None, "context_full", False, (0.0, "cut off")),
        ("Paris", "environment_fault", True, (0.0, "environment fault")),
    ],
)
def test_every_zero_has_a_reason(answer, status, searched, expected):
    assert score_episode(answer, status, ["Paris", "City of Light"], searched) == expected
    assert expected[1] in REASONS
