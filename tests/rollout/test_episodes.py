"""Whole episodes: a scripted policy for every way a rollout can go, and a random real model for parity with a forward pass."""

import dataclasses

import jax
import numpy as np
import pytest
import rollout_tiny as tiny
from rollout_engine import (
    ANSWER,
    BYTES,
    CONFIG,
    QUERY,
    WORDS,
    Script,
    check_log_probs,
    fresh_engine,
    prompts_of,
    real_engine,
    real_model,
    run_real,
    same,
)

from bridge_jax.errors import UserError
from bridge_jax.retrieval.retriever import RetrievalFault
from bridge_jax.rollout import protocol
from bridge_jax.rollout.episodes import RolloutConfig, RolloutEngine
from bridge_jax.rollout.stopping import stop_table


@pytest.mark.parametrize("tokenizer", [WORDS, BYTES], ids=["words", "bytes"])
def test_the_ways_of_a_rollout(tokenizer):
    config = (
        dataclasses.replace(CONFIG, max_passage_tokens=12)
        if tokenizer is WORDS
        else dataclasses.replace(CONFIG, max_observation_tokens=160, max_response_tokens=520, max_new_tokens=40)
    )
    script = Script(tokenizer, config)
    seen = ("obs", "who founded it")
    eos = [tokenizer.eos_token_id]
    other = [tokenizer.all_special_ids[-1]]
    say = ("say", protocol.MALFORMED)
    third = "<search> what is it </search>"
    # One group: every sample's first token comes from one prompt state, so all begin alike; think is that beginning.
    think = "the "
    episodes, metrics = script.run(
        [think + ANSWER],
        [think + QUERY, seen, ANSWER],
        [think + QUERY, seen, third, ("obs", "what is it"), ANSWER],
        [think + QUERY, seen, QUERY, seen, third],
        [think + "<search> </search>", ("say", protocol.EMPTY_QUERY), ANSWER],
        [think + "who </search>", say, "</answer>", say, ANSWER],
        [script.ids(think) + eos, say, script.ids("the") + other, say, script.ids("red") + eos],
        [think + "the red " * 30],
    )
    # Rows that stop in the same chunk are searched for together, in row order.
    assert script.retriever.calls[0] == ["who founded it"] * 3
    assert sorted(query for call in script.retriever.calls[1:] for query in call) == ["what is it", "who founded it"]
    assert [episode.status for episode in episodes] == [
        *["answered"] * 3,
        "no_answer",
        "answered",
        "answered",
        "no_answer",
        "truncated",
    ]
    assert [episode.answer for episode in episodes] == [*["the river"] * 3, None, "the river", "the river", None, None]
    assert [len(episode.turns) for episode in episodes] == [0, 1, 2, 2, 0, 0, 0, 0]
    assert [turn.query for turn in episodes[2].turns] == ["who founded it", "what is it"]
    assert [kind for kind, _ in episodes[3].trace] == [
        "generated",
        "information",
        "generated",
        "information",
        "generated",
        "corrective",
    ]
    assert [kind for kind, _ in episodes[4].trace] == ["generated", "corrective", "generated"]
    assert len(episodes[7].tokens) == config.max_new_tokens
    table = stop_table(tokenizer, len(tokenizer))
    for episode in episodes:
        for turn in episode.turns:
            assert turn.shown == 3
            assert turn.error is None
            assert protocol.cut(table.decode(episode.tokens[: turn.history])).endswith("</search>") or turn is not episode.turns[0]
            np.testing.assert_array_equal(turn.rows, script.retriever.search([turn.query], 8).rows[0])
    assert metrics["rollout/searches"] == 5 / 8
    assert metrics["rollout/corrective"] == 5 / 8
    assert metrics["rollout/answered"] == 5 / 8
    assert metrics["rollout/generated_tokens"] == sum(episode.generated.sum() for episode in episodes) / 8


