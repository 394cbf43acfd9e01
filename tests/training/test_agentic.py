"""Agentic-R's rounds: stages that go on where they were killed, an encoder that trains, and runs that change their retriever.

What plays and judges is scripted here; the engine's part is in tests/rollout/test_openings.py. `benchmarks/agentic_kill.py` kills
real runs with SIGKILL in every stage.
"""

import dataclasses
import json
import types
import zlib

import numpy as np
import pytest
import tiny_run

from bridge_jax import config as configuration
from bridge_jax import train
from bridge_jax.data.qa import load_questions
from bridge_jax.endpoint import Reply
from bridge_jax.errors import UserError
from bridge_jax.models import e5
from bridge_jax.rollout.episodes import Episode, Turn
from bridge_jax.training import agentic, encoder_training
from bridge_jax.training.assets import load_assets, separator
from bridge_jax.training.blocks import read_rows, summary
from bridge_jax.training.metrics import read_metrics
from bridge_jax.training.relevance import Local
from bridge_jax.training.session import claim, open_session

FIELDS = {
    "train__steps": 2, "train__eval_every": 0, "train__checkpoint_every": 1, "agentic__questions": 10, "agentic__candidates": 6,
    "agentic__negatives": 3, "agentic__batch": 4, "agentic__microbatch": 2, "agentic__lr": 1e-2, "agentic__temperature": 0.1,
}  # fmt: skip


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    folder = tmp_path_factory.mktemp("world")
    tiny_run.write_world(folder, **FIELDS)
    return folder


