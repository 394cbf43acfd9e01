"""The real engine on small parts: a scripted policy for exact plots, and a random model that searches and answers by chance."""

import dataclasses
import functools

import jax
import numpy as np
import pytest
import rollout_tiny as tiny

from bridge_jax.rollout import protocol
from bridge_jax.rollout.episodes import RolloutConfig, RolloutEngine

WORDS = tiny.word_tokenizer()
BYTES = tiny.byte_level_tokenizer()
CONFIG = RolloutConfig(
    max_searches=2,
    shown=3,
    candidates=8,
    max_prompt_tokens=16,
    max_new_tokens=12,
    max_observation_tokens=48,
    max_response_tokens=100,
    chunk=4,
    batch_groups=2,
)


class Script:
    """Runs texts through the real engine. A generation is text or ids; observations are filled in from the retriever."""

    def __init__(self, tokenizer, config=CONFIG, retriever=None, eos=None, tool=None):
        self.tokenizer, self.config, self.tool = tokenizer, config, tool
        self.retriever = retriever or tiny.Retriever(tiny.corpus())
        self.eos = tokenizer.all_special_ids if eos is None else eos

    def ids(self, text):
        return text if isinstance(text, list) else protocol.encode(self.tokenizer, text)

    def observation(self, query) -> list[int]:
        hits = tiny.Retriever(self.retriever.corpus).search([query], self.config.candidates).rows[0][: self.config.shown]
        passages = [self.retriever.corpus[int(row)] for row in hits]
        config = self.config
        limits = config.max_observation_tokens, config.max_passage_tokens, config.cut_inside
        return protocol.render_observation(passages, self.tokenizer, *limits).tokens.tolist()

    def run(self, *samples, prompt_length=3):
        """samples: lists of segments; ("obs", query) and ("say", message) are the environment's. Returns (episodes, metrics)."""
        vocab, plans = len(self.tokenizer), []
        for segments in samples:
            plan = []
            for segment in segments:
                if isinstance(segment, tuple):
                    kind, content = segment
                    told = (
                        self.observation(content)
                        if kind == "obs"
                        else protocol.render_corrective(content, self.tokenizer).tokens.tolist()
                    )
                    plan += [(token, False) for token in told]
                else:
                    plan += [(token, True) for token in self.ids(segment)]
            plans.append(plan)
        filler = self.ids("the")[0]
        script = np.full((1, len(samples), prompt_length + self.config.max_response_tokens + 64), filler, np.int32)
        for row, plan in zip(script[0], plans):
            row[prompt_length : prompt_length + len(plan)] = [token for token, _ in plan]
        model = tiny.Scripted(vocab, len(samples))
        engine = RolloutEngine(model, self.tokenizer, self.eos, self.config, self.retriever, self.tool)
        prompt = np.zeros(prompt_length, np.int32)  # its first token names the script
        episodes, metrics = engine.run(
            model.variables(script),
            tiny.questions(1),
            prompts=[prompt],
            group_size=len(samples),
            key=jax.random.key(0),
            temperature=1.0,
        )
        for episode, plan in zip(episodes, plans):
            wrote = list(zip(episode.tokens.tolist(), episode.generated.tolist()))
            assert wrote == plan[: len(wrote)]
            check(episode)
        assert metrics["rollout/prefill_ratio"] == pytest.approx(1.0) or metrics["rollout/context_full"]
        return episodes, metrics


def check(episode):
    """Invariants of every episode."""
    assert len(episode.tokens) == len(episode.generated) == len(episode.logps)
    assert (episode.tokens.dtype, episode.generated.dtype, episode.logps.dtype) == (np.int32, bool, np.float32)
    assert (episode.logps[~episode.generated] == 0).all()
    assert (episode.logps <= 0).all()
    for turn in episode.turns:
        assert episode.generated[turn.history - 1]
        start, end = turn.observation
        assert start == turn.history
        assert not episode.generated[start:end].any()
        assert len(turn.rows) == len(turn.scores) == 8


QUERY, ANSWER = "<search> who founded it </search>", "<answer> the river </answer>"


@functools.cache
def real_model():
    return tiny.tiny_model(len(WORDS) + 3)


def fresh_engine(**changes):
    """A random model over a word vocabulary in which every tag is one token: it searches and answers by chance."""
    model, variables = real_model()
    config = dataclasses.replace(CONFIG, **changes)
    return RolloutEngine(model, WORDS, [1, 2], config, tiny.Retriever(tiny.corpus())), variables


real_engine = functools.cache(fresh_engine)  # nothing compiles twice between tests


def prompts_of(lengths, seed=0):
    rng = np.random.default_rng(seed)
    return [rng.integers(3, len(WORDS), length).astype(np.int32) for length in lengths]


def run_real(prompts, group_size=8, temperature=1.0, **changes):
    engine, variables = real_engine(**changes)
    return engine.run(
        variables,
        tiny.questions(len(prompts)),
        prompts=prompts,
        group_size=group_size,
        key=jax.random.key(7),
        temperature=temperature,
    )


def same(a, b):
    assert a.tokens.tolist() == b.tokens.tolist()
    assert a.generated.tolist() == b.generated.tolist()
    np.testing.assert_allclose(a.logps, b.logps, atol=1e-5)
    assert (a.status, a.answer, a.trace, [turn.query for turn in a.turns]) == (
        b.status,
        b.answer,
        b.trace,
        [turn.query for turn in b.turns],
    )


@functools.cache
def forward_pass():
    model, _ = real_model()
    return jax.jit(lambda variables, ids: jax.nn.log_softmax(model.apply(variables, ids)))


def check_log_probs(episodes, config=CONFIG):
    """What was recorded against one plain forward pass over each whole episode of the random model."""
    tokens = np.zeros((len(episodes), config.max_prompt_tokens + config.max_response_tokens), np.int32)
    for row, episode in zip(tokens, episodes):
        check(episode)
        ids = [*episode.prompt, *episode.tokens]
        row[: len(ids)] = ids
    logps = np.asarray(forward_pass()(real_model()[1], tokens))
    for row, episode in enumerate(episodes):
        start = len(episode.prompt)
        expected = logps[row, np.arange(start - 1, start - 1 + len(episode.tokens)), episode.tokens]
        np.testing.assert_allclose(episode.logps[episode.generated], expected[episode.generated], atol=1e-5)