def test_search_r1_answers_invalid_actions_and_goes_on():
    """Worked by hand: four actions and a last generation; invalid are no tag, too long a text, and an empty query."""
    say = ("say", protocol.RETRY)
    retry = len(protocol.render_corrective(protocol.RETRY, WORDS).tokens)
    config = dataclasses.replace(
        CONFIG, max_searches=4, max_observation_tokens=max(retry, 48), max_response_tokens=5 * 12 + 4 * max(retry, 48) + 1,
        retry_invalid=True,
    )  # fmt: skip
    long, seen, end = "the " * config.max_new_tokens, ("obs", "who founded it"), [WORDS.eos_token_id]
    episodes, metrics = Script(WORDS, config).run(
        ["the " + QUERY, seen, "who </search>", say, long, say, "<search> </search>", say, ANSWER],
        [long, say, [*WORDS.encode("the"), *end], say, "the " + QUERY, seen, "red " + QUERY, seen, QUERY],
        [long, say, long, say, long, say, long, say, long],
    )
    assert [episode.status for episode in episodes] == ["answered", "no_answer", "truncated"]
    assert [len(episode.turns) for episode in episodes] == [1, 2, 0]
    assert metrics["rollout/corrective"] == (3 + 2 + 4) / 3
    for episode in episodes:  # the environment's sentence has no log-prob, and its tags are no action
        kinds = [kind for kind, _ in episode.trace]
        assert kinds.count("generated") == 5
        told = [text for kind, text in episode.trace if kind == "corrective" and text != protocol.NO_SEARCHES_LEFT]
        assert not any("<information>" in text for text in told)  # which tokens were told, `Script.run` compares
        assert int((~episode.generated).sum()) == retry * len(told) + sum(b - a for a, b in (t.observation for t in episode.turns))
    assert episodes[0].answer == "the river" and episodes[1].trace[-1] == ("corrective", protocol.NO_SEARCHES_LEFT)


def test_a_tool_answers_what_it_can_and_leaves_the_rest_to_the_retriever():
    """A reply is no search and uses up a generation; the one that answers every query leaves no turn."""
    asked = []

    def tool(query):
        asked.append(query)
        return "the river" if query == "what is it" else None

    reply = ("say", "the river")
    episodes, metrics = Script(WORDS, tool=tool).run(
        ["<search> what is it </search>", reply, QUERY, ("obs", "who founded it"), ANSWER],
        ["<search> what is it </search>", reply, "<search> what is it </search>", reply, QUERY],
        [QUERY, ("obs", "who founded it"), ANSWER],
    )
    assert [episode.status for episode in episodes] == ["answered", "no_answer", "answered"]
    assert [[turn.query for turn in episode.turns] for episode in episodes] == [["who founded it"], [], ["who founded it"]]
    assert [kind for kind, _ in episodes[0].trace] == ["generated", "tool", "generated", "information", "generated"]
    assert metrics["rollout/corrective"] == 0 and metrics["rollout/searches"] == 2 / 3
    assert sorted(asked) == ["what is it"] * 3 + ["who founded it"] * 2


def test_text_behind_the_tag_stays_in_the_ids_and_out_of_the_text():
    """`>\\n\\n` is one token here: kept as sampled, cut where it is read."""
    merged = next(i for token, i in BYTES.get_vocab().items() if token == ">ĊĊ")
    generation = protocol.encode(BYTES, "<search> who </search")
    assert BYTES.decode([*generation, merged]) == "<search> who </search>\n\n"
    config = dataclasses.replace(CONFIG, max_observation_tokens=160, max_response_tokens=400, max_new_tokens=40)
    (episode,), _ = Script(BYTES, config).run([[*generation, merged], ("obs", "who"), ANSWER])
    (turn,) = episode.turns
    assert turn.query == "who"
    assert episode.tokens[turn.history - 1] == merged
    assert episode.trace[0] == ("generated", "<search> who </search>")


