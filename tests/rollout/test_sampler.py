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


def prefilled(sampler, variables, prompts, group_size, left, capacity=64):
    width = 8
    tokens = np.zeros((len(prompts), width), np.int32)
    for row, prompt in zip(tokens, prompts):
        row[: len(prompt)] = prompt
    ids = np.arange(len(prompts) * group_size, dtype=np.int32)
    lengths = np.asarray([len(prompt) for prompt in prompts], np.int32)
    return sampler.prefill(variables, tokens, lengths, ids, np.full(len(ids), left, np.int32), capacity=capacity)


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
    """Rows with observations of several lengths, some idle; compaction in between; hidden states against a cache-free forward."""
    sampler, model, variables = make_sampler()
    prompts = [[5, 6, 7], [9, 8, 7, 6, 5]]
    state = prefilled(sampler, variables, prompts, 2, left=3)
    state, tokens, _, counts = sampler.decode_chunk(variables, state, jax.random.key(3), 1.0, steps=3)
    ids = [prompts[row // 2] + tokens[row, : counts[row]].tolist() for row in range(4)]
    for block, compact in (([[4, 5, 6, 7], [], [8], [9, 10]], True), ([[3], [], [6, 7, 8], [4, 4, 4, 4]], False)):
        observation, lengths = np.zeros((4, 4), np.int32), np.asarray([len(row) for row in block], np.int32)
        for row, observed in enumerate(block):
            observation[row, : len(observed)] = observed
            ids[row] += observed
        state = sampler.append(variables, state, observation, lengths, np.where(lengths > 0, 5, 0).astype(np.int32))
        assert state.reason.tolist() == [device.RUNNING if n else device.IDLE for n in lengths]
        if compact:
            before = int(state.column)
            state = sampler.compact(state, np.asarray([True, False, True, True]))
            own = [len(ids[row]) - len(prompts[row // 2]) for row in (0, 2, 3)]
            assert int(state.column) == max(own) <= before
            assert state.private.valid.sum(1).tolist() == [own[0], 0, own[1], own[2]]
    forward = jax.jit(lambda ids: model.apply(variables, ids, output="hidden"))
    for row in (0, 2, 3):
        hidden = forward(np.asarray([ids[row] + [0] * (24 - len(ids[row]))], np.int32))[0, len(ids[row]) - 1]
        np.testing.assert_allclose(state.hidden[row], hidden, atol=1e-5)
        assert int(state.position[row]) == len(ids[row])


def test_nothing_compiles_twice():
    model, variables = tiny.tiny_model(V)
    sampler = device.Sampler(model, stop_table(TOKENIZER, V), [1, 2])
    for _ in range(2):
        state = prefilled(sampler, variables, [[5, 6]], 2, left=3)
        for temperature in (0.0, 1.0):
            state, *_ = sampler.decode_chunk(variables, state, jax.random.key(0), temperature, steps=4)
        state = sampler.append(variables, state, np.ones((2, 4), np.int32), np.ones(2, np.int32), np.ones(2, np.int32))
        state = sampler.compact(state, np.ones(2, bool))
        count = sampler.compilations()
    assert count == 4
