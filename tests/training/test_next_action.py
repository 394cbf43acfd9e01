"""Credit through the next action: whose span counts, and its score against the sampler's own numbers and a plain forward pass."""

from types import SimpleNamespace

import jax
import numpy as np
import pytest
import tiny_run

from bridge_jax import config as configuration
from bridge_jax.data.prompts import build_prompt
from bridge_jax.data.qa import load_questions
from bridge_jax.rollout import protocol
from bridge_jax.rollout.episodes import Episode, Turn
from bridge_jax.training.assets import load_assets
from bridge_jax.training.credit_stage import CreditStage
from bridge_jax.training.next_action import credit_of, next_span, successful_span

S, A, BAD = "search", "answer", "bad"  # generations: a search that runs, an answer, something malformed


def make_episode(*generations, question=None):
    """Generation g is the tokens 10 g + 1, 10 g + 2, ..; observations and corrections are 0s."""
    tokens, generated, turns = [], [], []
    for g, kind in enumerate(generations, 1):
        tokens += [10 * g + n for n in range(1, g + 2)]
        generated += [True] * (g + 1)
        if kind == A:
            break
        start = len(tokens)
        tokens += [0] * 3
        generated += [False] * 3
        if kind == S:
            turn = Turn(f"q{g}", start, np.arange(3, dtype=np.int32), np.zeros(3, np.float32), 3, (start, len(tokens)))
            turns.append(turn)
    status = "answered" if generations[-1] == A else "no_answer"
    tokens, generated = np.asarray(tokens, np.int32), np.asarray(generated)
    logps = np.zeros(len(tokens), np.float32)
    question = question or SimpleNamespace(golds=("x",), gold_passage_ids=())
    return Episode(question, 0, 0, np.ones(2, np.int32), tokens, generated, logps, turns, status, None, [])


def test_spans_are_what_was_sampled_after_the_observation():
    episode = make_episode(S, S, A)
    assert next_span(episode, 0).tolist() == [21, 22, 23]
    assert next_span(episode, 1).tolist() == [31, 32, 33, 34]
    assert next_span(episode, 2) is None
    assert next_span(make_episode(S, BAD, S), 0) is None  # a correction in between: what followed the passages was no action
    assert next_span(make_episode(S, BAD, A), 0) is None
    assert next_span(make_episode(S, S), 1) is None  # the end of the context came first


@pytest.mark.parametrize(
    ("group", "scores", "expected"),
    [
        ([(S, S, A), (S, S, A)], [1, 1], ([21, 22, 23], "own")),
        ([(S, S, A), (S, S, A)], [0, 1], ([21, 22, 23], "sibling")),
        ([(S, S, A), (S, A), (S, S, A)], [0, 1, 1], ([21, 22, 23], "sibling")),  # one that searched again before one that answered
        ([(S, S, A), (S, A), (S, S, A)], [0, 1, 0], ([21, 22, 23], "sibling")),
        ([(S, S, A), (A,), (S, BAD, A)], [0, 1, 1], None),  # no search there; no action there
        ([(S, S, A), (S, S, A)], [0, 0], None),
    ],
)
def test_whose_span(group, scores, expected):
    other = [(S, S, A)] * len(group)  # another group's success is none of ours
    episodes = [make_episode(*generations) for generations in [*other, *group]]
    got = successful_span(episodes, np.asarray([1] * len(group) + scores, np.float32), len(group), len(group), 0)
    assert (got if got is None else (got[0].tolist(), got[1])) == expected


@pytest.mark.parametrize(
    ("sibling", "same_tokens", "same_query", "serves"),
    [
        ("history", True, True, True), ("history", False, True, False), ("query", False, True, True),
        ("query", True, False, False), ("any", False, False, True),
    ],
)  # fmt: skip
def test_which_siblings_serve(sibling, same_tokens, same_query, serves):
    failed, succeeded = make_episode(S, S, A), make_episode(S, S, A)
    if not same_tokens:
        succeeded.tokens[0] += 1
    if not same_query:
        succeeded.turns[0].query = "another"
    found = successful_span([failed, succeeded], np.asarray([0, 1], np.float32), 2, 0, 0, sibling)
    assert (found is not None) == serves
    own = successful_span([failed, succeeded], np.asarray([1, 0], np.float32), 2, 0, 0, sibling)
    assert own is not None and own[1] == "own"  # its own span needs nobody


@pytest.mark.parametrize(
    ("settings", "kinds"),
    [  # first turns of: success; failure with a helpful sibling; failure in a group of failures; then a last turn
        ({}, ("answer", "answer", "answer", "answer")),
        ({"target": "next_action"}, ("next_action", "next_action", "answer", "answer")),
        ({"target": "both", "no_span": "zero"}, ("both", "both", "masked", "answer")),
        ({"target": "next_action", "no_span": "zero"}, ("next_action", "next_action", "masked", "answer")),
        ({"first_hop": "mask"}, ("masked", "masked", "masked", "answer")),
    ],
)
def test_which_credit(settings, kinds):
    config = configuration.default()
    config.grpo.group_size = 2
    config.credit.update(settings)
    episodes = [make_episode(S, S, A) for _ in range(4)]
    scores = np.asarray([1, 0, 0, 0], np.float32)
    credits = [credit_of(config, episodes, scores, i, t) for i, t in ((0, 0), (1, 0), (2, 0), (1, 1))]
    assert tuple(credit.kind for credit in credits) == kinds
    for credit in credits:
        assert (credit.span is not None) == (credit.kind in ("next_action", "both")) == (credit.author is not None)


