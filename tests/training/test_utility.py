"""The decisions of the comparators, each by itself: reading a judge, choosing passages, shaped rewards, selecting rollouts."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bridge_jax import config as configuration
from bridge_jax.data.qa import Question
from bridge_jax.objectives import rewards
from bridge_jax.retrieval.corpus import Passage
from bridge_jax.rollout.episodes import Episode, Turn
from bridge_jax.rollout.generators import Reply
from bridge_jax.training import relevance, selection, utility
from bridge_jax.training.relevance import Candidates, read_scores, read_sub_answer

# --- what a judge says


@given(st.lists(st.integers(0, 100), min_size=1, max_size=12), st.text(), st.booleans(), st.sampled_from([",", ", ", " ,\n"]))
def test_scores_are_read_from_whatever_stands_around_them(scores, around, closed, comma):
    text = f"{around}<scores> {comma.join(map(str, scores))} {'</scores>' + around.replace('<scores>', '') if closed else ''}"
    assert read_scores(text, len(scores)) == scores
    assert read_scores(text, len(scores) + 1) is None


@given(st.text(alphabet="<scores>/0123456789,. []-", max_size=60), st.integers(1, 4))
def test_a_reply_is_exactly_as_many_scores_or_none(text, count):
    found = read_scores(text, count)
    assert found is None or (len(found) == count and all(0 <= score <= 100 for score in found))


NO_LISTS = [
    "", "80, 20", "<scores></scores>", "<scores>80</scores>", "<scores>80, 101</scores>", "<scores>80, -2</scores>",
    "<scores>80, 2.5</scores>", "<scores>80, good</scores>", "<scores>80, 20, 3</scores>", "<scores>80 20</scores>",
    "<scores>８0, 1",
]  # fmt: skip


@pytest.mark.parametrize("text", NO_LISTS)
def test_what_is_no_list_of_two_scores(text):
    assert read_scores(text, 2) is None


def test_the_last_list_counts_and_brackets_are_forgiven():
    assert read_scores("<scores>1, 2</scores> no: <scores>[80, 20]</scores>", 2) == [80, 20]
    assert read_scores("<scores>80, 20</scores", 2) == [80, 20]


@given(st.text())
def test_a_hint_is_one_line_or_not_sure(text):
    assert read_sub_answer(text) == relevance.NOT_SURE or "<sub_answer>" in text
    plain = text.replace("<", "")
    hint = read_sub_answer(f"well <sub_answer>{plain}</sub_answer>")
    assert hint == (" ".join(plain.split()) or relevance.NOT_SURE)
    assert hint == read_sub_answer(f"<sub_answer>{plain}</sub_answer")  # as `transformers serve` gives it
    assert read_sub_answer("<sub_answer> Ada\nLovelace") == "Ada Lovelace"


class Judge:
    """A generator that keeps what it was asked."""

    def __init__(self, answer):
        self.answer, self.asked = answer, []

    def generate(self, messages, *, stops, max_tokens):
        self.asked += messages
        answers = [self.answer(message) for message in messages]
        return [answer if isinstance(answer, Reply) else Reply(answer, "stop", 7, 2) for answer in answers]


def candidates(count, trace=""):
    question = Question("q", "who {query} it ?", ("gold",), (), "tiny")
    none = np.zeros(0, np.int32)
    episode = Episode(question, 0, 0, none, none, none, none, [], "truncated", None, [])
    return Candidates(
        episode, Turn("the founder", 0, np.arange(count, dtype=np.int32), np.zeros(count, np.float32), 0, (0, 0)), trace
    )


def test_a_judge_is_asked_for_a_hint_and_then_for_lists_of_ten():
    corpus = [Passage(str(n), f"title {n}", f"text {n}") for n in range(25)]

    def answer(message):
        if "<sub_answer>" in message:
            return "<sub_answer> Ada </sub_answer>" if "so far" in message else ""
        assert "Probable answer to the sub-query: Ada" in message and "who {query} it ?" in message
        shown = [n for n in range(25) if f"(title {n})" in message]
        return f"<scores> {', '.join(str(4 * n) for n in shown)}"

    judge = Judge(answer)
    found = relevance.judged(judge, corpus)([candidates(25, "<search> x </search>"), candidates(10)])
    assert [one.scores for one in found] == [[4 * n for n in range(25)], [4 * n for n in range(10)]]
    assert [(one.hint, one.calls) for one in found] == [("Ada", 4), ("Ada", 2)]
    assert "<search> x </search>" in judge.asked[0] and "(nothing yet)" in judge.asked[1]


def test_one_list_that_cannot_be_read_drops_its_turn_alone():
    corpus = [Passage(str(n), "t", "x") for n in range(12)]
    judge = Judge(lambda message: "<scores>1</scores>" if message.count("Passage ") == 1 else f"<scores>{'5,' * 9}5")
    found = relevance.judged(judge, corpus)([candidates(12), candidates(11), candidates(10)])
    assert [one.scores for one in found] == [None, [*[5] * 10, 1], [5] * 10]
    assert [one.calls for one in found] == [3, 3, 2] and {one.hint for one in found} == {relevance.NOT_SURE}
    assert [one.lists for one in found] == [2, 2, 1]
    assert [one.unread for one in found] == [(f"<scores>{'5,' * 9}5",), (), ()]
    assert [(one.prompt_tokens, one.tokens) for one in found] == [(21, 6), (21, 6), (14, 4)]


@pytest.mark.parametrize(
    ("reply", "scores", "unread"),
    [
        (Reply("<scores> 90, 10", "length"), None, ("<scores> 90, 10",)),  # perhaps 100 was to come
        (Reply("<scores> 90, 10 </scores>", "length"), [90, 10], ()),
        (Reply("<scores> 90, 10", "stop"), [90, 10], ()),  # the server keeps the tag it stopped at to itself
        (Reply("", "too_long", problem="9,000 tokens, the limit 4,096"), None, ("9,000 tokens, the limit 4,096",)),
        (Reply("I would\nsay 90 and 10.", "stop"), None, ("I would say 90 and 10.",)),
    ],
)
def test_a_reply_that_cannot_be_read_is_kept(reply, scores, unread):
    corpus = [Passage(str(n), "t", "x") for n in range(2)]
    [found] = relevance.judged(Judge(lambda message: reply), corpus)([candidates(2)])
    assert (found.scores, found.unread) == (scores, unread)


# --- choosing


@given(
    st.lists(st.tuples(st.integers(0, 1), st.sampled_from([0, 20, 60, 80, 100])), min_size=1, max_size=20),
    st.integers(0, 100), st.integers(1, 4), st.integers(1, 16),
)  # fmt: skip
def test_positives_are_ties_with_the_best_and_negatives_rank_behind(pairs, least, positives, negatives):
    em, local = zip(*pairs)
    chosen = utility.choose(em, local, least, positives, negatives)
    best = max(pairs)
    ties = [c for c, pair in enumerate(pairs) if pair == best]
    if best[0] == 0 or best[1] < least or len(ties) == len(pairs):
        assert chosen is None
        return
    assert chosen.positives == tuple(ties[:positives])
    assert len(chosen.negatives) == min(negatives, len(pairs) - len(ties)) == len(set(chosen.negatives))
    behind = [pairs[c] for c in chosen.negatives]
    assert best not in behind
    left_out = [pair for c, pair in enumerate(pairs) if c not in ties and c not in chosen.negatives]
    assert not left_out or min(left_out) >= max(behind)


def test_equal_candidates_stay_as_retrieved():
    chosen = utility.choose([1, 0, 1, 1, 0], [80, 90, 80, 70, 90], 60, 1, 2)
    assert chosen == utility.Chosen((0,), (1, 4))


def test_likelihoods_become_token_probabilities():
    values = np.log([0.81, 0.25, 1.0, 1e-30])
    assert utility.percent(values, 2) == [90, 50, 100, 0]
    assert utility.percent(np.array([-np.inf, np.log(0.5)], np.float32), 1) == [0, 50]
    assert utility.percent(np.full(3, -np.inf), 1) is None and utility.percent(values, 0) is None


# --- rewards


GOOD = [("generated", "<think> a </think>\n<search> q </search>"), ("information", "x"), ("generated", "<answer> b </answer>")]


@pytest.mark.parametrize(
    ("status", "answer", "trace", "formed"),
    [
        ("answered", "b", GOOD, True),
        ("answered", " ", GOOD, False),
        ("no_answer", None, GOOD, False),
        ("answered", "b", [*GOOD[:1], ("corrective", "No valid action."), *GOOD[2:]], False),
        ("answered", "b", [*GOOD[:1], ("tool", "12 * 7 = 84"), *GOOD[2:]], True),
        ("answered", "b", [("generated", "<think> a <answer> b </answer>")], False),
        ("answered", "b", [("generated", "a </think> <answer> b </answer>")], False),
        ("answered", "b", [("information", "</think>"), ("generated", "<answer> b </answer>")], True),
    ],
)
def test_format(status, answer, trace, formed):
    assert rewards.well_formed(status, answer, trace) == formed


def test_the_two_rewards_of_r1_searcher():
    judged = rewards.Judged(0.0, "the red river", ("red river bank",), 1, True)
    first, second = rewards.REWARDS["format_search"], rewards.REWARDS["f1_format"]
    assert first(judged) == 1.0
    assert first(dataclasses.replace(judged, searches=0)) == first(dataclasses.replace(judged, well_formed=False)) == 0.5
    assert second(judged) == pytest.approx(0.8)  # two common words of two and three, the article aside
    assert second(dataclasses.replace(judged, well_formed=False)) == pytest.approx(0.8 - 2)
    assert rewards.REWARDS["em"](judged) == 0.0


# --- selecting rollouts


def episode(group, sample, *, answer="gold", searches=1, tokens=8, trace=GOOD):
    question = Question(f"q{group}", "q", ("gold",), (), "tiny")
    row = np.zeros(tokens, np.int32)
    turn = Turn("q", 1, row, row, 1, (1, 2))
    return Episode(question, group, sample, row, row, row > 0, row, [turn] * searches, "answered", answer, list(trace))


def test_rollouts_are_selected_by_answer_format_searches_and_length():
    config = configuration.default()
    config.selection.update({"per_question": 2, "max_searches": 2, "max_tokens": 10})
    made = [
        episode(0, 0, answer="other"),
        episode(0, 1, trace=[("corrective", "x"), *GOOD]),
        episode(0, 2, searches=0),
        episode(0, 3, searches=3),
        episode(0, 4, tokens=11),
        episode(1, 0, searches=2, tokens=4),
        episode(1, 1, searches=1, tokens=9),
        episode(1, 2, searches=1, tokens=7),
        episode(2, 0),
    ]
    chosen, fell = selection.select(config, made)
    assert [(e.group, e.sample) for e in chosen] == [(1, 2), (1, 1), (2, 0)]
    assert fell == {"wrong": 1, "format": 1, "searches": 2, "length": 1, "over": 1}


def test_a_selected_rollout_comes_back_token_for_token():
    row = dataclasses.replace(episode(0, 0), tokens=np.arange(8, dtype=np.int32), generated=np.arange(8) % 3 > 0)
    trace = selection._trace(selection._row(row))
    np.testing.assert_array_equal(trace.tokens, row.tokens)
    np.testing.assert_array_equal(trace.generated, row.generated)
    assert trace.generated.dtype == bool and trace.question.golds == ("gold",)
