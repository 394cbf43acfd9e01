"""Device programs: drawing, keys, the two-block cache, compaction; against closed forms and one plain forward pass."""

import functools

import jax
import numpy as np
import pytest
import rollout_tiny as tiny

from bridge_jax.rollout import sampler as device
from bridge_jax.rollout.stopping import stop_table

TOKENIZER = tiny.word_tokenizer()
V = len(TOKENIZER) + 3  # padded beyond the tokenizer


@functools.cache
def make_sampler(**fields):
    model, variables = tiny.tiny_model(V, **fields)
    return device.Sampler(model, stop_table(TOKENIZER, V), [1, 2]), model, variables


def prefilled(sampler, variables, prompts, group_size, left, width=64):
    """All prompts at once, in a batch that has no other place."""
    tokens = np.zeros((len(prompts), 8), np.int32)
    for row, prompt in zip(tokens, prompts):
        row[: len(prompt)] = prompt
    ids = np.arange(len(prompts) * group_size, dtype=np.int32)
    lengths = np.asarray([len(prompt) for prompt in prompts], np.int32)
    places = np.arange(len(prompts), dtype=np.int32)
    limit = np.full(len(ids), left, np.int32)
    return sampler.start(variables, tokens, lengths, places, ids, limit, groups=len(prompts), prompt_width=8, width=width)