@pytest.fixture(autouse=True)
def cache(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("BRIDGE_JAX_CACHE", str(tmp_path_factory.getbasetemp() / "agentic-cache"))


@pytest.fixture
def assets(world):
    config = configuration.load(world / "config.py", ["method.name=agentic_r"])
    return load_assets(config, world)


REAL_RELEVANCE = agentic._Round._relevance  # `scripted` puts another one in its place


class Killed(BaseException):
    """Nothing is written, cleaned or caught after it."""


class Script:
    """In the engine's place: an episode of one or two searches a question; what goes on is right after passages of even tokens."""

    calls = 0
    die_at = None

    def __init__(self, config):
        self.config = config

    @staticmethod
    def tick():
        Script.calls += 1
        if Script.calls == Script.die_at:
            raise Killed

    def play(self, variables, questions, *, prompts, group_size, openings=None, **settings):
        self.tick()
        if openings is None:
            return types.SimpleNamespace(episodes=[self._whole(*one) for one in zip(questions, prompts, strict=True)])
        assert all(len(opening.observations) == group_size == 6 for opening in openings)
        went = [
            self._end(question, prompt, opening.generations, seen)
            for question, prompt, opening in zip(questions, prompts, openings, strict=True)
            for seen in opening.observations
        ]
        return types.SimpleNamespace(episodes=went)

    def _whole(self, question, prompt):
        rng = np.random.default_rng(zlib.crc32(question.question.encode()))
        searches = 1 + int(rng.integers(2))
        generated = np.array([*[1, 1, 1, 1, 0, 0, 0] * searches, 1, 1], bool)
        trace = [("generated", "<search>"), ("information", "x")] * searches + [("generated", "<answer>")]
        turns = []
        for n in range(searches):
            rows = rng.permutation(30)[:6].astype(np.int32)
            rows[5] = -1 if n else rows[5]
            turns.append(Turn(f"query {n}", 7 * n + 4, rows, -np.arange(6, dtype=np.float32), 3, (7 * n + 4, 7 * n + 7)))
        tokens = np.arange(len(generated), dtype=np.int32)
        logps = np.zeros(len(generated), np.float32)
        return Episode(question, 0, 0, np.asarray(prompt), tokens, generated, logps, turns, "answered", "rome", trace)

    @staticmethod
    def _end(question, history, generations, seen):
        assert history[-1] == {1: 3, 2: 10}[generations]  # the prompt ends with the search that is gone on from
        right = question.golds[0] if int(seen.sum()) % 2 == 0 else "nowhere at all"
        none = np.zeros(0, np.int32)
        return Episode(question, 0, 0, history, none, none > 0, none, [], "answered", right, [])


def relevance(asked):
    Script.tick()
    scores = [[int(row) * 37 % 101 for row in one.turn.rows] for one in asked]
    return [Local(None if one.turn.rows[0] % 7 == 0 else found, "hint", 3) for one, found in zip(asked, scores, strict=True)]


@pytest.fixture(autouse=True)
def scripted(monkeypatch):
    monkeypatch.setattr(agentic._Round, "_engine", lambda self, groups, **changes: Script(self.assets.engine.config))
    monkeypatch.setattr(agentic._Round, "_relevance", lambda self: (relevance, True))
    monkeypatch.setattr(agentic, "BLOCKS", 1)
    Script.calls, Script.die_at = 0, None


def contents(folder):
    """Every file but what a clock says, and the index's lock."""
    found = {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}
    summary = json.loads(found.pop("summary.json"))
    manifest = json.loads(found.pop("index/manifest.json"))
    for stage in summary.values():
        stage.pop("seconds")
    return found, summary, {name: value for name, value in manifest.items() if name not in ("corpus_path", "encoder_name")}


def test_a_round_goes_on_wherever_it_was_killed(assets, tmp_path, monkeypatch):
    config = assets.config
    questions = load_questions(config.data.train[0])

    def prepare(name):
        return agentic.prepare(config, tmp_path / name, 1, assets, {}, questions)

    found, metrics = prepare("whole")
    unbroken, folder = Script.calls, tmp_path / "whole" / "agentic_r" / "round_1"
    assert {path.name for path in folder.iterdir()} == {
        "trajectories.jsonl", "candidates.jsonl", "local.jsonl", "global.jsonl", "pairs.jsonl", "summary.json", "encoder_training",
        "retriever", "index",
    }  # fmt: skip

    often = encoder_training.EncoderConfig
    monkeypatch.setattr(agentic, "EncoderConfig", lambda **fields: often(**fields, checkpoint_seconds=0.0))
    steps, real = [], encoder_training.pack

    def pack(*args):
        if len(steps) == 2:
            steps.append("killed")
            raise Killed
        steps.append("done")
        return real(*args)

    monkeypatch.setattr(encoder_training, "pack", pack)
    kills = 0
    while True:
        Script.calls, Script.die_at = 0, 3  # two blocks, and half of a third one
        try:
            again, counted = prepare("killed")
            break
        except Killed:
            kills += 1
    assert kills > 5 and kills >= unbroken // 2 and "killed" in steps
    assert contents(tmp_path / "killed" / "agentic_r" / "round_1") == contents(folder)
    assert len(steps) == 1 + metrics["agentic/encoder_training/steps"], "steps before the kill were not done again"
    assert {k: v for k, v in counted.items() if not k.startswith("time/")} == {
        k: v for k, v in metrics.items() if not k.startswith("time/")
    }
    Script.calls, Script.die_at = 0, 1
    prepare("killed")  # nothing is left to play, or to train
    assert len(steps) == 1 + metrics["agentic/encoder_training/steps"]
    assert again.encoder.fingerprint == found.encoder.fingerprint != assets.encoder.fingerprint


def test_what_a_round_writes_and_counts(assets, tmp_path):
    config = assets.config
    found, metrics = agentic.prepare(config, tmp_path, 1, assets, {}, load_questions(config.data.train[0]))
    folder = tmp_path / "agentic_r" / "round_1"
    rows = {
        name: [json.loads(line) for line in (folder / f"{name}.jsonl").read_text().splitlines()]
        for name in ("trajectories", "candidates", "local", "global", "pairs")
    }
    turns = len(rows["candidates"])
    assert turns == sum(len(row["turns"]) for row in rows["trajectories"]) == len(rows["local"]) == len(rows["global"])
    assert {len(row["rows"]) for row in rows["candidates"]} == {5, 6}  # what the index did not find is no candidate
    assert metrics["agentic/global/completions"] == sum(len(row["rows"]) for row in rows["candidates"])
    assert metrics["agentic/local/judge_calls"] == 3 * turns
    assert metrics["agentic/local/unread"] == sum(row["scores"] is None for row in rows["local"]) > 0
    dropped = sum(metrics[f"agentic/pairs/{name}"] for name in agentic.DROPPED)
    assert len(rows["pairs"]) + dropped == turns and metrics["agentic/pairs/rows"] == len(rows["pairs"])
    assert metrics["agentic/encoder_training/pairs"] == metrics["agentic/pairs/positives"]
    assert metrics["agentic/encoder_training/loss_last_epoch"] < metrics["agentic/encoder_training/loss_first"]
    for row in rows["pairs"]:
        question, query = row["query"].split(separator(assets.encoder))
        assert question == rows["trajectories"][row["trajectory"]]["question"] and query.startswith("query ")
        assert not {*row["positives"]} & {*row["negatives"]} and len(row["negatives"]) <= 3
    assert set(metrics) >= {f"time/agentic/{name}" for name in agentic.STAGES}
    # What is searched with from now on is what was trained: both of its towers, and the question before the query.
    assert found.engine.config.question_separator == " [SEP] " and assets.engine.config.question_separator == ""
    vectors = e5.embed(found.encoder, [assets.corpus.contents(row) for row in range(5)], kind="passage")
    np.testing.assert_allclose(found.index.vectors(np.arange(5)), vectors, atol=1e-2)
    assert np.abs(assets.index.vectors(np.arange(5)) - vectors).max() > 0.05


def test_nothing_to_learn_from_is_said(assets, tmp_path, monkeypatch, caplog):
    found = Local(None, "hint", 3, 2, ("well, <it> depends", "no"), 50, 5)
    monkeypatch.setattr(agentic._Round, "_relevance", lambda self: (lambda asked: [found] * len(asked), True))
    for _ in range(2):  # nothing is judged again
        with pytest.raises(UserError, match=r"none of \d+ searches teaches the retriever.*dropped_unread.*local.jsonl has what"):
            agentic.prepare(assets.config, tmp_path, 1, assets, {}, load_questions(assets.config.data.train[0]))
        monkeypatch.setattr(agentic._Round, "_relevance", lambda self: (None, True))
    facts = summary(tmp_path / "agentic_r" / "round_1")["local"]
    turns = facts["rows"]
    assert {name: facts[name] / turns for name in facts if name not in ("seconds", "rows")} == {
        "judge_calls": 3, "judge_prompt_tokens": 50, "judge_tokens": 5, "lists": 2, "unread_lists": 2, "unread": 1
    }  # fmt: skip
    said = f"{2 * turns} of the judge's {2 * turns} replies hold no scores that can be read (the first one: 'well, <it> depends')"
    assert said in caplog.text
    rows = read_rows(tmp_path / "agentic_r" / "round_1" / "local.jsonl")
    assert rows[0] == {"scores": None, "sub_answer": "hint", "unread": ["well, <it> depends", "no"]}


def test_an_agent_that_never_searches_is_said(assets, tmp_path, monkeypatch):
    found = Script._whole

    def whole(self, question, prompt):
        episode = found(self, question, prompt)
        return dataclasses.replace(episode, turns=[])

    monkeypatch.setattr(Script, "_whole", whole)
    with pytest.raises(UserError, match=r"none of 0 searches teaches .*no search.*a warm start"):
        agentic.prepare(assets.config, tmp_path, 1, assets, {}, load_questions(assets.config.data.train[0]))


def test_a_judge_may_move_and_not_become_another_one(assets, tmp_path):
    config = assets.config.copy_and_resolve_references().unlock()
    for judge in ("http://one:1/v1", "http://two:2/v1"):
        config.agentic.update({"judge": judge, "judge_model": "big"})
        claim(config, tmp_path)
    config.agentic.judge_model = "small"
    with pytest.raises(UserError, match=r"agentic.judge_model was 'big'"):
        claim(config, tmp_path)
    config.agentic.update({"judge": "policy", "judge_model": "big"})
    with pytest.raises(UserError, match=r"agentic.judge was 'http://two:2/v1'"):
        claim(config, tmp_path)


def test_an_endpoint_is_asked_once_by_one_process(assets, tmp_path, monkeypatch):
    """Through the real client's interface: three calls a turn of up to twenty candidates."""
    made = []

    class Endpoint:
        def __init__(self, url, model, *, key, cache):
            self.url, self.model, self.concurrency, self.asked = url, model, 2, []
            made.append((url, model, key, cache))

        def complete_many(self, asked):
            self.asked += asked
            return [Reply("<scores> 80, 20, 20, 20, 20, 20", "stop", 30, 3) for _ in asked]

    monkeypatch.setattr(agentic, "Endpoint", Endpoint)
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    config = assets.config.copy_and_resolve_references().unlock()
    config.agentic.update({"judge": "http://localhost:1/v1", "judge_model": "big"})
    this = agentic._Round(config, 1, tmp_path, assets, {})
    ask, everywhere = REAL_RELEVANCE(this)
    episode = Script(None)._whole(load_questions(config.data.train[0])[0], [1])
    candidate = {"history": 4, "generations": 1, "query": "query 0", "rows": [3, 4, 5, 6, 7, 8], "scores": [0.0] * 6}
    [found] = ask([agentic._to_judge(candidate, agentic._trajectory_row(0, episode))])
    assert found == Local([80, 20, 20, 20, 20, 20], "Not Sure", 2, 1, (), 60, 6) and not everywhere
    assert made == [("http://localhost:1/v1", "big", "secret", tmp_path / "judge.requests.jsonl")]


def test_a_run_changes_its_retriever_between_rounds(world, tmp_path):
    assert train.main([f"--config={world / 'config.py'}", f"--workdir={tmp_path}", "--config.method.name=agentic_r"]) == 0
    rows = read_metrics(tmp_path / "metrics.jsonl")
    assert [(row["step"], row["stage"]) for row in rows] == [(1, 1), (2, 2)]
    assert all(row["agentic/pairs/positives"] > 0 for row in rows)
    assert not tiny_run.undocumented(rows)
    assert rows[0]["epoch"] < rows[1]["epoch"]  # the second round goes on with the questions
    assert {path.name for path in (tmp_path / "eval").iterdir()} == {f"step_{n:06d}.json" for n in (0, 1, 2)}

    config = configuration.load(world / "config.py", ["method.name=agentic_r"])
    start, end = (open_session(config, tmp_path, which).assets for which in ("start", "latest"))
    first, second = (tmp_path / "agentic_r" / f"round_{n}" / "retriever" for n in (1, 2))
    weights = [(folder / "model.safetensors").read_bytes() for folder in (first, second, tmp_path / "retriever")]
    assert weights[0] != weights[1] == weights[2]
    assert end.encoder.fingerprint == e5.load(second, max_length=32).fingerprint != start.encoder.fingerprint
    assert end.engine.config.question_separator and not start.engine.config.question_separator
    saved = json.loads((tmp_path / "checkpoints" / "2" / "metadata" / "metadata").read_text())
    assert saved["encoder"] == end.encoder.fingerprint[:16]
