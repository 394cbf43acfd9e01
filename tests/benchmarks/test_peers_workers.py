"""Our workers do what the peers' do: greedy tokens and the first loss against torch; the arrays that peers get."""

import dataclasses
import importlib

import compare
import numpy as np
import peer_models
import pytest
import torch
from peers import step_inputs
from transformers import AutoModelForCausalLM

LOSS = {"lr": 1e-6, "epsilon": 0.2, "dual_clip": 3.0, "grad_clip": 1.0}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    small = {"hidden_size": 64, "intermediate_size": 96, "num_layers": 2, "num_heads": 4, "head_dim": 16}
    config = dataclasses.replace(peer_models.random_config(512), **small)
    return str(peer_models.write_random(tmp_path_factory.mktemp("model"), config, seed=0))


@pytest.fixture
def worker(monkeypatch):
    """A worker's `setup`, with the memory it notes."""
    monkeypatch.syspath_prepend(str(compare.WORKERS))

    def load(name):
        memory = importlib.import_module("serve").Memory()
        return lambda job: importlib.import_module(name).setup(job, memory)

    return load


def test_greedy_tokens_are_those_of_generate(folder, worker):
    prompts = np.random.default_rng(0).integers(1, 512, (2, 9)).tolist()
    job = {"folder": folder, "prompts": prompts, "group_size": 2, "new_tokens": 40, "temperature": 0.0, "seed": 0}
    mine = worker("ours_rollout")(job)[1]["tokens"]
    assert np.shape(mine) == (4, 40) and len(set(mine[0])) > 10  # more than one chunk; and no repetition of one token
    alone = {**job, "group_size": 1}  # `generate` returns several sequences of a prompt only when it samples
    assert mine[::2] == worker("hf_rollout")(alone)[1]["tokens"]


def test_the_first_loss_is_the_clipped_token_mean(folder, worker, tmp_path):
    rollouts = step_inputs.ragged(np.random.default_rng(1), 512, 1, 6)
    step_inputs.write(tmp_path / "inputs.npz", rollouts)
    update, ready = worker("ours_step")({"folder": folder, "inputs": str(tmp_path / "inputs.npz"), **LOSS})
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    terms = []
    for rollout in rollouts:
        ids = torch.tensor(np.concatenate([rollout.prompt, rollout.tokens])).long()
        logps = torch.log_softmax(model(ids[None]).logits[0, :-1], -1)[torch.arange(len(ids) - 1), ids[1:]]
        own = torch.tensor(rollout.generated)
        ratio = torch.exp(logps[len(rollout.prompt) - 1 :][own] - torch.tensor(rollout.logps)[own])
        loss = torch.maximum(-ratio * rollout.advantage, -ratio.clamp(0.8, 1.2) * rollout.advantage)
        terms.append(loss.clamp(max=-3 * rollout.advantage) if rollout.advantage < 0 else loss)
    loss = torch.cat(terms).mean()
    loss.backward()
    norm = torch.sqrt(sum((p.grad**2).sum() for p in model.parameters()))
    assert ready["loss"] == pytest.approx(float(loss.detach()), abs=1e-5)
    assert ready["grad_norm"] == pytest.approx(float(norm), rel=1e-4)
    assert np.isfinite(update()["policy/loss"]) and ready["computed_tokens"] >= sum(len(r.prompt) + len(r.tokens) for r in rollouts)


def test_inputs_are_read_as_they_were_written(tmp_path):
    rollouts = step_inputs.ragged(np.random.default_rng(2), 512, 2, 8)
    step_inputs.write(tmp_path / "inputs.npz", rollouts)
    for before, after in zip(rollouts, step_inputs.read(tmp_path / "inputs.npz"), strict=True):
        assert all(
            np.array_equal(getattr(before, name), getattr(after, name)) for name in ("prompt", "tokens", "generated", "logps")
        )
        assert before.advantage == pytest.approx(after.advantage)
    arrays = step_inputs.padded(rollouts)
    assert (np.diff(arrays["prompt_mask"], axis=1) >= 0).all() and (np.diff(arrays["completion_mask"], axis=1) <= 0).all()
    assert (
        not (arrays["trained"] > arrays["completion_mask"]).any() and 0 < arrays["trained"].sum() < arrays["completion_mask"].sum()
    )


def test_ragged_rollouts_are_as_long_as_said():
    rollouts = step_inputs.ragged(np.random.default_rng(3), 512, 100, 48)
    lengths = np.asarray([len(r.prompt) + len(r.tokens) for r in rollouts])
    assert len(rollouts) == 800 and 0.4 < lengths.mean() / lengths.max() < 0.6
