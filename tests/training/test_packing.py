"""Bin packing: every rollout once, in its minibatch, in rows that hold it; few shapes; and the arrays it becomes."""

from types import SimpleNamespace

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from bridge_jax import config as configuration
from bridge_jax.training import packing as packings
from bridge_jax.training.batch import lay_out, pack_rollouts, packing_fill, row_widths
from bridge_jax.training.packing import Packing, best_fit, pack


@st.composite
def steps(draw):
    """(lengths of a step's rollouts, minibatch, microbatch, widths, ways)"""
    microbatch, parts, minibatches = draw(st.integers(1, 12)), draw(st.integers(1, 4)), draw(st.integers(1, 3))
    longest, step = draw(st.integers(1, 96)), draw(st.integers(1, 96))
    count = microbatch * parts * minibatches
    lengths = draw(st.lists(st.integers(0, longest), min_size=count, max_size=count))
    return lengths, microbatch * parts, microbatch, range(longest, 2 * longest + 1, step), draw(st.sampled_from([1, 2, 4]))


@settings(deadline=None, max_examples=150)
@given(steps())
def test_every_rollout_has_its_place(step):
    lengths, minibatch, microbatch, widths, ways = step
    packing = pack(*step)
    assert packing == pack(*step)
    P, R, T = packing.shape
    assert len(packing.minibatches) * minibatch == len(lengths) and P * microbatch == minibatch
    for number, rows in enumerate(packing.minibatches):
        own = range(number * minibatch, (number + 1) * minibatch)
        assert sorted(b for row in rows for b in row) == [b for b in own if lengths[b]]
        assert all(row and sum(lengths[b] for b in row) <= T for row in rows)
        assert len(rows) <= P * R
    assert T in widths and microbatch * widths[0] >= R * T
    assert microbatch % ways or R % ways == 0
    assert sum(lengths) <= packing.computed <= len(lengths) * widths[0]


@settings(deadline=None)
@given(st.lists(st.integers(0, 50), max_size=40), st.integers(50, 120))
def test_rows_are_filled(lengths, width):
    rows = best_fit(lengths, width)
    assert sorted(i for row in rows for i in row) == [i for i, length in enumerate(lengths) if length]
    sums = [sum(lengths[i] for i in row) for row in rows]
    assert all(total <= width for total in sums)
    assert sum(2 * total <= width for total in sums) <= 1


def test_what_it_saves():
    """Lengths as the mini world has them: no search, one, or two."""
    rng = np.random.default_rng(0)
    lengths = np.concatenate([rng.integers(58, 68, 28), rng.integers(107, 125, 86), rng.integers(160, 186, 14)])
    packing = pack(lengths, 128, 32, row_widths(185, 352))
    assert packing.shape[2] == 256  # most of them would have a row of 192 alone
    assert lengths.sum() / packing.computed > 0.85 and 128 * 192 / packing.computed > 1.5
    # long ragged ones fill rows of the longest: none is wider than the limit
    lengths = np.clip(np.exp(rng.normal(7, 0.8, 512)), 200, 8192).astype(int)
    packing = pack(lengths, 512, 8, row_widths(8192, 8192))
    assert packing.shape == (64, 8, 8192) and lengths.sum() / packing.computed > 0.9


@given(st.integers(1, 9000), st.integers(1, 9000), st.integers(1, 8), st.integers(0, 2**32 - 1))
@settings(deadline=None, max_examples=60)
def test_a_microbatch_that_fits_at_the_limit_fits(limit, longest, microbatch, seed):
    """Tokens and logits of attention (R T^2) are at most those of `microbatch` rows of the limit, rounded up."""
    longest = min(limit, longest)
    widths = row_widths(longest, limit)
    rounded = row_widths(limit, limit)
    assert list(rounded) == [widths[-1]] if 2 * widths[0] > rounded[0] else widths[-1] == 2 * widths[0] <= rounded[0]
    assert widths[0] >= longest and rounded[0] < limit + max(65, limit / 8 + 64)
    lengths = np.random.default_rng(seed).integers(0, longest + 1, 4 * microbatch)
    _, R, T = pack(lengths, 4 * microbatch, microbatch, widths).shape
    assert microbatch * rounded[0] >= R * T and microbatch * rounded[0] ** 2 >= R * T * T