@pytest.fixture(scope="module")
def played(tmp_path_factory):
    """(config, assets, variables, four real rollouts with one passage an observation that searched twice in a row), groups of 2."""
    folder = tmp_path_factory.mktemp("next-action")
    patch = pytest.MonkeyPatch()
    patch.setenv("BRIDGE_JAX_CACHE", str(folder / "cache"))
    fields = {
        "rollout__shown": 1,
        "grpo__group_size": 2,
        "credit__target": "next_action",
        "credit__no_span": "zero",
        "credit__sibling": "any",
    }
    fields |= {"credit__max_turns": 15, "credit__turns_per_batch": 4}  # full batches, few programs
    config = configuration.load(tiny_run.write_world(folder, **fields))
    assets = load_assets(config, folder)
    questions = load_questions(config.data.train[0], "train")[:4]
    # Louder layers: the start's are so small that no passage matters.
    layers = jax.tree.map(lambda x: x * 6 if x.ndim > 2 else x, assets.base_params["layers"])
    variables = {"params": assets.base_params | {"layers": layers}}
    episodes, _ = assets.engine.run(
        variables,
        questions,
        prompts=[build_prompt(q, assets.tokenizer, "brief") for q in questions],
        group_size=32,
        key=jax.random.key(5),
        temperature=1.0,
    )
    yield config, assets, variables, [e for e in episodes if len(e.turns) > 1 and next_span(e, 0) is not None][:4]
    patch.undo()


def test_own_spans_score_as_they_were_sampled(played):
    """With one passage shown, l' of that passage is the sum of the log-probs the sampler reported for the span."""
    config, assets, variables, episodes = played
    scores = np.ones(4, np.float32)
    credited, metrics = CreditStage(config, assets)(1, variables, episodes, scores, scores)
    own = [credit for credit in credited.credits if credit.kind == "next_action"]
    assert len(own) == 4 == metrics["credit/own_span"] == metrics["credit/next_action_turns"]
    assert metrics["credit/turns"] == 8 and metrics["credit/masked_turns"] == metrics["credit/sibling_span"] == 0
    for credit in own:
        episode = episodes[credit.episode]
        start = credit.turn.observation[1]
        assert credit.likelihood[0] == pytest.approx(episode.logps[start : start + len(credit.span)].sum(), abs=2e-4)
        assert np.ptp(credit.likelihood) > 1e-3


def test_a_siblings_span_after_the_failures_own_history(played):
    config, assets, variables, episodes = played
    scores = np.asarray([0, 1, 0, 0], np.float32)
    credited, metrics = CreditStage(config, assets)(1, variables, episodes, scores, np.zeros(4, np.float32))
    assert [(credit.kind, credit.author) for credit in credited.credits if credit.number == 0] == [
        ("next_action", "sibling"), ("next_action", "own"), ("masked", None), ("masked", None),
    ]  # fmt: skip
    assert metrics["credit/sibling_span"] == metrics["credit/own_span"] == 1 and metrics["credit/masked_turns"] == 2
    borrowed, episode = credited.credits[0], episodes[0]
    assert borrowed.span.tolist() == next_span(episodes[1], 0).tolist()
    forward = jax.jit(lambda tokens: jax.nn.log_softmax(assets.policy.apply(variables, tokens)))
    for row, value in zip(borrowed.turn.rows.tolist(), borrowed.likelihood):
        observation = protocol.render_observation([assets.corpus[row]], assets.tokenizer, 64).tokens
        prefix = np.concatenate([episode.prompt, episode.tokens[: borrowed.turn.history], observation])
        tokens = np.concatenate([prefix, borrowed.span])
        at = np.arange(len(prefix), len(tokens))
        logps = np.asarray(forward(np.pad(tokens, (0, 192 - len(tokens)))[None])[0])
        assert value == pytest.approx(logps[at - 1, tokens[at]].sum(), abs=2e-4)
    # Masked turns, like padding, have no weight in the retriever's loss.
    mask = np.asarray(credited.turns.mask)
    assert mask[: len(credited.credits)].tolist() == [credit.kind != "masked" for credit in credited.credits]
    assert not mask[len(credited.credits) :].any() and np.isfinite(credited.turns.log_likelihood).all()


def test_masked_turns_take_no_place_of_scored_ones(played):
    config, assets, variables, episodes = played
    settings = configuration.default()
    settings.update(config)
    settings.credit.update(target="answer", first_hop="mask", max_turns=4, minibatch=4)
    credited, metrics = CreditStage(settings, assets)(1, variables, episodes, np.ones(4, np.float32), np.ones(4, np.float32))
    assert [credit.kind for credit in credited.credits] == ["answer"] * 4 + ["masked"] * 4
    assert np.asarray(credited.turns.mask).sum() == 4 and metrics["credit/masked_turns"] == 4


def test_both_is_the_sum(played):
    config, assets, variables, episodes = played
    scores = np.ones(4, np.float32)
    parts = []
    for target in ("answer", "next_action", "both"):
        settings = configuration.default()
        settings.update(config)
        settings.credit.target = target
        parts.append(CreditStage(settings, assets)(1, variables, episodes, scores, scores)[0].credits)
    assert [credit.kind for credit in parts[2]] == ["both", "answer"] * 4
    for answer, action, both in zip(*parts):
        expected = answer.likelihood + action.likelihood if both.kind == "both" else answer.likelihood
        np.testing.assert_allclose(both.likelihood, expected, rtol=1e-4)
