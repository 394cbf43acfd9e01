"""Whole runs in this process: training in full, a method without a retriever update, the best checkpoint, several devices."""

import contextlib
import itertools
import json
import os
import random
import re
import shutil
import socket
import subprocess
import sys
import threading
import time

import jax
import numpy as np
import pytest
import tiny_run
from safetensors.numpy import load_file, save_file

from bridge_jax import ask, evaluate, train
from bridge_jax import config as configuration
from bridge_jax.errors import Outage
from bridge_jax.evaluation import run as evaluation_run
from bridge_jax.models import e5, qwen2
from bridge_jax.models.lora import load_peft
from bridge_jax.retrieval import client as clients
from bridge_jax.retrieval.index import build_index
from bridge_jax.retrieval.retriever import RetrievalFault, Retriever
from bridge_jax.retrieval.serving import open_parts
from bridge_jax.training.checkpoints import Checkpoints
from bridge_jax.training.loop import _refuse_lost_checkpoints
from bridge_jax.training.metrics import read_metrics
from bridge_jax.training.session import open_session
from bridge_jax.training.workdir import exclusive, written_field
from tests.retrieval.conftest import running


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    folder = tmp_path_factory.mktemp("world")
    tiny_run.write_world(folder)
    return folder


@pytest.fixture(autouse=True)
def cache(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("BRIDGE_JAX_CACHE", str(tmp_path_factory.getbasetemp() / "loop-cache"))


@pytest.fixture
def mad_clock(monkeypatch):
    """The machine's clock is set forward and back, by a day or a year, whenever it is looked at."""
    real, jumps = (time.time, time.time_ns), random.Random(0)

    def jump():
        return jumps.choice((-1, 1)) * jumps.choice((60, 86_400, 31_536_000))

    monkeypatch.setattr(time, "time", lambda: real[0]() + jump())
    monkeypatch.setattr(time, "time_ns", lambda: real[1]() + jump() * 10**9)


def run(world, workdir, *overrides):
    assert train.main([f"--config={world / 'config.py'}", f"--workdir={workdir}", *overrides]) == 0
    rows = read_metrics(workdir / "metrics.jsonl")
    assert not tiny_run.undocumented(rows)
    return rows


def test_vt_search_in_full_moves_the_policy_alone(world, tmp_path, capsys):
    settings = ("method.name=vt_search", "policy.trainable=full", "train.steps=4", "train.log_rollouts_every=3")
    rows = run(world, tmp_path, *(f"--config.{setting}" for setting in settings))
    [done] = [line for line in capsys.readouterr().err.splitlines() if line.startswith("done: ")]
    assert f"policy in {tmp_path / 'policy'}, the retriever is {world / 'encoder'} as it was, metrics in" in done
    assert [path.name for path in sorted((tmp_path / "rollouts").iterdir())] == ["step_000003.jsonl", "step_000004.jsonl"]
    assert any(row["policy/grad_norm"] > 0 for row in rows)
    assert all(0 < row["policy/packing_fill"] <= 1 for row in rows)
    assert not any(name.startswith(("retriever/", "credit/")) for row in rows for name in row)
    start, end = (load_file(folder / "policy" / "model.safetensors") for folder in (world, tmp_path))
    assert start.keys() == end.keys()
    assert any(np.abs(start[name] - end[name]).max() > 1e-4 for name in start)
    lora, _ = load_peft(tmp_path / "retriever")
    assert all(not np.asarray(factors["b"]).any() for factors in lora["layers"].values())


def test_bridge_exports_what_its_last_checkpoint_holds(world, tmp_path, mad_clock, capsys):
    rows = run(world, tmp_path)
    for row in rows:
        assert not {name: value for name, value in row.items() if name.startswith(("time/", "goodput/")) and not 0 <= value < 1000}
        assert sum(row[f"goodput/{name}"] for name in ("compile", "evaluation", "useful")) < 1.2
    said = re.findall(r"ETA (\d+):", capsys.readouterr().err)
    assert len(said) >= 6 and set(said) == {"0"}  # hours
    assert rows[0]["gap/logp_max"] < 1e-5
    assert all(row["rollout/prefill_ratio"] == 1.0 for row in rows)
    assert rows[-1]["rollout/compilations"] == 0

    config = configuration.load(world / "config.py")
    session = open_session(config, tmp_path, "latest")
    assert session.step == 6
    tokens = np.arange(12, dtype=np.int32)[None]
    logits = session.assets.policy.apply(session.policy_variables, tokens)
    exported, params = qwen2.load(tmp_path / "policy")
    np.testing.assert_allclose(exported.apply({"params": params}, tokens), logits, atol=1e-5)
    lora, settings = load_peft(tmp_path / "retriever")
    encoder = e5.load(config.retriever.encoder, lora=settings, max_length=config.retriever.max_length)
    text = ["who lives in rome ?"]
    adapted = e5.embed(session.assets.encoder, text, lora=session.retriever_lora)
    np.testing.assert_allclose(e5.embed(encoder, text, lora=lora), adapted, atol=1e-6)
    assert np.abs(e5.embed(encoder, text) - adapted).max() > 1e-4


def test_credit_through_the_next_action_in_a_run(world, tmp_path):
    """Counts add up, the log says what each turn was credited by, and rows of one kind of turn follow the setting."""
    overrides = ["credit.target=next_action", "credit.no_span=zero", "credit.max_turns=32", "credit.turns_per_batch=15"]
    overrides += ["grpo.group_size=16", "train.steps=2", "train.eval_every=0"]
    rows = run(world, tmp_path, *(f"--config.{override}" for override in overrides))
    kinds, logged = [], sorted((tmp_path / "rollouts").iterdir())
    for row, path in zip(rows, logged, strict=True):
        turns = [turn for line in path.read_text().splitlines() for turn in json.loads(line)["turns"]]
        kinds += [turn["credit"] for turn in turns]
        chosen = [turn for turn in turns if turn["credit"]]
        assert len(chosen) == row["credit/turns"]
        assert sum(turn["credit"] == "next_action" for turn in chosen) == row["credit/next_action_turns"]
        assert row["credit/own_span"] + row["credit/sibling_span"] == row["credit/next_action_turns"]
        assert sum(not turn["scored"] for turn in chosen) == row["credit/masked_turns"]
        assert all((turn["span"] is not None) == (turn["credit"] == "next_action") for turn in turns)
        assert row["credit/turns"] == 0 or {"credit/weight_max_p", "credit/gold_in_candidates"} <= row.keys()
    assert {"answer", "masked"} <= set(kinds)


def test_best_checkpoint_outlives_newer_ones(world, tmp_path):
    """Scores 0.2, 0.9, 0.1 and then unscored steps: the best and the two latest stay, and each restores to its own values."""
    from bridge_jax.objectives.bilevel import BridgeState

    def state(step):
        tree = {"x": jax.numpy.full(3, float(step))}
        return BridgeState(jax.numpy.int32(step), tree, {"m": tree}, tree, {"m": tree}, jax.random.key(0))

    checkpoints = Checkpoints(tmp_path / "checkpoints", keep=2, fingerprint={"policy": "a"})
    for step, score in ((1, 0.2), (2, 0.9), (3, 0.1), (4, None), (5, None)):
        checkpoints.save(step, state(step), score)
    checkpoints.wait()
    assert (checkpoints.best(), checkpoints.latest()) == (2, 5)
    assert sorted(int(path.name) for path in (tmp_path / "checkpoints").iterdir() if path.name.isdigit()) == [2, 4, 5]
    for step in (2, 5):
        assert float(checkpoints.restore(step, state(0)).retriever_opt["m"]["x"][1]) == step
    other = Checkpoints(tmp_path / "checkpoints", keep=2, fingerprint={"policy": "b"}, read_only=True)
    with pytest.raises(configuration.UserError, match="policy='a', this run 'b'"):
        other.restore(5, state(0))
    checkpoints.close()


def test_a_checkpoint_is_saved_whatever_the_clock_does(tmp_path, monkeypatch):
    """Each look at the clock finds it a week later: what waits by it, waits no longer."""
    from bridge_jax.objectives.bilevel import BridgeState

    real, looks = time.time, itertools.count()
    tree = {"x": jax.numpy.arange(3.0)}
    state = BridgeState(jax.numpy.int32(1), tree, {"m": tree}, tree, {"m": tree}, jax.random.key(0))
    checkpoints = Checkpoints(tmp_path / "checkpoints", keep=2, fingerprint={})
    monkeypatch.setattr(time, "time", lambda: real() + 604_800 * next(looks))
    checkpoints.save(1, state)
    checkpoints.save(2, state)
    checkpoints.close()
    assert next(looks) > 10
    again = Checkpoints(tmp_path / "checkpoints", keep=2, fingerprint={}, read_only=True)
    assert float(again.restore(2, state).policy["x"][2]) == 2.0


# In full training AdamW makes steps of the rate's size out of gradients that are zero but for rounding: a small rate.
FULL = ["--config.method.name=two_state", "--config.policy.trainable=full", "--config.grpo.lr=1e-5"]


@pytest.mark.parametrize("settings", [[], pytest.param(FULL, marks=pytest.mark.long)], ids=["bridge", "two_state_full"])
def test_four_devices_give_the_numbers_of_one(world, tmp_path, settings):
    """fsdp = 2, tensor = 2 on virtual devices: the same rollouts, losses and gradients; float32 sums in another order."""
    settings = ["--config.train.steps=2", *settings]
    one = run(world, tmp_path / "one", *settings)
    command = [sys.executable, "-m", "bridge_jax.train", f"--config={world / 'config.py'}", f"--workdir={tmp_path / 'four'}"]
    command += [*settings, "--config.mesh.fsdp=2", "--config.mesh.tensor=2"]
    environment = {"XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=4"}
    done = subprocess.run(command, env=os.environ | environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "rematerialization" not in done.stderr
    four = [json.loads(line) for line in (tmp_path / "four" / "metrics.jsonl").read_text().splitlines()]
    skip = (
        "time/",
        "goodput/",
        "memory/",
        "compilations/",
        "rollout/compilations",
        "rollout/tokens_per_second",
        "policy/packing_fill",
    )
    for a, b in zip(one, four, strict=True):
        same = {name for name in a if not name.startswith(skip) and name != "gap/logp_max" and name != "gap/logp_mean"}
        for name in same:
            assert b[name] == pytest.approx(a[name], rel=1e-3, abs=1e-4), name


def test_a_prompt_that_is_too_long_costs_its_own_rollouts_only(world, tmp_path):
    rows = [json.loads(line) for line in (world / "questions.jsonl").read_text().splitlines()]
    rows[0]["question"] = "where was ada born ? " * 20
    (tmp_path / "long.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    steps = run(world, tmp_path / "run", f"--config.data.train={tmp_path / 'long.jsonl'}", "--config.train.steps=5")
    assert sum(row["rollout/context_full"] > 0 for row in steps) == 1
    assert all(np.isfinite(value) for row in steps for value in row.values())


def test_a_step_in_which_nobody_searches(world, tmp_path):
    """All are cut off, so the groups are all equal: advantages are 0, and nothing is divided by their spread."""
    rows = run(world, tmp_path, "--config.rollout.max_new_tokens=1", "--config.train.steps=1")
    assert rows[0]["rollout/searches"] == 0 and rows[0]["credit/turns"] == 0
    assert rows[0]["rollout/truncated"] == rows[0]["reward/zero_advantage_groups"] == 1
    assert all(np.isfinite(value) for value in rows[0].values())
    assert rows[0]["policy/skipped_updates"] == 0 and rows[0]["policy/loss"] == pytest.approx(0, abs=1e-6)


def test_a_run_stops_when_too_many_searches_fail(world, tmp_path, monkeypatch, capsys):
    """In step 2: what step 1 learnt is saved, and nothing of step 2 is kept. A few failures are borne."""
    settings = ("--config.train.steps=2", "--config.train.checkpoint_every=10", "--config.train.eval_every=0")
    search, played = Retriever.search, []

    def failing(self, queries, k, lora=None):
        if len(read_metrics(tmp_path / "run" / "metrics.jsonl")) == 1:
            raise RetrievalFault("no answer from 10.0.0.1")
        played.append(len(queries))
        return search(self, queries, k, lora=lora)

    monkeypatch.setattr(Retriever, "search", failing)
    command = [f"--config={world / 'config.py'}", f"--workdir={tmp_path / 'run'}", *settings]
    assert train.main([*command, "--config.train.max_fault_share=0"]) == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert said.startswith("error: step 2: the search engine failed in ") and "no answer from 10.0.0.1" in said
    assert played and [row["step"] for row in read_metrics(tmp_path / "run" / "metrics.jsonl")] == [1]
    assert (tmp_path / "run" / "checkpoints" / "1").is_dir()
    assert train.main([*command, "--config.train.max_fault_share=1"]) == 0  # as often as it fails
    rows = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert [row["step"] for row in rows] == [1, 2] and rows[1]["rollout/environment_fault"] > 0


def test_an_evaluation_with_an_outage_is_made_up_for(world, tmp_path, monkeypatch, capsys):
    """It writes no number; the step before it is kept."""
    evaluate_sets, away = evaluation_run.evaluate_sets, [False, True]  # before the first step, and after the last

    def maybe(*args, **kwargs):
        if away and away.pop(0):
            raise Outage("evaluating questions: the search engine failed in 3 of 4 questions")
        return evaluate_sets(*args, **kwargs)

    monkeypatch.setattr(evaluation_run, "evaluate_sets", maybe)
    command = [f"--config={world / 'config.py'}", f"--workdir={tmp_path / 'run'}", "--config.train.steps=1"]
    assert train.main(command) == 2
    assert capsys.readouterr().err.splitlines()[-1].startswith("error: evaluating questions: the search engine failed in 3 of 4")
    rows, written = read_metrics(tmp_path / "run" / "metrics.jsonl"), tmp_path / "run" / "eval" / "step_000001.json"
    assert [row["eval/em"] for row in rows] == [None] and not written.exists()
    assert train.main(command) == 0
    made_up = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert len(made_up) == 1 and made_up[0]["eval/em"] == json.loads(written.read_text())["averages"]["overall"]["em"]
    assert "going on after step 1" in capsys.readouterr().err


def test_a_server_that_is_away_in_a_rollout_costs_nothing_but_time(world, tmp_path, monkeypatch, caplog):
    """It ends between two searches of a step and is there again 1.5 s later: no rollout is flagged, and none is another."""
    for name in ("starlette", "uvicorn", "prometheus_client"):
        pytest.importorskip(name)
    from bridge_jax.retrieval.server import Service, make_app

    monkeypatch.setattr(clients, "FIRST_WAIT", 0.02)  # six tries would bridge 0.6 s, the others 5 and more
    build_index(world / "corpus.jsonl", e5.load(world / "encoder", max_length=32), tmp_path / "index", kind="exact")
    service = Service(*open_parts([tmp_path / "index"]))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    search, asked, timers, server = Retriever.search, [], [], contextlib.ExitStack()

    def start():
        server.enter_context(running(make_app(service), port))

    def interrupted(self, queries, k, lora=None):
        asked.append(len(queries))
        if name == "broken" and len(asked) == 2:
            server.close()
            timers.append(threading.Timer(1.5, start))
            timers[0].start()
        return search(self, queries, k, lora=lora)

    monkeypatch.setattr(Retriever, "search", interrupted)
    settings = ("train.steps=1", "train.eval_every=0", "train.max_fault_share=0", "train.log_rollouts_every=1")
    played = []
    start()
    try:
        for name in ("unbroken", "broken"):
            asked.clear()
            overrides = (*settings, f"index.server=http://127.0.0.1:{port}")
            rows = run(world, tmp_path / name, *(f"--config.{override}" for override in overrides))
            assert len(asked) > 2 and rows[0]["rollout/environment_fault"] == 0
            played.append((tiny_run.results(rows), (tmp_path / name / "rollouts" / "step_000001.jsonl").read_bytes()))
    finally:
        for timer in timers:
            timer.join()
        server.close()
    assert re.search(r"/search\?k=6: .*; attempt [3-9] of 14 follows", caplog.text)
    assert played[0] == played[1]


def test_a_checkpoint_is_of_its_base_weights(world, tmp_path, capsys):
    copy = tmp_path / "world"
    tiny_run.write_world(copy)
    run(copy, tmp_path / "run", "--config.train.steps=1")
    path = copy / "policy" / "model.safetensors"
    save_file({name: x + 0.01 for name, x in load_file(path).items()}, path)
    assert evaluate.main([f"--workdir={tmp_path / 'run'}", "--checkpoint=latest"]) == 2
    assert "policy_weights" in capsys.readouterr().err
    assert evaluate.main([f"--config={copy / 'config.py'}", f"--workdir={tmp_path / 'run'}", "--config.policy.lora_rank=2"]) == 2
    assert "policy.lora_rank was 4, now 2" in capsys.readouterr().err


def test_a_finished_run_is_used_and_protected(world, tmp_path, capsys):
    workdir = tmp_path / "run"
    run(world, workdir)
    again = [f"--config={world / 'config.py'}", f"--workdir={workdir}"]
    capsys.readouterr()
    assert ask.main([f"--workdir={workdir}", "where was ada born ?"]) == 0
    assert "where was ada born ?" in capsys.readouterr().out

    with exclusive(workdir):
        assert train.main(again) == 2
    assert "another process" in capsys.readouterr().err

    newest = workdir / "checkpoints" / "6"
    arrays = [path for path in (newest / "policy").rglob("*") if path.is_file() and path.parent.name == "d"]
    whole = {path: path.read_bytes() for path in arrays}
    for path in arrays:
        path.write_bytes(whole[path][:50])
    assert train.main(again) == 2
    error = capsys.readouterr().err.strip().split("\n")[-1]
    assert error.startswith("error: ") and str(newest) in error and "move it away" in error
    for path in arrays:
        path.write_bytes(whole[path])

    before = (workdir / "metrics.jsonl").read_bytes()
    # A newest checkpoint six steps back is what a run that saved every third step may leave, however often the next one saves.
    assert written_field(workdir, "train.checkpoint_every", 0) == 2
    _refuse_lost_checkpoints(workdir, 0, 3)
    shutil.rmtree(workdir / "checkpoints")
    assert train.main(again) == 2
    assert "goes to step 6, but the newest checkpoint is of step 0" in capsys.readouterr().err
    assert (workdir / "metrics.jsonl").read_bytes() == before
    assert len(list((workdir / "rollouts").iterdir())) == 6