def test_few_shapes():
    """However many rows a step needs, the shapes come from a handful."""
    widths = row_widths(185, 352)
    assert list(widths) == [192, 256, 320, 384]
    seen = [pack([100] * count + [0] * (128 - count), 128, 32, widths).shape for count in range(129)]
    assert all(len({shape for shape in seen if shape[2] == width}) <= packings.HEIGHTS for width in widths)
    seen = {pack([150] * count + [0] * (4096 - count), 4096, 8, widths).shape for count in range(1500, 4097, 99)}
    assert seen == {(512, 8, 192)}  # with many micro-batches the last one's padding is nothing


def episode(rng, prompt, response):
    generated = np.arange(response) % 5 < 3
    return SimpleNamespace(
        prompt=rng.integers(1, 50, prompt).astype(np.int32),
        tokens=rng.integers(1, 50, response).astype(np.int32),
        generated=generated,
        logps=np.where(generated, -rng.random(response), 0.0).astype(np.float32),
    )


def test_the_arrays_hold_every_rollout_once():
    rng = np.random.default_rng(1)
    config = configuration.default()
    config.grpo.minibatch_questions, config.grpo.group_size, config.grpo.microbatch = 2, 4, 4
    config.rollout.max_prompt_tokens = config.rollout.max_response_tokens = 64
    episodes = [episode(rng, int(rng.integers(3, 12)), int(rng.integers(1, 60))) for _ in range(16)]
    episodes[3] = episode(rng, 5, 0)  # its prompt was too long
    trained = np.arange(16) != 9
    rewards, advantages = rng.random(16).astype(np.float32), rng.normal(size=16).astype(np.float32)
    packed = pack_rollouts(config, None, episodes, rewards, advantages, trained)
    assert packed.tokens.shape[0] == 2 and packed.tokens.shape[3] in (64, 128)

    found = {}
    for s, p, r in np.ndindex(packed.tokens.shape[:3]):
        segments = packed.segment_ids[s, p, r]
        real = segments[: np.count_nonzero(segments)]
        assert real.all() and (np.diff(real) >= 0).all()
        for segment in range(1, segments.max() + 1):
            at = s, p, r, segments == segment
            b = next(i for i, e in enumerate(episodes) if np.array_equal(np.concatenate([e.prompt, e.tokens]), packed.tokens[at]))
            own = episodes[b]
            assert b not in found and b // 8 == s
            found[b] = True
            np.testing.assert_array_equal(packed.positions[at], np.arange(len(own.prompt) + len(own.tokens)))
            np.testing.assert_array_equal(packed.mask[at], np.pad(own.generated, (len(own.prompt), 0)))
            np.testing.assert_array_equal(packed.old_logps[at], np.pad(own.logps, (len(own.prompt), 0)))
            assert set(packed.advantages[at]) == {advantages[b]} and set(packed.rewards[at]) == {rewards[b]}
    assert sorted(found) == [b for b in range(16) if b not in (3, 9)]

    real = sum(len(episodes[b].prompt) + len(episodes[b].tokens) for b in found)
    used = [part for part in packed.segment_ids.reshape(-1, *packed.tokens.shape[2:]) if part.any()]
    assert packing_fill(packed) == real / np.size(used)
    nothing = pack_rollouts(config, None, episodes, rewards, advantages, np.zeros(16, bool))
    assert not nothing.mask.any() and packing_fill(nothing) == 0.0
    alone = lay_out(Packing((((0,), (9,)),), (1, 2, 64)), episodes, rewards, advantages, trained)
    assert not alone.mask[0, 0, 1].any() and alone.segment_ids[0, 0, 1].any()
