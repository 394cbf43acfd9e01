"""Supervised training: loss against plain log-softmax, exact accumulation and resume, a trace learnt by heart and replayed."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import two_hop_world
from rich.console import Console

from bridge_jax import warmstart
from bridge_jax.data.prompts import build_prompt
from bridge_jax.errors import UserError
from bridge_jax.training import sft
from bridge_jax.training.metrics import read_metrics

SETTINGS = sft.SFTConfig(epochs=2, batch=4, microbatch=2, lr=3e-3)


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("BRIDGE_JAX_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield two_hop_world.load(tmp_path_factory.mktemp("world"))


@pytest.fixture(scope="module")
def traces(world):
    train, heldout = warmstart.build_traces(world.assets, Console(quiet=True))
    assert (len(train), len(heldout)) == (11, 1)
    return train, heldout


def test_loss_is_the_plain_nll_of_generated_tokens(world, traces):
    model, params = world.assets.policy, world.assets.base_params
    chosen = traces[0][:3]
    total = count = 0.0
    for trace in chosen:  # one sequence at a time, no padding, whole vocabulary
        whole = np.concatenate([trace.prompt, trace.tokens])
        logp = jax.nn.log_softmax(model.apply({"params": params}, jnp.asarray(whole[None])))[0]
        for at in range(len(trace.prompt), len(whole)):
            if trace.generated[at - len(trace.prompt)]:
                total -= float(logp[at - 1, whole[at]])
                count += 1
    loss, number = sft.nll(model, params, sft.pack(chosen, 4, sft.trained_width(chosen)))
    assert float(number) == count == sum(trace.generated.sum() for trace in chosen)
    np.testing.assert_allclose(float(loss), total, rtol=1e-5)


def test_observation_and_prompt_labels_are_never_targets(traces):
    batch = sft.pack(traces[0][:2], 2, sft.trained_width(traces[0]))
    for row, trace in enumerate(traces[0][:2]):
        real = batch.weight[row] > 0
        np.testing.assert_array_equal(batch.targets[row][real], trace.tokens[trace.generated])
        np.testing.assert_array_equal(batch.index[row][real] + 1 - len(trace.prompt), np.flatnonzero(trace.generated))
        assert batch.segment_ids[row].sum() == len(trace.prompt) + len(trace.tokens)
    assert batch.tokens.shape[1] % sft.LENGTH_STEP == 0


def test_microbatches_do_not_change_the_update(world, traces):
    results = []
    for size in (1, 2, 5):
        config = sft.SFTConfig(epochs=1, batch=5, microbatch=size, lr=1e-3)
        trainer = sft.Trainer(world.assets.policy, config, 10)
        state = trainer.start(world.assets.base_params)
        for _ in range(2):  # the first step of a warm-up has a learning rate of 0
            state, metrics = trainer.update(state, sft.microbatches(traces[0][:5], config, sft.trained_width(traces[0])))
        results.append((state.params, metrics))
    for params, metrics in results[1:]:
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5), results[0][0], params)
        np.testing.assert_allclose(metrics["loss"], results[0][1]["loss"], rtol=1e-5)
        np.testing.assert_allclose(metrics["grad_norm"], results[0][1]["grad_norm"], rtol=1e-4)
    moved = jax.tree.map(lambda a, b: float(jnp.abs(a - b).max()), results[0][0], world.assets.base_params)
    assert min(jax.tree.leaves(moved)) > 0  # every parameter is trained


def test_epochs_visit_each_trace_once():
    for epoch in range(3):
        batches = sft.epoch_batches(11, 4, 0, epoch)
        assert sorted(i for batch in batches for i in batch) == list(range(11)) and [len(batch) for batch in batches] == [4, 4, 3]
    assert sft.epoch_batches(11, 4, 0, 0) == sft.epoch_batches(11, 4, 0, 0) != sft.epoch_batches(11, 4, 0, 1)


def test_a_stopped_run_continues_to_the_same_parameters(world, traces, tmp_path, monkeypatch):
    assets = world.assets
    whole, summary = sft.train(assets.policy, assets.base_params, *traces, SETTINGS, tmp_path / "whole")
    assert summary["steps"] == 6 and summary["heldout_after"] < summary["heldout_before"]

    often = sft.SFTConfig(**{**SETTINGS.__dict__, "checkpoint_seconds": 0.0})
    update, calls = sft.Trainer.update, []

    def failing(self, state, batches):
        calls.append(1)
        if len(calls) in (3, 6):
            raise KeyboardInterrupt
        return update(self, state, batches)

    with monkeypatch.context() as patch:
        patch.setattr(sft.Trainer, "update", failing)
        for _ in range(2):
            with pytest.raises(KeyboardInterrupt):
                sft.train(assets.policy, assets.base_params, *traces, often, tmp_path / "cut")
    parts, again = sft.train(assets.policy, assets.base_params, *traces, often, tmp_path / "cut")
    jax.tree.map(np.testing.assert_array_equal, whole, parts)
    assert (again["heldout_before"], again["heldout_after"]) == (summary["heldout_before"], summary["heldout_after"])
    one, two = (read_metrics(tmp_path / name / "warmstart_metrics.jsonl") for name in ("whole", "cut"))
    assert [row["step"] for row in one] == [0, 1, 2, 3, 4, 5, 6, 6] == [row["step"] for row in two]
    assert [row.get("loss") for row in one] == [row.get("loss") for row in two]


def test_a_diverged_loss_stops_with_one_line(world, traces, tmp_path):
    broken = jax.tree.map(lambda x: x * jnp.nan, world.assets.base_params)
    with pytest.raises(UserError, match=r"config\.warmstart\.lr"):
        sft.train(world.assets.policy, broken, *traces, SETTINGS, tmp_path)


def test_a_trace_learnt_by_heart_is_what_the_engine_rolls_out(world, traces):
    """The strongest check of all: after overfitting, greedy decoding through the real engine reproduces traces id for id,
    prompts, retrieved observations, stops and answers included."""
    assets = world.assets
    chosen = [trace for trace in traces[0] if all(turn.found for turn in trace.turns)][:2]
    config = sft.SFTConfig(epochs=1, batch=2, microbatch=2, lr=4e-3, weight_decay=0.0)
    trainer = sft.Trainer(assets.policy, config, 160)
    state = trainer.start(assets.base_params)
    batches = sft.microbatches(chosen, config, sft.trained_width(chosen))
    for _ in range(160):
        state, metrics = trainer.update(state, batches)
        if metrics["loss"] < 0.01:
            break
    questions = [trace.question for trace in chosen]
    prompts = [build_prompt(question, assets.tokenizer, "brief") for question in questions]
    episodes, _ = assets.engine.run(
        {"params": state.params}, questions, prompts=prompts, group_size=1, key=jax.random.key(0), temperature=0.0
    )
    for episode, trace in zip(episodes, chosen, strict=True):
        assert episode.status == "answered" and episode.answer == trace.answer
        np.testing.assert_array_equal(episode.tokens, trace.tokens[:-1])
        np.testing.assert_array_equal(episode.generated, trace.generated[:-1])
        assert [turn.query for turn in episode.turns] == [turn.query for turn in trace.turns]
        assert [turn.observation for turn in episode.turns] == [turn.observation for turn in trace.turns]


# The command ----------------------------------------------------------------------------------------------------------


def test_as_many_traces_are_trained_on_as_the_field_says():
    for trained in (1, 4, 8, 9, 89, 179, 180, 256, 2000):
        built = warmstart.built_for(trained)
        assert built - warmstart.held_out(built) == trained and 1 <= built - trained <= warmstart.HELD_OUT


def test_command_writes_a_hugging_face_folder_once(world, tmp_path, capsys):
    torch = pytest.importorskip("torch")
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from bridge_jax.models import qwen2

    arguments = [f"--config={world.path}", f"--workdir={tmp_path}", "--config.warmstart.questions=4"]
    assert warmstart.main(arguments) == 0
    folder = tmp_path / "warmstart"
    rows = [json.loads(line) for line in (tmp_path / "warmstart_traces.jsonl").read_text().splitlines()]
    assert [row["split"] for row in rows] == ["train"] * 4 + ["heldout"]
    assert not (tmp_path / "warmstart_state").exists() and not (tmp_path / "warmstart.tmp").exists()
    tokens = np.asarray([[5, 17, 300, 42, 9]])
    with torch.no_grad():
        theirs = AutoModelForCausalLM.from_pretrained(folder)(torch.tensor(tokens)).logits.numpy()
    model, params = qwen2.load(folder)
    np.testing.assert_allclose(model.apply({"params": params}, jnp.asarray(tokens)), theirs, atol=2e-4)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer("<search> club </search>")["input_ids"] == world.assets.tokenizer("<search> club </search>")["input_ids"]
    assert qwen2.eos_ids(folder, tokenizer) == world.assets.eos_ids

    before = {
        path: path.stat().st_mtime_ns for path in tmp_path.rglob("*") if path.is_file() and path.name != "warmstart_config.json"
    }
    capsys.readouterr()
    assert warmstart.main(arguments) == 0
    assert "complete" in capsys.readouterr().err
    assert warmstart.main([*arguments, "--config.warmstart.lr=0.5"]) == 2
    error = capsys.readouterr().err.strip()
    assert error.startswith("error: ") and "warmstart.lr" in error and "\n" not in error
    assert before == {path: path.stat().st_mtime_ns for path in before}
    # what the warm start does not depend on may change
    assert warmstart.main([*arguments, "--config.train.steps=7"]) == 0


@pytest.mark.parametrize(
    "flags, named",
    [
        (["--config.warmstart.lrr=1"], "warmstart.lr"),
        (["--config.policy.model=/nowhere"], "/nowhere"),
        (["--config.rollout.max_new_tokens=8"], "max_"),
        (["--config.data.train=/nowhere.jsonl"], "/nowhere.jsonl"),
    ],
)
def test_command_names_what_is_wrong(world, tmp_path, capsys, flags, named):
    assert warmstart.main([f"--config={world.path}", f"--workdir={tmp_path}", *flags]) == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith("error: ") and named in error
    assert not (tmp_path / "warmstart").exists()
