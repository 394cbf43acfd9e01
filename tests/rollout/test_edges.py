"""Where off-by-one errors live: the smallest batch, the shortest and longest prompt, a full context, all or one row at the end."""

import dataclasses

import jax
import numpy as np
import pytest
import rollout_tiny as tiny
from rollout_engine import ANSWER, CONFIG, QUERY, WORDS, Script, check_log_probs, prompts_of, real_engine, run_real, same


@pytest.mark.parametrize("length", [1, 9, CONFIG.max_prompt_tokens])
def test_one_row_alone(length):
    """Batch 1, group 1; a prompt of one token, one of the greatest length."""
    for seed in range(4):
        (prompt,) = prompts_of([length], seed=seed)
        (episode,), metrics = run_real([prompt], group_size=1, batch_groups=1)
        assert len(episode.tokens) and (episode.prompt == prompt).all()
        assert metrics["rollout/prefill_ratio"] == pytest.approx(1.0, abs=1e-12)
        check_log_probs([episode])


def test_shortest_and_longest_prompt_together():
    limit = CONFIG.max_prompt_tokens
    prompts = prompts_of([1, limit, 1, limit - 1, 2])
    episodes, metrics = run_real(prompts, group_size=4)
    assert metrics["rollout/prefill_ratio"] == pytest.approx(1.0, abs=1e-12)
    check_log_probs(episodes)
    for group, prompt in enumerate(prompts[:1]):  # the first questions' keys do not depend on how many follow
        alone, _ = run_real([prompt], group_size=4, batch_groups=1)
        for a, b in zip(episodes[4 * group : 4 * group + 4], alone):
            same(a, b)


def test_an_empty_prompt_is_refused_like_one_that_is_too_long():
    episodes, _ = run_real([np.zeros(0, np.int32), *prompts_of([4])], group_size=2)
    assert [episode.status for episode in episodes[:2]] == ["context_full"] * 2
    assert all(len(episode.tokens) for episode in episodes[2:])


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"temperature": -1.0}, "temperature=-1.0"),
        ({"temperature": float("nan")}, "temperature=nan"),
        ({"group_size": 0}, "group_size=0"),
        ({"prompts": [np.array([3, 10_000])]}, r"prompt 0 .* must be in \[0, "),
        ({"prompts": [np.array([-1, 3])]}, r"prompt 0 .* from -1 to 3"),
        ({"prompts": []}, "1 questions but 0 prompts"),
    ],
)
def test_what_no_rollout_can_be_is_refused(wrong, words):
    engine, variables = real_engine()
    settings = {"prompts": prompts_of([4]), "group_size": 1, "key": jax.random.key(0), "temperature": 1.0} | wrong
    with pytest.raises(ValueError, match=words):
        engine.run(variables, tiny.questions(1), **settings)


@pytest.mark.parametrize("left", [0, 1, 2])
def test_an_observation_that_fills_the_context(left):
    """With `left` tokens behind it: none, and it is not shown; one, and that one is generated."""
    asked = "the <search> who </search>"
    script = Script(WORDS)
    before = len(script.ids(asked)) + len(script.observation("who"))
    script.config = dataclasses.replace(CONFIG, max_response_tokens=before + left)
    (full, other), metrics = script.run([asked, ("obs", "who"), "red river red"], ["the " + ANSWER])
    assert (full.status, other.status) == ("context_full", "answered")
    assert len(full.tokens) == (before + left if left else len(script.ids(asked)))
    assert full.generated[len(script.ids(asked)) :].sum() == left
    (turn,) = full.turns
    assert (turn.shown > 0, turn.error is None) == (left > 0, left > 0)
    assert metrics["rollout/prefill_ratio"] == pytest.approx(1.0, abs=1e-12)


def test_an_answer_in_the_last_token_of_the_context_counts():
    script = Script(WORDS)
    text = "the " + ANSWER
    script.config = dataclasses.replace(CONFIG, max_response_tokens=len(script.ids(text)))
    (episode,), _ = script.run([text])
    assert (episode.status, episode.answer) == ("answered", "the river")


@pytest.mark.parametrize("chunk", [1, 4, 100])
def test_all_rows_finish_at_once(chunk):
    text = "the " + ANSWER
    script = Script(WORDS, dataclasses.replace(CONFIG, chunk=chunk))
    episodes, metrics = script.run(*[[text]] * 5)
    n = len(script.ids(text))
    assert [(episode.status, len(episode.tokens)) for episode in episodes] == [("answered", n)] * 5
    # Nothing is decoded behind the last token: one prompt in 16 columns, then n steps of 2 x 5 rows (one group is idle).
    assert metrics["rollout/padding_ratio"] * (3 + 5 * n) == pytest.approx(16 + 10 * n)


def test_all_rows_search_at_once():
    script = Script(WORDS)
    episodes, _ = script.run(*[["the " + QUERY, ("obs", "who founded it"), ANSWER]] * 5)
    assert [episode.status for episode in episodes] == ["answered"] * 5
    assert script.retriever.calls == [["who founded it"] * 5]


@pytest.mark.parametrize("chunk", [3, 12, 100])
def test_one_row_runs_to_the_end_while_the_others_stop(chunk):
    """The last one alone, through all generations, to the last token of its last generation."""
    config = dataclasses.replace(CONFIG, chunk=chunk, max_response_tokens=200)
    seen = ("obs", "who founded it")
    filler = "the " + "red " * (config.max_new_tokens - 1 - len(Script(WORDS).ids(QUERY)))
    endless = [filler + QUERY, seen, filler + QUERY, seen, "red river " * config.max_new_tokens]
    others = [["the " + ANSWER]] * 3
    for at in (0, 2, 3):  # first, middle, last row
        episodes, metrics = Script(WORDS, config).run(*others[:at], endless, *others[at:])
        assert [episode.status for episode in episodes].count("answered") == 3
        assert episodes[at].status == "truncated"
        assert episodes[at].generated.sum() == 3 * config.max_new_tokens
        assert metrics["rollout/prefill_ratio"] == pytest.approx(1.0, abs=1e-12)


def test_no_question_at_all():
    episodes, metrics = run_real([], group_size=2)
    assert episodes == [] and metrics["rollout/searches"] == 0
