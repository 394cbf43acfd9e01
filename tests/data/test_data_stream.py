"""The order of training questions: pure in (seed, step), complete in every epoch, exact in its mixture."""

import collections

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bridge_jax.data.formats import Question
from bridge_jax.data.qa import load_questions
from bridge_jax.data.stream import PERIOD, Mixture, QuestionStream, epoch_order, slot_counts
from bridge_jax.errors import UserError


def questions(n, name="set"):
    return [Question(str(i), f"q{i}?", ("a",), (), name) for i in range(n)]


@given(st.integers(1, 300), st.integers(0, 2**40), st.integers(0, 10**6))
def test_epoch_order_is_a_permutation(n, seed, epoch):
    order = epoch_order(n, seed, epoch)
    assert sorted(order) == list(range(n)) and np.array_equal(order, epoch_order(n, seed, epoch))


def test_epochs_and_seeds_differ():
    orders = {tuple(epoch_order(50, seed, epoch)) for seed in range(5) for epoch in range(5)}
    assert len(orders) == 25


@given(st.integers(1, 40), st.integers(1, 17), st.integers(0, 1000), st.integers(1, 4))
def test_no_question_twice_within_an_epoch(n, batch, seed, epochs):
    stream = QuestionStream(questions(n), batch, seed)
    flat = [q.id for step in range(-(-n * epochs // batch)) for q in stream.batch_at(step)]
    for e in range(epochs):
        assert len(set(flat[e * n : (e + 1) * n])) == n
    assert [int(i) for i in flat[:n]] == list(epoch_order(n, seed, 0))


@given(st.lists(st.integers(0, 5000), max_size=20), st.integers(0, 9))
def test_batches_do_not_depend_on_what_was_asked_before(steps, seed):
    parts = (questions(7, "a"), questions(300, "b"))
    make = lambda: QuestionStream(Mixture(("a", "b"), parts, (1.0, 2.0)), 6, seed)  # noqa: E731
    used = make()
    assert [used.batch_at(s) for s in steps] == [make().batch_at(s) for s in steps]


@settings(max_examples=25)
@given(st.lists(st.floats(0.1, 20), min_size=2, max_size=4), st.integers(0, 99))
def test_mixture_is_exact_and_complete(weights, seed):
    names = tuple("abcd"[: len(weights)])
    parts = tuple(questions(31 * (j + 1), name) for j, name in enumerate(names))
    stream = QuestionStream(Mixture(names, parts, tuple(weights)), 10, seed)
    flat = [q for step in range(2 * PERIOD // 10) for q in stream.batch_at(step)]
    counts = slot_counts(weights, names)
    for half in (flat[:PERIOD], flat[PERIOD:]):
        assert collections.Counter(q.dataset for q in half) == collections.Counter(dict(zip(names, counts, strict=True)))
    for name, part, weight, count in zip(names, parts, weights, counts, strict=True):
        assert abs(count - PERIOD * weight / sum(weights)) < 1
        own = [q.id for q in flat if q.dataset == name]
        for start in range(0, len(own) - len(part) + 1, len(part)):
            assert len(set(own[start : start + len(part)])) == len(part)


def test_equal_sources_do_not_walk_in_step():
    stream = QuestionStream(Mixture(("a", "b"), (questions(100, "a"), questions(100, "b")), (1.0, 1.0)), 200, 0)
    flat = [q for step in range(5) for q in stream.batch_at(step)]
    a, b = ([q.id for q in flat if q.dataset == name] for name in "ab")
    assert a != b


def test_epoch_at():
    stream = QuestionStream(questions(10), 4, 0)
    assert stream.epoch_at(0) == 0 and stream.epoch_at(5) == 2.0


def test_mixture_of_sets():
    parts = (load_questions("embedded/musique", "train"), load_questions("embedded/hotpotqa", "validation", 50))
    mixed = Mixture(("musique", "hotpotqa"), parts, (1.0, 3.0))
    assert len(mixed) == sum(map(len, parts))
    batch = QuestionStream(mixed, 1000, 0).batch_at(0)
    assert collections.Counter(q.dataset for q in batch) == {"musique": 250, "hotpotqa": 750}


@pytest.mark.parametrize(
    "make, said",
    [
        (lambda: QuestionStream([], 4, 0), "is empty"),
        (lambda: QuestionStream(questions(3), 0, 0), "at least 1"),
        (lambda: QuestionStream(questions(3), 1, -1), "seed"),
        (lambda: slot_counts([1.0, 0.0], "ab"), "'b' is 0.0"),
        (lambda: slot_counts([1.0, float("nan")], "ab"), "'b' is nan"),
        (lambda: slot_counts([1.0, 1e-6], "ab"), "under 1/1000"),
    ],
)
def test_bad_settings_are_named(make, said):
    with pytest.raises(UserError, match=said):
        make()