def test_context_overflow_has_its_own_status_and_keeps_the_question():
    script = Script(WORDS, dataclasses.replace(CONFIG, max_response_tokens=8 + len(Script(WORDS).observation("who"))))
    # The second observation does not fit: the search was executed and is logged, its passages were not shown.
    (first, second), _ = script.run(
        ["the <search> who </search>", ("obs", "who"), "<answer> the red river founded the river"],
        ["the red river founded it <search> who </search>"],
    )
    assert first.status == "context_full"
    assert len(first.tokens) == script.config.max_response_tokens
    assert second.status == "context_full"
    assert second.turns[0].shown == 0
    assert second.turns[0].error
    assert second.turns[0].observation == (len(second.tokens), len(second.tokens))
    assert (second.prompt == first.prompt).all()


def test_a_prompt_that_is_too_long_is_never_cut():
    engine, variables = real_engine()
    questions = tiny.questions(2)
    episodes, _ = engine.run(
        variables, questions, prompts=[np.full(17, 5), np.full(16, 5)], group_size=8, key=jax.random.key(0), temperature=1.0
    )
    assert [episode.status for episode in episodes[:8]] == ["context_full"] * 8
    assert [len(episode.prompt) for episode in episodes] == [17] * 8 + [16] * 8
    assert len(episodes[0].tokens) == 0
    assert all(len(episode.tokens) for episode in episodes[8:])


def test_a_retrieval_fault_marks_its_rollouts_and_spares_the_others():
    retriever = tiny.Retriever(tiny.corpus(), fail=RetrievalFault, fail_from=1)
    episodes, metrics = Script(WORDS, retriever=retriever).run(
        ["the " + QUERY, ("obs", "who founded it"), QUERY],
        ["the " + QUERY, ("obs", "who founded it"), ANSWER],
        ["the " + ANSWER],
    )
    assert [episode.status for episode in episodes] == ["environment_fault", "answered", "answered"]
    assert len(episodes[0].turns) == 1
    assert episodes[0].trace[-1] == ("fault", "the search server is down")
    assert metrics["rollout/environment_fault"] == pytest.approx(1 / 3)
    with pytest.raises(ZeroDivisionError):  # anything else is a bug and is not swallowed
        Script(WORDS, retriever=tiny.Retriever(tiny.corpus(), fail=ZeroDivisionError)).run(["the " + QUERY])


def test_no_searches_at_all():
    config = dataclasses.replace(CONFIG, max_searches=0)
    episodes, _ = Script(WORDS, config).run(["the " + QUERY], ["the " + ANSWER])
    assert [episode.status for episode in episodes] == ["no_answer", "answered"]


def test_recorded_log_probs_are_those_of_one_full_forward_pass():
    episodes, metrics = run_real(prompts_of([3, 16, 7]), group_size=16)
    assert metrics["rollout/searches"] > 0.1
    assert sum(len(episode.turns) == 2 for episode in episodes) > 0
    assert metrics["rollout/prefill_ratio"] == pytest.approx(1.0, abs=1e-12)
    assert metrics["rollout/padding_ratio"] > 1
    check_log_probs(episodes)


def test_greedy_equals_a_naive_loop():
    """Against a loop that forwards the whole text again for every token, observations included."""
    model, variables = real_model()
    forward = jax.jit(lambda ids: model.apply(variables, ids))
    prompts = prompts_of([3, 9, 5, 12, 16, 1], seed=3)
    episodes, _ = run_real(prompts, group_size=1, temperature=0.0)
    for prompt, episode in zip(prompts, episodes):
        ids = np.zeros((1, 16 + CONFIG.max_response_tokens), np.int32)
        ids[0, : len(prompt)] = prompt
        for at, (token, generated) in enumerate(zip(episode.tokens, episode.generated), start=len(prompt)):
            if generated:
                assert int(forward(ids)[0, at - 1].argmax()) == token
            ids[0, at] = token


