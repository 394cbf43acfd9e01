"""Drawing: against the closed form of the distribution, and transformers' own top-k, top-p and minimum-length processors."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import rollout_tiny as tiny
import torch
from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from bridge_jax import config as configuration
from bridge_jax.errors import UserError
from bridge_jax.rollout import drawing
from bridge_jax.rollout import sampler as device
from bridge_jax.rollout.episodes import RolloutConfig
from bridge_jax.rollout.stopping import stop_table

pick = jax.jit(drawing.pick)


@pytest.mark.parametrize("vocab", [1, 2, 5, 64, 1000])
def test_draw_inverts_the_cumulative_distribution(vocab):
    """Every id is drawn for exactly its share of [0, 1)."""
    logits = 3 * jax.random.normal(jax.random.key(vocab), (vocab,))
    grid = (jnp.arange(8192) + 0.5) / 8192
    ids = np.asarray(drawing.draw(jnp.broadcast_to(logits, (8192, vocab)), grid))
    assert ((ids >= 0) & (ids < vocab)).all()
    assert (np.diff(ids) >= 0).all()
    share = np.bincount(ids, minlength=vocab) / 8192
    np.testing.assert_allclose(share, jax.nn.softmax(logits), atol=1.1 / 8192)


@pytest.mark.parametrize("bad", [jnp.nan, jnp.inf, -jnp.inf])
@pytest.mark.parametrize("where", [slice(7, 8), slice(None)])
def test_logits_that_are_no_numbers_still_give_an_id_and_show_in_the_log_prob(bad, where):
    """The update that such a log-prob would spoil is skipped (test_bilevel); the rollout must get there."""
    logits = jnp.zeros((2, 300)).at[0, where].set(bad)
    for temperature in (0.0, 1.0):
        token, logp = pick(logits, jax.random.key(0), jnp.arange(2), jnp.zeros(2, jnp.int32), jnp.float32(temperature))
        assert (token >= 0).all() and (token < 300).all() and jnp.isfinite(logp[1])
        spoiled = bad != -jnp.inf or where == slice(None)
        assert bool(jnp.isfinite(logp[0])) != spoiled


def test_draw_never_takes_an_impossible_id():
    logits = jnp.full((3, 300), -jnp.inf).at[:, 17].set(0.0).at[:, 250].set(-20.0)
    ids = drawing.draw(logits, jnp.asarray([0.0, 0.5, 1 - 2**-24]))
    assert set(np.asarray(ids).tolist()) <= {17, 250}


def test_pick_records_the_untempered_log_prob_and_draws_from_the_tempered_one():
    logits = jnp.tile(2 * jax.random.normal(jax.random.key(0), (1, 11)), (20_000, 1))
    samples, position = jnp.arange(20_000), jnp.full(20_000, 5)
    for temperature in (1.0, 0.5):
        token, logp = pick(logits, jax.random.key(1), samples, position, jnp.float32(temperature))
        np.testing.assert_allclose(logp, jax.nn.log_softmax(logits[0])[token], atol=1e-5)
        share = np.bincount(np.asarray(token), minlength=11) / 20_000
        np.testing.assert_allclose(share, jax.nn.softmax(logits[0] / temperature), atol=0.015)
    token, logp = pick(logits, jax.random.key(1), samples, position, jnp.float32(0.0))
    assert (token == logits[0].argmax()).all()
    np.testing.assert_allclose(logp, jax.nn.log_softmax(logits[0]).max(), atol=1e-5)


def test_a_row_depends_on_its_key_sample_and_position_only():
    logits = jax.random.normal(jax.random.key(0), (6, 50))
    samples, positions = jnp.arange(6) + 3, jnp.asarray([1, 2, 3, 4, 5, 6])
    token, _ = pick(logits, jax.random.key(1), samples, positions, jnp.float32(1))
    order = jnp.asarray([4, 0, 2])
    some, _ = pick(logits[order], jax.random.key(1), samples[order], positions[order], jnp.float32(1))
    assert (some == token[order]).all()
    same = jnp.zeros((200, 50))
    token, _ = pick(same, jax.random.key(1), jnp.zeros(200, int), jnp.arange(200), jnp.float32(1))
    assert len(set(np.asarray(token).tolist())) > 30  # another position, another draw
    token, _ = pick(same, jax.random.key(1), jnp.arange(200), jnp.zeros(200, int), jnp.float32(1))
    assert len(set(np.asarray(token).tolist())) > 30


@pytest.mark.parametrize(
    ("temperature", "top_p", "top_k"), [(1.0, 0.8, 0), (0.7, 0.5, 0), (1.3, 1.0, 5), (1.5, 0.9, 20), (1.0, 1e-6, 0)]
)
def test_top_k_and_top_p_equal_those_of_transformers(temperature, top_p, top_k):
    """Shares of an even grid over [0, 1) are the warped distribution's probabilities."""
    logits = 2 * jax.random.normal(jax.random.key(3), (1000,))
    warped = TemperatureLogitsWarper(temperature)(None, torch.tensor(np.asarray(logits))[None])
    warped = TopKLogitsWarper(top_k)(None, warped) if top_k else warped
    warped = TopPLogitsWarper(top_p)(None, warped) if top_p < 1 else warped
    wanted = torch.softmax(warped, -1)[0].numpy()
    n = 1 << 14
    rows = jnp.broadcast_to(logits / temperature, (n, 1000))
    draw = jax.jit(drawing.draw_top, static_argnames=("top_p", "top_k"))
    ids = np.asarray(draw(rows, (jnp.arange(n) + 0.5) / n, top_p=top_p, top_k=top_k))
    if (wanted > 0).sum() <= drawing.SLICE:
        np.testing.assert_allclose(np.bincount(ids, minlength=1000) / n, wanted, atol=1.1 / n)
    else:  # the SLICE most likely ids do not hold the mass: all of them, renormalised
        best = np.argsort(-np.asarray(logits))[: drawing.SLICE]
        share = np.exp(np.asarray(logits)[best] / temperature)
        np.testing.assert_allclose(np.bincount(ids, minlength=1000)[best] / n, share / share.sum(), atol=1.1 / n)
        assert set(ids) <= set(best.tolist())


