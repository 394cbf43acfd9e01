"""Who decodes when: groups that leave and enter, rows that are acted on while others decode, searches beside decoding."""

import dataclasses
import threading

import jax
import numpy as np
import pytest
import rollout_tiny as tiny
from rollout_engine import ANSWER, CONFIG, QUERY, WORDS, prompts_of, real_engine, run_real, same

from bridge_jax.data.mini import corpus_path
from bridge_jax.models import e5
from bridge_jax.retrieval.corpus import Corpus
from bridge_jax.retrieval.device_index import DeviceIndex
from bridge_jax.retrieval.retriever import RetrievalFault, Retriever
from bridge_jax.rollout import protocol
from bridge_jax.rollout.episodes import RolloutConfig, RolloutEngine
from bridge_jax.rollout.flight import LEAST_ROWS, a_part, length_buckets, observation_buckets, private_widths


def play(plans, config, retriever=None):
    """One scripted row a question: (episodes, metrics). A prompt is one token, the number of its script."""
    script = np.full((len(plans), 1, 1 + config.max_response_tokens + 64), protocol.encode(WORDS, "the")[0], np.int32)
    for row, plan in zip(script[:, 0], plans):
        row[1 : 1 + len(plan)] = plan
    model = tiny.Scripted(len(WORDS), 1)
    engine = RolloutEngine(model, WORDS, WORDS.all_special_ids, config, retriever or tiny.Retriever(tiny.corpus()))
    prompts = [np.asarray([n], np.int32) for n in range(len(plans))]
    episodes, metrics = engine.run(
        model.variables(script), tiny.questions(len(plans)), prompts=prompts, group_size=1, key=jax.random.key(0), temperature=1.0
    )
    for episode, plan in zip(episodes, plans):
        assert episode.tokens.tolist() == plan[: len(episode.tokens)]
    assert metrics["rollout/prefill_ratio"] == pytest.approx(1.0, abs=1e-12)
    return episodes, metrics


def test_waiting_questions_enter_beside_a_slow_one():
    """While one rollout writes 48 tokens, eight others of 5 pass through the other place, without a step for themselves."""
    slow, fast = protocol.encode(WORDS, "the " * 48), protocol.encode(WORDS, "the " + ANSWER)
    assert len(fast) == 5
    config = dataclasses.replace(CONFIG, max_searches=0, max_new_tokens=48, chunk=3, max_prompt_tokens=1)
    episodes, metrics = play([slow] + [fast] * 8, config)
    assert [episode.status for episode in episodes] == ["truncated"] + ["answered"] * 8
    real = 9 + 48 + 8 * 5
    assert metrics["rollout/padding_ratio"] * real == pytest.approx(9 + 2 * 48)  # every prompt once; 48 steps of 2 rows


def test_a_row_that_searched_goes_on_beside_one_that_writes():
    """Its passages are appended in the middle of the other's generation, which they do not disturb."""
    seen = tiny.Retriever(tiny.corpus()).search(["who founded it"], 8).rows[0][:3]
    passages = [tiny.corpus()[int(row)] for row in seen]
    observation = protocol.render_observation(passages, WORDS, CONFIG.max_observation_tokens).tokens.tolist()
    ask, answer = protocol.encode(WORDS, "the " + QUERY), protocol.encode(WORDS, ANSWER)
    searching = [*ask, *observation, *ask[1:], *observation, *answer]
    slow = protocol.encode(WORDS, "the " * 40)
    config = dataclasses.replace(CONFIG, max_new_tokens=40, chunk=2, max_response_tokens=200, max_prompt_tokens=1)
    episodes, metrics = play([slow, searching], config)
    assert [episode.status for episode in episodes] == ["truncated", "answered"]
    prompts, appended = 2, 2 * 2 * 32  # twice a part of 2 rows, in 32 columns
    assert len(observation) <= 32
    assert metrics["rollout/padding_ratio"] * (2 + 40 + len(searching)) == pytest.approx(prompts + appended + 2 * 40)


