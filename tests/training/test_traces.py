"""Traces are what the rollout engine would produce: checked by reading them back with the engine's own automaton and protocol."""

import dataclasses
import itertools
import random

import numpy as np
import pytest
import two_hop_world
from hypothesis import given, settings
from hypothesis import strategies as st

from bridge_jax.data.prompts import build_prompt
from bridge_jax.data.qa import Question, load_questions
from bridge_jax.objectives.rewards import exact_match
from bridge_jax.retrieval.corpus import Passage
from bridge_jax.rollout import protocol
from bridge_jax.rollout.stopping import stop_table
from bridge_jax.training import trace_text
from bridge_jax.training.traces import TraceBuilder, trace_row


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("BRIDGE_JAX_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield two_hop_world.load(tmp_path_factory.mktemp("world"))


def builder(world, seed=0, **rollout):
    assets = world.assets
    return TraceBuilder(
        assets.corpus, assets.retriever, assets.tokenizer, assets.tokenizer.eos_token_id,
        dataclasses.replace(assets.engine.config, **rollout), 1, "brief", seed,
    )  # fmt: skip


@pytest.fixture(scope="module")
def questions(world):
    return list(load_questions(world.config.data.train[0]))


@pytest.fixture(scope="module")
def traces(world, questions):
    built, skipped = builder(world).build(questions, 100)
    assert len(built) == len(questions) and not skipped
    return built


def runs(trace):
    """[(generated?, token ids)] without the closing end of text."""
    pairs = list(zip(trace.generated.tolist(), trace.tokens.tolist()))
    assert pairs[-1] == (True, pairs[-1][1])
    return [(kind, [token for _, token in part]) for kind, part in itertools.groupby(pairs[:-1], key=lambda pair: pair[0])]


def test_replay_through_automaton_and_parser(world, traces):
    """Each generated run ends at the very token that completes a closing tag; parsed, the runs give the queries and the answer."""
    tokenizer = world.assets.tokenizer
    table = stop_table(tokenizer, world.assets.policy.config.vocab_size)
    for trace in traces:
        assert trace.tokens[-1] == tokenizer.eos_token_id
        parts = runs(trace)
        assert [kind for kind, _ in parts] == [True, False] * len(trace.turns) + [True]
        actions = []
        for kind, tokens in parts:
            if kind:
                state, stopped = 0, []
                for token in tokens:
                    state = int(table.next_state[state, token])
                    stopped.append(state in table.accepting)
                assert stopped == [False] * (len(tokens) - 1) + [True]
                actions.append(protocol.parse(table.decode(tokens)))
        assert [action.kind for action in actions] == ["search"] * len(trace.turns) + ["answer"]
        assert [action.content for action in actions[:-1]] == [turn.query for turn in trace.turns]
        assert actions[-1].content == trace.answer and exact_match(trace.answer, trace.question.golds) == 1.0


def test_observations_are_the_engines_and_come_from_the_index(world, traces):
    assets, config = world.assets, world.assets.engine.config
    put = 0
    for trace in traces:
        observations = [tokens for kind, tokens in runs(trace) if not kind]
        for turn, tokens in zip(trace.turns, observations, strict=True):
            passages = [assets.corpus[row] for row in turn.rows]
            rendered = protocol.render_observation(
                passages, assets.tokenizer, config.max_observation_tokens, config.max_passage_tokens
            )
            assert rendered.tokens.tolist() == tokens == trace.tokens[slice(*turn.observation)].tolist()
            assert turn.gold_id in [passage.id for passage in passages] and len(passages) <= config.shown
            top = assets.retriever.search([turn.query], config.shown).rows[0].tolist()
            if turn.found:
                assert list(turn.rows) == top
            else:  # the gold passage in the place of one of them
                put += 1
                assert assets.corpus.row_of(turn.gold_id) not in top
                assert [row for row in turn.rows if assets.corpus[row].id != turn.gold_id] == top[:1]
    assert 0 < put < sum(len(trace.turns) for trace in traces) / 2  # both kinds were tested


def test_prompts_limits_and_mask(world, traces):
    config = world.assets.engine.config
    for trace in traces:
        np.testing.assert_array_equal(trace.prompt, build_prompt(trace.question, world.assets.tokenizer, "brief"))
        assert len(trace.turns) == 2 <= config.max_searches
        assert len(trace.tokens) - 1 <= config.max_response_tokens
        assert all(len(tokens) <= config.max_new_tokens for kind, tokens in runs(trace) if kind)


def test_queries_and_thoughts_use_only_what_was_read(world, traces):
    """No word of a query comes from the answer or a title that the policy has not seen yet."""
    for trace in traces:
        seen = trace.question.question
        queries = iter(trace.turns)
        for kind, text in trace.text:
            if kind == "observation":
                seen += " " + text
            elif "<search>" in text:
                query = next(queries).query
                assert set(trace_text.words(query)) <= set(trace_text.words(seen)), (query, seen)
    assert len({trace.text[0][1].split("<search>")[0] for trace in traces}) > 3  # variety


def test_hops_are_in_reading_order(traces):
    """The question names the person; the club is found through the person's passage. The gold ids come the other way round."""
    for trace in traces:
        if trace.question.id.startswith("q"):
            assert [turn.gold_id[0] for turn in trace.turns] == ["p", "c"]


def test_a_trace_depends_on_seed_and_question_alone(world, questions, traces):
    again, _ = builder(world).build(reversed(questions[3:7]), 2)
    for trace in again:
        same = next(other for other in traces if other.question == trace.question)
        np.testing.assert_array_equal(trace.tokens, same.tokens)
        assert trace_row(trace) == trace_row(same)
    assert [trace.question.id for trace in again] == ["q6", "q5"]
    other, _ = builder(world, seed=1).build(questions, 100)
    assert any(a.text != b.text for a, b in zip(traces, other, strict=True))


def test_unusable_questions_are_skipped_and_counted(world, questions):
    bare = Question("a", "Who?", ("Oslo",), (), "towns")
    unknown = Question("b", "Who?", ("Oslo",), ("nowhere",), "towns")
    hidden = Question("c", "In which town is the club based that Anna Bell founded?", ("Atlantis",), ("p0", "c0"), "towns")
    built, skipped = builder(world).build([bare, unknown, hidden, questions[0]], 9)
    assert [trace.question.id for trace in built] == ["q0"]
    assert skipped == {"no gold passages": 1, "gold passage not in the corpus": 1, "answer not in the shown passages": 1}
    for limit, reason in (("max_new_tokens", "generation too long"), ("max_response_tokens", "response too long")):
        built, skipped = builder(world, **{limit: 30}).build(questions[:2], 9)
        assert not built and skipped == {reason: 2}
    assert builder(world, max_prompt_tokens=8).build(questions[:2], 9) == ([], {"prompt too long": 2})


def test_one_search_where_one_passage_is_gold_or_allowed(world, questions):
    single = dataclasses.replace(questions[0], gold_passage_ids=("c0",))
    built, _ = builder(world).build([single], 1)
    assert len(built[0].turns) == 1
    capped, _ = builder(world, max_searches=1).build([questions[-1]], 1)
    assert len(capped[0].turns) == 1


# The words ------------------------------------------------------------------------------------------------------------


def test_seen_part():
    assert trace_text.seen_part("Lilu (mythology)", "If Gallu is a demon Lilu is what?") == "Lilu"
    assert (
        trace_text.seen_part("Mountrail County Courthouse", "a township in Mountrail County in North Dakota") == "Mountrail County"
    )
    assert trace_text.seen_part("miracle on 34th Street", "in Miracle on 34th street?") == "miracle on 34th Street"
    assert trace_text.seen_part("The Hukilau Song", "Who wrote a song on the island?") == ""  # "song" names nothing
    assert trace_text.seen_part("Grace Krilanovich", "Grace Krilanovich's first novel") == "Grace Krilanovich"
    assert trace_text.seen_part("Legend of the Leprechauns", "the Legend of the West") == "Legend"


def test_order_hops():
    article = Passage("1", "Big Stone Gap (film)", "A film directed by Adriana Trigiani.")
    person = Passage("2", "Adriana Trigiani", "A novelist based in Greenwich Village.")
    other = Passage("3", "Virginia", "A state.")
    question, golds = 'The director of "Big Stone Gap" is based where?', ["Greenwich Village"]
    for order in itertools.permutations([article, person]):
        assert trace_text.order_hops(question, golds, order, 2) == [article, person]
    assert trace_text.order_hops(question, golds, [other, person, article], 2) == [article, person]
    assert trace_text.order_hops(question, golds, [], 2) == []


def test_quotations_are_verbatim_and_readable():
    text = "She was born in Rome. In 1993, the club was formed by Ann Lee and Bob Ray in Adelaide."
    shown = f"Doc 1(Title: X) {text}"
    quote = trace_text.snippet(text, "Bob Ray", shown, 5)
    assert "Bob Ray" in quote and len(quote.split()) == 5 and quote in text
    assert trace_text.snippet(text, "Bob Ray", "Doc 1(Title: X) She was born in Rome.", 5) == ""  # cut off: nothing to quote
    assert trace_text.snippet(text, "Bob Ray", shown, 0) == ""
    assert trace_text.opening(
        "Ed Wood (October 10) was an American filmmaker. He", "Ed Wood (October 10) was an American film", 4
    ) == ("Ed Wood was an")
    assert trace_text.opening("Ed Wood was an American filmmaker", "Ed Wood was", 6) == ""


@settings(max_examples=60, deadline=None)
@given(st.text(max_size=60), st.text(max_size=30), st.text(max_size=60), st.integers(0, 9))
def test_no_text_breaks_the_protocol(question, title, seen, seed):
    """Whatever question and title say, the written generation parses to exactly its query."""
    rng = random.Random(seed)
    passage = Passage("1", title, seen)
    query, focus = trace_text.first_query(question, title, rng)
    later, later_focus = trace_text.next_query(question, title, seen, [query], title, rng)
    thoughts = (trace_text.first_thought(focus, rng), trace_text.next_thought(passage, 1, seen, later_focus, 7, rng))
    for said, asked in zip(thoughts, (query, later), strict=True):
        text = f"<think> {said} </think>\n{protocol.SEARCH_OPEN} {asked} {protocol.SEARCH_CLOSE}"
        action = protocol.parse(text)
        assert protocol.cut(text) == text
        assert action == (protocol.Action("search", asked) if asked else protocol.Action("empty_query"))
    last = trace_text.last_thought(question, [(passage, 1)], "yes", seen, 7, rng)
    assert "<" not in last and protocol.parse(f"<think> {last} </think>\n<answer> yes </answer>") == protocol.Action(
        "answer", "yes"
    )
