"""Episodes that begin in the middle of another, and encoders that read the question with the query."""

import dataclasses

import jax
import numpy as np
import pytest
import rollout_tiny as tiny
from rollout_engine import CONFIG, WORDS, fresh_engine, prompts_of, real_model, run_real

from bridge_jax.rollout import protocol
from bridge_jax.rollout.episodes import Opening, RolloutEngine


def _generations(episode, end):
    """Generations that ended before token `end`."""
    begins = episode.generated[:end] & ~np.concatenate([[False], episode.generated[:end][:-1]])
    return int(begins.sum())


def test_a_continuation_from_the_middle_is_the_rest_of_the_episode():
    """With its own observation and its sample's key: the same tokens. With other ones, each as if alone in its group."""
    episodes, _ = run_real(prompts_of([5, 9, 7, 3, 6, 8, 4, 5]), group_size=1)
    turns = [(episode, turn) for episode in episodes for turn in episode.turns if not turn.error]
    assert len(turns) >= 4 and any(episode.turns[-1] is not turn for episode, turn in turns), "the model must search"
    config = dataclasses.replace(CONFIG, max_prompt_tokens=CONFIG.max_prompt_tokens + CONFIG.max_response_tokens)
    model, variables = real_model()
    corpus = tiny.corpus()
    engine = RolloutEngine(model, WORDS, [1, 2], config, tiny.Retriever(corpus))
    alone = [protocol.render_observation([corpus[n]], WORDS, config.max_observation_tokens).tokens for n in (0, 1)]

    def play(told, width, **settings):
        """Each turn goes on with each of its observations, `width` of them in a group."""
        chosen = [(*turn, seen[at : at + width]) for turn, seen in zip(turns, told) for at in range(0, len(seen), width)]
        found, metrics = engine.run(
            variables,
            [episode.question for episode, _, _ in chosen],
            prompts=[np.concatenate([episode.prompt, episode.tokens[: turn.history]]) for episode, turn, _ in chosen],
            openings=[Opening(_generations(episode, turn.history), seen) for episode, turn, seen in chosen],
            group_size=width,
            **settings,
        )
        assert metrics["rollout/prefill_ratio"] == 1.0
        return found

    own = [[episode.tokens[slice(*turn.observation)]] for episode, turn in turns]
    numbers = [episode.group for episode, _ in turns]
    for (episode, turn), rest in zip(turns, play(own, 1, key=jax.random.key(7), temperature=1.0, numbers=numbers), strict=True):
        assert rest.tokens.tolist() == episode.tokens[turn.history :].tolist()
        assert rest.generated.tolist() == episode.generated[turn.history :].tolist()
        np.testing.assert_allclose(rest.logps, episode.logps[turn.history :], atol=1e-5)
        assert (rest.status, rest.answer) == (episode.status, episode.answer)
        assert [t.query for t in rest.turns] == [t.query for t in episode.turns[episode.turns.index(turn) + 1 :]]
    others = [[*seen, *alone] for seen in own]
    greedy = {"key": jax.random.key(0), "temperature": 0.0}
    together, single = play(others, 3, **greedy), play(others, 1, **greedy)
    assert [e.tokens.tolist() for e in single] == [e.tokens.tolist() for e in together]
    assert len({e.tokens.tobytes() for e in together}) > len(turns)


def test_openings_that_no_episode_can_have_are_refused():
    engine, variables = fresh_engine()
    settings = {"prompts": [np.zeros(3, np.int32)], "group_size": 1, "key": jax.random.key(0), "temperature": 0.0}
    for opening in (Opening(0, [np.zeros(4, np.int32)]), Opening(1, [np.zeros(CONFIG.max_observation_tokens + 1, np.int32)])):
        with pytest.raises(ValueError, match="opening"):
            engine.run(variables, tiny.questions(1), openings=[opening], **settings)


def test_the_question_stands_before_the_query_for_encoders_that_want_it():
    engine, variables = fresh_engine(question_separator=" [SEP] ")
    prompts, settings = prompts_of([5, 9, 7]), {"group_size": 4, "key": jax.random.key(7), "temperature": 1.0}
    episodes, _ = engine.run(variables, tiny.questions(3), prompts=prompts, **settings)
    asked = sorted(text for call in engine.retriever.calls for text in call)
    assert asked, "the model must search"
    assert asked == sorted(f"{e.question.question} [SEP] {turn.query}" for e in episodes for turn in e.turns)