def test_tokens_with_refill_are_those_of_one_batch():
    prompts = prompts_of([3, 16, 7, 5, 11, 2, 9, 13])
    together, _ = run_real(prompts, batch_groups=8)
    for changes in ({"batch_groups": 2}, {"batch_groups": 3, "chunk": 1}, {"batch_groups": 2, "chunk": 5, "overlap_search": True}):
        refilled, metrics = run_real(prompts, **changes)
        assert metrics["rollout/prefill_ratio"] == pytest.approx(1.0, abs=1e-12)
        for a, b in zip(together, refilled, strict=True):
            same(a, b)


class Slow(tiny.Retriever):
    def search(self, queries, k, lora=None):
        self.threads = {*getattr(self, "threads", ()), threading.current_thread()}
        return super().search(queries, k, lora)


@pytest.mark.parametrize("overlap", [False, True])
def test_where_searches_run(overlap):
    engine, variables = real_engine(overlap_search=overlap)
    engine.retriever = Slow(tiny.corpus())
    engine.run(variables, tiny.questions(2), prompts=prompts_of([3, 5]), group_size=8, key=jax.random.key(7), temperature=1.0)
    assert (threading.main_thread() in engine.retriever.threads) != overlap


def test_a_fault_beside_decoding():
    ask, answer = protocol.encode(WORDS, "the " + QUERY), protocol.encode(WORDS, "the " + ANSWER)
    config = dataclasses.replace(CONFIG, overlap_search=True)
    episodes, _ = play([ask, answer, ask], config, tiny.Retriever(tiny.corpus(), fail=RetrievalFault))
    assert [episode.status for episode in episodes] == ["environment_fault", "answered", "environment_fault"]
    with pytest.raises(ZeroDivisionError):
        play([ask], config, tiny.Retriever(tiny.corpus(), fail=ZeroDivisionError))


def test_what_a_query_finds_does_not_depend_on_its_company():
    """Real encoder and index, 70 queries of the mini world's own titles: at once, by sevens, alone."""
    encoder = e5.load("mini-encoder", max_length=64)
    opened = Corpus.open(corpus_path())
    corpus = [opened[row] for row in range(300)]
    index = DeviceIndex(e5.embed(encoder, [f"{passage.title} {passage.text}" for passage in corpus], kind="passage"))
    retriever = Retriever(encoder, index, corpus)
    queries = [f"{passage.title} {'of the' * (n % 4)}" for n, passage in enumerate(corpus[:70])]
    at_once = retriever.search(queries, 20)
    for size in (7, 1):
        for at in range(0, 70 if size > 1 else 10, size):
            few = retriever.search(queries[at : at + size], 20)
            np.testing.assert_array_equal(few.rows, at_once.rows[at : at + size])


def test_length_buckets():
    assert length_buckets(100) == (32, 64, 100)
    assert length_buckets(64) == (32, 64)
    assert length_buckets(10) == (10,)


def test_observation_buckets():
    assert observation_buckets(1024) == (256, 512, 768, 1024)
    assert observation_buckets(48) == (32, 36, 48)
    assert observation_buckets(10) == (10,)


def test_parts_split_over_the_mesh():
    assert (a_part(64, 1), a_part(64, 8), a_part(17, 1)) == (4, 8, 2)
    assert (a_part(512, 4), a_part(512, 64), a_part(32, 1, LEAST_ROWS)) == (32, 64, LEAST_ROWS)
    assert a_part(3, 4, LEAST_ROWS) == 3  # never more than there are


def test_private_widths():
    assert private_widths(RolloutConfig(max_response_tokens=4096, max_new_tokens=2048)) == (1024, 2048, 3072, 4096, 4608)
    # A narrow block is not cut further; a response ends with its last generation even where the context is longer.
    assert private_widths(dataclasses.replace(CONFIG, max_response_tokens=500)) == (132, 180)