def test_a_sample_does_not_depend_on_its_company():
    prompts = prompts_of([3, 16, 7, 5, 11])
    together, _ = run_real(prompts)
    alone, _ = run_real(prompts, batch_groups=1)
    wide, _ = run_real(prompts, batch_groups=5, chunk=7)
    for a, b, c in zip(together, alone, wide):
        same(a, b)
        same(a, c)
    others, _ = run_real([prompts[0], *prompts_of([9, 9], seed=5)])
    for a, b in zip(together[:8], others[:8]):
        same(a, b)
    assert len({tuple(episode.tokens) for episode in together[:8]}) > 4  # samples of a group differ
    assert [(episode.group, episode.sample) for episode in together] == [(g, s) for g in range(5) for s in range(8)]
    assert [episode.question.id for episode in together[::8]] == [f"q{i}" for i in range(5)]


def test_compaction_when_columns_run_out_changes_nothing():
    prompts = prompts_of([3, 16, 8, 5, 11, 2, 9] * 2)  # one after the other through the places: columns run on
    roomy, _ = run_real(prompts, group_size=8, max_passage_tokens=8)
    engine, _ = real_engine(max_passage_tokens=8, max_response_tokens=101)
    # Enough for the longest row and an observation, not for the columns of rows that write at different times and never move.
    longest = max(len(episode.tokens) for episode in roomy)
    for widths in ((longest + 48,), (20, 60, longest + 48)):  # only when out of room; and with the width in use
        engine._widths = widths
        before = engine._sampler._order._cache_size()
        tight, _ = run_real(prompts, group_size=8, max_passage_tokens=8, max_response_tokens=101)
        assert engine._sampler._order._cache_size() > before
        for a, b in zip(roomy, tight):
            same(a, b)


def test_a_second_epoch_compiles_nothing():
    """Steps whose prompts fall into other buckets; other questions, in another order of lengths, fewer; both temperatures."""
    engine, variables = fresh_engine(max_new_tokens=11, max_prompt_tokens=100)
    # The longest prompt of a step is in the bucket of 64, 100, 32.
    first = [prompts_of(lengths, seed=1) for lengths in ([3, 36, 7, 9, 52, 4, 4, 1, 10], [40, 90, 5], [12, 30, 9])]
    second = [prompts_of(lengths, seed=9) for lengths in ([16, 5, 12, 6, 2, 8, 8, 1, 11], [3, 63, 4], [9, 100, 3, 60])]

    def epoch(prompts, key, temperature):
        asked = tiny.questions(len(prompts))
        _, metrics = engine.run(variables, asked, prompts=prompts, group_size=8, key=jax.random.key(key), temperature=temperature)
        return metrics["rollout/compilations"]

    assert epoch(first[0], 0, 1.0) > 0
    for prompts in first[1:]:
        epoch(prompts, 0, 1.0)
    assert [epoch(prompts, 1, temperature) for prompts in second for temperature in (1.0, 0.0)] == [0] * 6
    assert epoch(second[0][:4], 2, 1.0) == 0


def test_both_eos_ids_end_a_generation():
    episodes, _ = run_real(prompts_of([3, 16]), group_size=16)
    ends = {int(episode.tokens[episode.generated][-1]) for episode in episodes if episode.status == "no_answer"}
    assert {1, 2} & ends
    inner = {int(token) for episode in episodes for token in episode.tokens[episode.generated]}
    assert {1, 2} <= inner


def test_ids_beyond_the_tokenizer_are_counted_not_hidden():
    """A padded vocabulary: they may be sampled with the trainer's probability, add no text, and are reported."""
    episodes, metrics = run_real(prompts_of([3, 16]), group_size=16)
    outside = sum((episode.tokens >= len(WORDS)).sum() for episode in episodes)
    assert metrics["rollout/outside_vocabulary"] == outside > 0


def test_settings_that_cannot_work():
    with pytest.raises(UserError, match=r"rollout\.shown"):
        RolloutConfig(shown=5, candidates=4)
    with pytest.raises(UserError, match=r"rollout\.chunk"):
        RolloutConfig(chunk=0)
    model, _ = real_model()
    with pytest.raises(UserError, match="max_observation_tokens"):
        RolloutEngine(model, WORDS, [1], dataclasses.replace(CONFIG, max_observation_tokens=5), tiny.Retriever(tiny.corpus()))