@pytest.mark.parametrize("tied", [True, False])
def test_greedy_tokens_and_log_probs_equal_a_plain_forward(tied):
    sampler, model, variables = make_sampler(tie_embeddings=tied)
    forward = jax.jit(lambda ids: model.apply(variables, ids))
    prompts = [[5, 6, 7], [9, 8, 7, 6, 5, 4, 3, 10]]
    state = prefilled(sampler, variables, prompts, 2, left=12)
    state, tokens, logps, counts = sampler.decode_chunk(variables, state, jax.random.key(0), 0.0, steps=16)
    assert (state.reason != device.RUNNING).all()
    for row in range(4):
        prompt, written = prompts[row // 2], tokens[row, : counts[row]].tolist()
        ids = np.zeros((1, 24), np.int32)
        ids[0, : len(prompt) + len(written)] = prompt + written
        logits = forward(ids)[0, len(prompt) - 1 :][: len(written)]  # causal: what stands behind does not matter
        assert logits.argmax(-1).tolist() == written
        np.testing.assert_allclose(logps[row, : len(written)], jax.nn.log_softmax(logits).max(-1), atol=1e-5)


def test_chunks_and_stops():
    """Rows stop at tags, at either EOS id or at their limit; chunking changes nothing; stopped rows write nothing more."""
    sampler, _, variables = make_sampler()
    prompts = [[5, 6, 7], [9, 8]]
    results = []
    for steps in (4, 40):
        state = prefilled(sampler, variables, prompts, 16, left=30)
        ids = [[] for _ in range(32)]
        while (state.reason == device.RUNNING).any():
            state, tokens, _, counts = sampler.decode_chunk(variables, state, jax.random.key(3), 1.0, steps=steps)
            for row in range(32):
                ids[row] += tokens[row, : counts[row]].tolist()
        results.append((ids, state.reason.tolist()))
        assert int(state.column) == max(map(len, ids))
        assert int(state.forwarded) == sum(map(len, prompts)) + sum(map(len, ids))
        assert state.private.valid.sum(1).tolist() == [len(row) for row in ids]
    assert results[0] == results[1]
    stops = {i: device.SEARCH for token, i in TOKENIZER.get_vocab().items() if "</search>" in token}
    stops |= {i: device.ANSWER for token, i in TOKENIZER.get_vocab().items() if "</answer>" in token}
    stops |= {1: device.EOS, 2: device.EOS}
    seen = set()
    for row, reason in zip(*results[0]):
        seen.add(reason)
        assert not set(row[:-1]) & set(stops)
        assert reason == stops.get(row[-1], device.LIMIT)
        assert reason != device.LIMIT or len(row) == 30
    assert seen == {device.SEARCH, device.ANSWER, device.EOS, device.LIMIT}


def test_append_and_compact_equal_one_plain_forward():
    """Observations of several lengths, two rows at a time; compaction to narrower and wider blocks in between;
    hidden states against a cache-free forward."""
    sampler, model, variables = make_sampler()
    prompts = [[5, 6, 7], [9, 8, 7, 6, 5]]
    state = prefilled(sampler, variables, prompts, 2, left=3)
    state, tokens, _, counts = sampler.decode_chunk(variables, state, jax.random.key(3), 1.0, steps=3)
    ids = [prompts[row // 2] + tokens[row, : counts[row]].tolist() for row in range(4)]
    for parts, width in (([{0: [4, 5, 6, 7], 2: [8]}, {3: [9, 10]}], 16), ([{2: [6, 7, 8], 0: [3]}, {3: [4, 4, 4, 4]}], 40)):
        stood = state.reason.tolist()
        for part in parts:
            observation, lengths = np.zeros((2, 4), np.int32), np.zeros(2, np.int32)
            rows = np.full(2, 4, np.int32)  # 4: nobody
            for at, (row, observed) in enumerate(part.items()):
                rows[at], observation[at, : len(observed)], lengths[at] = row, observed, len(observed)
                ids[row] += observed
            left, column = np.full(2, 5, np.int32), int(state.column)
            behind = max(int(state.private.valid[row].sum()) for row in part)
            state = sampler.append(variables, state, rows, observation, lengths, left)
            assert int(state.column) == max(column, behind + lengths.max())
        appended = {0, 2, 3}
        assert state.reason.tolist() == [device.RUNNING if row in appended else stood[row] for row in range(4)]
        before = int(state.column)
        state = sampler.compact(state, np.asarray([True, False, True, True]), width=width)
        own = [len(ids[row]) - len(prompts[row // 2]) for row in (0, 2, 3)]
        assert int(state.column) == max(own) <= before
        assert state.private.valid.sum(1).tolist() == [own[0], 0, own[1], own[2]]
        assert state.private.k.shape[2] == state.private.valid.shape[1] == width
    forward = jax.jit(lambda ids: model.apply(variables, ids, output="hidden"))
    for row in (0, 2, 3):
        hidden = forward(np.asarray([ids[row] + [0] * (24 - len(ids[row]))], np.int32))[0, len(ids[row]) - 1]
        np.testing.assert_allclose(state.hidden[row], hidden, atol=1e-5)
        assert int(state.position[row]) == len(ids[row])


def test_a_group_that_enters_forgets_who_was_there():
    """Into the first and last place of three, beside a group under way: the same as alone, for both; nobody enters nowhere."""
    sampler, _, variables = make_sampler()
    prompts, fresh = [[5, 6, 7], [9, 8], [4, 4, 4, 4]], {0: [7, 7, 3, 9, 11], 2: [6]}

    def go_on(state, steps=6):
        state, tokens, logps, counts = sampler.decode_chunk(variables, state, jax.random.key(5), 1.0, steps=steps)
        return state, [(np.asarray(tokens)[row, :n].tolist(), np.asarray(logps)[row, :n]) for row, n in enumerate(counts)]

    def enter(state, places):
        tokens, lengths = np.zeros((3, 8), np.int32), np.zeros(3, np.int32)
        slots, ids, left = np.full(3, 3, np.int32), np.zeros(6, np.int32), np.zeros(6, np.int32)
        for n, place in enumerate(places):
            tokens[n, : len(fresh[place])], lengths[n], slots[n] = fresh[place], len(fresh[place]), place
            ids[2 * n : 2 * n + 2], left[2 * n : 2 * n + 2] = [100 + place, 200 + place], 9
        return sampler.enter(variables, state, tokens, lengths, slots, ids, left)

    _, middle = go_on(go_on(prefilled(sampler, variables, prompts, 2, left=12), steps=3)[0])
    state, _ = go_on(prefilled(sampler, variables, prompts, 2, left=12), steps=3)
    state, together = go_on(enter(state, [2, 0]))
    assert [row for row, _ in together[2:4]] == [row for row, _ in middle[2:4]]
    later, alone = go_on(enter(prefilled(sampler, variables, [[3]] * 3, 2, left=0), [0, 2]))
    for row in (0, 1, 4, 5):
        assert together[row][0] == alone[row][0] and len(alone[row][0])
        np.testing.assert_allclose(together[row][1], alone[row][1], atol=1e-5)
        assert int(state.position[row]) == int(later.position[row]) == len(fresh[row // 2]) + len(alone[row][0])
    assert int(state.private.valid[0].sum()) == len(together[0][0])
    assert int(later.forwarded) == 3 + 6 + sum(len(row) for row, _ in alone)


def test_nothing_compiles_twice():
    model, variables = tiny.tiny_model(V)
    sampler = device.Sampler(model, stop_table(TOKENIZER, V), [1, 2])
    two, one = np.ones(2, np.int32), np.arange(1, dtype=np.int32)
    for _ in range(2):
        state = prefilled(sampler, variables, [[5, 6]], 2, left=3)
        state = sampler.enter(variables, state, np.ones((1, 8), np.int32), one + 8, one, two, two + 2)
        for temperature in (0.0, 1.0):
            state, *_ = sampler.decode_chunk(variables, state, jax.random.key(0), temperature, steps=4)
        for _ in range(2):
            state = sampler.append(variables, state, np.arange(2, dtype=np.int32), np.ones((2, 4), np.int32), two, two)
        for width in (64, 40):
            state = sampler.compact(state, np.ones(2, bool), width=width)
        count = sampler.compilations()
    assert count == 4 + 2 + 2  # empty, enter, decode, append; order and move, for either width


def test_compaction_gives_up_the_old_block():
    """In place at the same width; the keys are gone before the values move at another; what is kept is the same."""
    sampler, _, variables = make_sampler()
    found = []
    for width in (64, 40, 80):
        state, *_ = sampler.decode_chunk(
            variables, prefilled(sampler, variables, [[5, 6, 7]], 4, left=9), jax.random.key(3), 1.0, steps=9
        )
        old = state.private
        where = old.k.unsafe_buffer_pointer()
        state = sampler.compact(state, np.ones(4, bool), width=width)
        assert old.k.is_deleted() and old.v.is_deleted()
        assert (state.private.k.unsafe_buffer_pointer() == where) == (width == 64)
        valid = np.asarray(state.private.valid)
        found.append([np.asarray(x)[:, valid] for x in (state.private.k, state.private.v)])
        assert not np.asarray(state.private.k)[:, :, 64:].any()
    for other in found[1:]:
        np.testing.assert_array_equal(found[0], other)
    layers, block = 8, np.zeros((8, 4, 64, 2, 8), np.float32)
    program = sampler._move_in_place.lower(block, np.zeros((4, 64), np.int32)).compile().memory_analysis()
    assert program.alias_size_in_bytes == block.nbytes
    assert program.temp_size_in_bytes < 2 * block.nbytes / layers
