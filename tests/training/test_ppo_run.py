"""Whole runs with PPO in miniature: single rollouts, what is saved, a resume, what stops a run, training in full."""

import jax
import numpy as np
import pytest
import tiny_run

from bridge_jax import config as configuration
from bridge_jax import train
from bridge_jax.training.display import Display
from bridge_jax.training.metrics import read_metrics
from bridge_jax.training.session import open_session

PPO = ("--config.method.name=search_r1", "--config.policy.algorithm=ppo", "--config.grpo.group_size=1")


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    folder = tmp_path_factory.mktemp("world")
    fields = {"train__steps": 4, "train__questions": 8, "grpo__minibatch_questions": 4, "train__eval_every": 0}
    tiny_run.write_world(folder, **fields, ppo__critic_lr=1e-2, ppo__critic_warmup_steps=0, ppo__kl_coef=0.05)
    return folder


@pytest.fixture(autouse=True)
def cache(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("BRIDGE_JAX_CACHE", str(tmp_path_factory.getbasetemp() / "ppo-cache"))


def command(world, workdir, *overrides):
    return [f"--config={world / 'config.py'}", f"--workdir={workdir}", *PPO, *overrides]


def results(workdir):
    rows = read_metrics(workdir / "metrics.jsonl")
    assert not tiny_run.undocumented(rows)
    return tiny_run.results(rows)


@pytest.fixture(scope="module")
def unbroken(world, tmp_path_factory):
    workdir = tmp_path_factory.mktemp("runs") / "unbroken"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("BRIDGE_JAX_CACHE", str(tmp_path_factory.getbasetemp() / "ppo-cache"))
        assert train.main(command(world, workdir)) == 0
    return workdir


def saved(workdir, step, item):
    return {path.relative_to(workdir): path for path in (workdir / "checkpoints" / str(step) / item).rglob("*") if path.is_file()}


def test_single_rollouts_train_policy_and_critic(unbroken):
    rows = results(unbroken)
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    assert 0 < sum(row["reward/mean"] for row in rows) < 4, "the test world must reward some rollouts and not others"
    for row in rows:
        assert row["reward/zero_advantage_groups"] == 1.0  # groups of one: GRPO would learn nothing
        assert row["policy/grad_norm"] > 0 and row["ppo/critic_grad_norm"] > 0
        assert all(np.isfinite(value) for value in row.values())
    assert rows[0]["ppo/explained_variance"] == pytest.approx(0.0, abs=1e-4)  # the first values are all 0
    assert rows[0]["ppo/kl_reward"] == pytest.approx(0.0, abs=1e-6)  # the policy starts as its reference
    assert rows[-1]["ppo/kl_reward"] != 0
    assert not any(name.startswith(("retriever/", "credit/")) for row in rows for name in row)
    assert saved(unbroken, 4, "critic")


def test_the_same_numbers_after_an_interruption(world, unbroken, tmp_path, monkeypatch):
    show = Display.step

    def interrupt(self, number, metrics):
        show(self, number, metrics)
        if number == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(Display, "step", interrupt)
    assert train.main(command(world, tmp_path)) == 130
    assert "They come into this page" in (tmp_path / "report.html").read_text()  # written with the evaluation before the first step
    monkeypatch.setattr(Display, "step", show)
    assert train.main(command(world, tmp_path)) == 0
    assert results(tmp_path) == results(unbroken)
    assert 'data-part="index"' in (tmp_path / "report.html").read_text()
    for file in ("policy_lora/adapter_model.safetensors", "rollouts/step_000004.jsonl"):
        assert (tmp_path / file).read_bytes() == (unbroken / file).read_bytes()


def test_a_critic_that_diverges_stops_the_run(world, tmp_path, capsys):
    overrides = ("--config.ppo.critic_lr=1e38", "--config.train.max_skipped_updates=1")
    assert train.main(command(world, tmp_path, *overrides)) == 2
    assert "config.ppo.critic_lr" in capsys.readouterr().err


def test_in_full_and_reopened(world, tmp_path):
    overrides = ("policy.trainable=full", "train.steps=2", "grpo.group_size=2", "grpo.minibatch_questions=8")
    assert train.main(command(world, tmp_path, *(f"--config.{override}" for override in overrides))) == 0
    rows = results(tmp_path)
    assert all(row["ppo/critic_grad_norm"] > 0 for row in rows)
    config = configuration.load(world / "config.py", [word.removeprefix("--config.") for word in PPO] + list(overrides))
    session = open_session(config, tmp_path, "latest")
    moved = [
        np.abs(a - b).max() for a, b in zip(*map(jax.tree.leaves, (session.policy_variables["params"], session.assets.base_params)))
    ]
    assert session.step == 2 and max(moved) > 0