def test_options_change_the_draw_and_not_the_recorded_log_prob():
    logits = 2 * jax.random.normal(jax.random.key(0), (500, 40))
    picked = jax.jit(drawing.pick, static_argnames=("top_p", "top_k"))
    at = jnp.arange(500), jnp.full(500, 5)
    token, logp = picked(logits, jax.random.key(1), *at, jnp.float32(1), top_k=3)
    full = np.asarray(jax.nn.log_softmax(logits))
    np.testing.assert_allclose(logp, full[np.arange(500), token], atol=1e-5)
    rank = (np.asarray(logits) > np.asarray(logits)[np.arange(500), token][:, None]).sum(1)
    assert set(rank.tolist()) == {0, 1, 2}
    greedy, _ = picked(logits, jax.random.key(1), *at, jnp.float32(0), top_k=3, top_p=0.5)
    assert (greedy == logits.argmax(-1)).all()
    # The same random number: without options bit for bit what there was before there were any.
    plain, _ = pick(logits, jax.random.key(1), *at, jnp.float32(1))
    neutral, _ = picked(logits, jax.random.key(1), *at, jnp.float32(1), top_p=1.0, top_k=0)
    assert (plain == neutral).all()


def test_options_cost_nothing_when_they_are_off():
    def program(**options):
        sampled = jax.jit(functools.partial(drawing.pick, **options))
        of = jnp.zeros((4, 300)), jax.random.key(0), jnp.zeros(4, jnp.int32), jnp.zeros(4, jnp.int32), jnp.float32(1)
        return str(sampled.trace(*of).jaxpr)

    assert program() == program(top_p=1.0, top_k=0, barred=None)
    assert "top_k" in program(top_p=0.9) and "top_k" not in program()
    assert " sort[" not in program(top_p=0.9, top_k=7)


TOKENIZER = tiny.word_tokenizer()


def decode(min_new_tokens, temperature, steps=12, left=12):
    model, variables = tiny.tiny_model(len(TOKENIZER))
    sampler = device.Sampler(model, stop_table(TOKENIZER, len(TOKENIZER)), [1, 2], min_new_tokens=min_new_tokens)
    rows = np.arange(32, dtype=np.int32)
    prompts = np.asarray([[5, 6, 7, 8]], np.int32)
    one, limit = np.asarray([0], np.int32), np.full(32, left, np.int32)
    state = sampler.start(variables, prompts, one + 4, one, rows, limit, groups=1, prompt_width=4, width=32)
    state, tokens, logps, counts = sampler.decode_chunk(variables, state, jax.random.key(3), temperature, steps=steps)
    ids = np.concatenate([np.tile(prompts, (32, 1)), np.asarray(tokens)], axis=1)
    full = np.asarray(jax.nn.log_softmax(model.apply(variables, ids)))[:, 3:-1]
    return state, np.asarray(tokens), np.asarray(logps), np.asarray(counts), full


def ends():
    return {1, 2} | {index for token, index in TOKENIZER.get_vocab().items() if "</search>" in token or "</answer>" in token}


def test_a_generation_has_its_minimum_length():
    """No EOS (either one) and no completed tag among the first tokens; afterwards both end it again; a limit below counts."""
    state, tokens, logps, counts, full = decode(5, 1.0)
    assert (counts >= 6).all() and (counts == 6).any()
    for row, count in zip(tokens, counts):
        assert not set(row[: count - 1].tolist()) & ends()
    reasons = set(np.asarray(state.reason).tolist())
    assert {device.EOS, device.SEARCH} <= reasons
    written = np.arange(12) < counts[:, None]
    np.testing.assert_allclose(logps[written], np.take_along_axis(full, tokens[..., None], 2)[..., 0][written], atol=1e-5)
    *_, counts, _ = decode(5, 1.0, left=3)
    assert (counts == 3).all()
    *_, counts, _ = decode(0, 1.0)
    assert (counts == 1).any()


def test_settings_that_cannot_work():
    configuration.load("configs/pocket.py", [f"rollout.top_k={drawing.SLICE}"])
    with pytest.raises(UserError, match=rf"at most {drawing.SLICE}"):
        configuration.load("configs/pocket.py", [f"rollout.top_k={drawing.SLICE + 1}"])
    for field, value in (("top_p", 0.0), ("top_p", 1.5), ("top_k", 65), ("top_k", -1), ("min_new_tokens", 300)):
        with pytest.raises(UserError, match=rf"rollout\.{field}"):
            RolloutConfig(**{field: value})


def test_a_renormalised_distribution_is_warned_of(caplog):
    pocket = "configs/pocket.py"
    configuration.load(pocket)
    assert not caplog.records
    configuration.load(pocket, ["rollout.top_p=0.9", "rollout.min_new_tokens=2"])
    assert "top_p=0.9" in caplog.text and "min_new_tokens=2" in caplog.text and "biased" in caplog.text
