"""Each method through the real loop in miniature: what learns when, what the stages share with the methods they are made of."""

import json
import logging
import math
import re

import numpy as np
import pytest
import tiny_run
from safetensors.numpy import load_file

from bridge_jax import config as configuration
from bridge_jax import train
from bridge_jax.errors import UserError
from bridge_jax.models import e5
from bridge_jax.models.lora import load_peft
from bridge_jax.training.assets import rollout_config
from bridge_jax.training.display import Display
from bridge_jax.training.methods import METHODS, stage_ends, stage_of, total_steps
from bridge_jax.training.metrics import read_metrics
from bridge_jax.training.session import open_session
from bridge_jax.training.workdir import claim_workdir

ONE_STEP = ("--config.train.steps=1", "--config.train.eval_every=0")
COUNTS = ("count/policy_updates", "count/retriever_updates", "count/rollouts")


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    folder = tmp_path_factory.mktemp("world")
    tiny_run.write_world(folder, train__steps=3, train__checkpoint_every=2, train__questions=8, credit__max_turns=16)
    return folder


@pytest.fixture(autouse=True)
def cache(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("BRIDGE_JAX_CACHE", str(tmp_path_factory.getbasetemp() / "methods-cache"))


def command(world, workdir, method, *overrides):
    return [f"--config={world / 'config.py'}", f"--workdir={workdir}", f"--config.method.name={method}", *overrides]


@pytest.fixture(scope="module")
def runs(world, tmp_path_factory):
    """method -> (workdir, rows), each run once."""
    folder, done = tmp_path_factory.mktemp("runs"), {}

    def get(method, *overrides):
        if (method, *overrides) not in done:
            workdir = folder / f"{len(done)}_{method}"
            assert train.main(command(world, workdir, method, *overrides)) == 0
            done[method, *overrides] = workdir, results(workdir)
        return done[method, *overrides]

    return get


def results(workdir):
    rows = read_metrics(workdir / "metrics.jsonl")
    assert not tiny_run.undocumented(rows)
    return tiny_run.results(rows)


def exported(workdir, part="policy_lora"):
    return load_file(workdir / part / "adapter_model.safetensors")


def moved(workdir, part):
    """Whether the exported adapter differs from its start, at which B is zero."""
    return any(np.any(x) for name, x in exported(workdir, part).items() if "lora_B" in name)


# --- the table


def test_configuration_and_registry_name_the_same_methods():
    assert set(configuration.METHODS) == set(METHODS)
    for method in METHODS.values():
        assert method.summary and method.trains_retriever == bool(method.use_outcome or method.use_rag or method.distil)
        known = configuration.flatten(configuration.default())
        assert {*method.implied, *method.at_most} <= set(known)


def test_stages_split_a_run():
    config = configuration.default()
    config.train.steps = 3
    assert total_steps(config) == 3 and stage_of(config, 3) == (1, 3)
    config.method.name = "rl_then_rag"
    assert total_steps(config) == 6
    assert [stage_of(config, step) for step in range(1, 7)] == [(1, 1), (1, 2), (1, 3), (2, 1), (2, 2), (2, 3)]


def test_stages_that_divide_the_steps_go_on_with_the_questions():
    config = configuration.default()
    config.train.steps, config.method.name = 20, "r1_searcher"
    assert stage_ends(config) == (4, 20) and [stage_of(config, step) for step in (4, 5, 20)] == [(1, 4), (2, 5), (2, 20)]
    config.train.steps = 2
    assert stage_ends(config) == (1, 2)  # each stage has a step
    config.method.name, config.agentic.rounds, config.train.steps = "agentic_r", 3, 20
    assert stage_ends(config) == (7, 13, 20) and total_steps(config) == 20
    assert [stage_of(config, step) for step in (1, 7, 8, 20)] == [(1, 1), (1, 7), (2, 8), (3, 20)]


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["method.name=r1_searcher", "train.steps=1"], "2 stages"),
        (["method.name=agentic_r", "agentic.rounds=9"], "9 stages"),
        (["method.name=agentic_r", "agentic.judge=gpt"], "likelihood, policy, or an address"),
        (["method.name=agentic_r", "agentic.judge=http://here/v1"], "agentic.judge_model is empty"),
        (["method.name=agentic_r", "agentic.batch=6", "agentic.microbatch=4"], "must divide config.agentic.batch=6"),
        (["method.name=agentic_r", "index.server=http://here"], "indexes the corpus anew"),
        (["method.name=agentic_r", "index.kind=bm25"], "trains an encoder"),
        (["method.name=agentic_r", "agentic.candidates=2"], "config.rollout.shown=3"),
        (["method.name=simple_deep_searcher"], "set it to full"),
        (["method.name=simple_deep_searcher", "policy.trainable=full", "selection.min_searches=6"], "max_searches=5"),
    ],
)
def test_settings_of_comparators_that_contradict(tmp_path, overrides, words):
    with pytest.raises(UserError, match=re.escape(words)):
        configuration.load(tiny_run.write_config(tmp_path), overrides)


def test_search_r1_implies_its_settings_and_an_override_wins(tmp_path, caplog):
    path = tiny_run.write_config(tmp_path, rollout__max_observation_tokens=800, train__questions=4, grpo__minibatch_questions=4)
    with caplog.at_level(logging.INFO, logger="bridge_jax"):
        config = configuration.load(path, ["grpo.group_size=8", "method.name=search_r1", "rollout.max_new_tokens=700"])
    assert (config.rollout.max_searches, config.grpo.group_size, config.grpo.kl_coef) == (4, 8, 1e-3)
    assert (config.rollout.max_new_tokens, config.rollout.max_observation_tokens) == (700, 500)
    (line,) = [record.getMessage() for record in caplog.records]
    assert "search_r1" in line and "rollout.max_searches=4" in line and "group_size" not in line and "max_new_tokens" not in line
    config = configuration.load(path, ["method.name=search_r1"])
    assert (config.grpo.group_size, config.rollout.max_new_tokens) == (5, 24)  # the file's own 24 is below the cap
    assert (config.grpo.minibatch_questions, config.grpo.microbatch) == (2, 2)
    assert config.rollout.max_response_tokens >= 5 * 24 + 4 * 500
    with pytest.raises(UserError, match=re.escape("credit.gamma")):
        configuration.load(path, ["method.name=decoupled_rag", "credit.gamma=0"])


def test_search_r1_at_the_papers_scale_is_the_published_recipe(tmp_path):
    path = tmp_path / "paper.py"
    path.write_text("from bridge_jax.config import default as get_config\n")
    config = configuration.load(path, ["method.name=search_r1", "train.steps=1005"])
    assert (config.grpo.minibatch_questions, config.rollout.max_response_tokens) == (256, 4500)
    assert config.grpo.warmup_steps == round(0.285 * 1005 * 2)  # two updates a step
    assert (config.rollout.max_searches, config.grpo.group_size, config.grpo.kl_coef, config.grpo.lr) == (4, 5, 1e-3, 1e-6)
    assert (config.rollout.max_new_tokens, config.rollout.max_observation_tokens, config.rollout.max_prompt_tokens) == (
        500,
        500,
        4096,
    )
    assert config.rollout.retry_invalid and config.rollout.cut_inside and rollout_config(config).retry_invalid
    config = configuration.load(path, ["method.name=search_r1", "policy.algorithm=ppo", "train.steps=1005"])
    ppo = config.ppo
    assert (ppo.kl_coef, ppo.critic_lr, ppo.gae_lambda, ppo.discount) == (1e-3, 1e-5, 1.0, 1.0)
    assert ppo.critic_warmup_steps == round(0.015 * 1005 * 2)


def test_a_written_configuration_is_not_implied_again(tmp_path):
    """What a run folder says is complete: evaluating it must not bring the implied values back over an override."""
    config = configuration.load(tiny_run.write_config(tmp_path), ["method.name=search_r1", "grpo.group_size=4"])
    claim_workdir(config, tmp_path)
    from bridge_jax.evaluation import cli

    fields = cli.workdir_fields(tmp_path)
    again = configuration.load(cli.__file__, [f"{name}={text}" for name, text in fields.items()])
    assert configuration.flatten(again) == configuration.flatten(config)


# --- runs


@pytest.mark.parametrize(
    ("method", "terms"), [("bridge", True), ("decoupled_rl", True), ("decoupled_rag", True), ("vt_search", False)]
)
def test_online_methods_in_one_stage(runs, method, terms):
    workdir, rows = runs(method)
    assert [(row["step"], row["stage"]) for row in rows] == [(1, 1), (2, 1), (3, 1)]
    assert [tuple(row[name] for name in COUNTS) for row in rows] == [(n, n if terms else 0, 32 * n) for n in (1, 2, 3)]
    assert moved(workdir, "policy_lora")
    assert moved(workdir, "retriever") == terms


def test_decoupled_losses_are_the_parts_of_bridge(runs):
    """On the first step all see the same rollouts: L_eta = J_ret + gamma L_RAG."""
    first = {method: runs(method)[1][0] for method in ("bridge", "decoupled_rl", "decoupled_rag")}
    assert len({row["reward/mean"] for row in first.values()}) == 1
    update = {method: row["retriever/loss"] for method, row in first.items()}
    # one minibatch of 4 turns is followed by another, whose retriever has moved: equal up to that
    assert update["bridge"] == pytest.approx(update["decoupled_rl"] + update["decoupled_rag"], rel=2e-2)
    assert first["decoupled_rag"]["retriever/loss"] == pytest.approx(first["decoupled_rag"]["retriever/rag_nll"], rel=1e-5)


def test_replug_learns_from_the_likelihoods_alone(runs):
    """On the first step bridge's rollouts; the loss is the divergence, whatever the outcome, and the policy learns beside it."""
    (_, (bridge, *_)), (workdir, (row,)) = runs("bridge"), runs("replug", *ONE_STEP)
    assert row["reward/mean"] == bridge["reward/mean"] and row["credit/turns"] == bridge["credit/turns"] > 0
    assert row["retriever/loss"] == pytest.approx(row["retriever/distil_kl"], rel=1e-6) and row["retriever/distil_kl"] > 0
    assert row["policy/loss"] == pytest.approx(bridge["policy/loss"], rel=1e-3, abs=1e-6)
    assert moved(workdir, "policy_lora") and moved(workdir, "retriever")


def test_a_decoder_as_query_tower(world, tmp_path):
    """Trained, exported in PEFT's format, and the same vectors from the exported adapter."""
    tiny_run.write_embedder(tmp_path / "encoder")
    more = (f"--config.retriever.encoder={tmp_path / 'encoder'}", *ONE_STEP)
    assert train.main(command(world, tmp_path / "run", "replug_pdist", *more)) == 0
    tree, settings = load_peft(tmp_path / "run" / "retriever")
    assert set(tree["layers"]) == {"q_proj", "k_proj", "v_proj", "o_proj"} and moved(tmp_path / "run", "retriever")
    assert "base_model.model.layers.0.self_attn.q_proj.lora_A.weight" in exported(tmp_path / "run", "retriever")
    overrides = ["method.name=replug_pdist", *(word.removeprefix("--config.") for word in more)]
    config = configuration.load(world / "config.py", overrides)
    session = open_session(config, tmp_path / "run", "latest")
    assert session.assets.encoder.append_eos and session.assets.encoder.query_prefix == "who "
    encoder = e5.load(tmp_path / "encoder", lora=settings, max_length=32)
    adapted = e5.embed(encoder, ["who lives in rome ?"], lora=tree)
    np.testing.assert_allclose(
        adapted, e5.embed(session.assets.encoder, ["who lives in rome ?"], lora=session.retriever_lora), atol=1e-6
    )
    assert np.abs(adapted - e5.embed(encoder, ["who lives in rome ?"])).max() > 1e-5


def test_rl_then_rag_is_vt_search_and_then_the_retriever_alone(runs):
    _, grpo = runs("vt_search")
    workdir, rows = runs("rl_then_rag")
    assert [(row["step"], row["stage"]) for row in rows] == [(n, 1 + n // 4) for n in range(1, 7)]
    for alone, row in zip(grpo, rows):
        for name in ("reward/mean", "policy/loss", "policy/grad_norm", "rollout/searches"):
            assert row[name] == pytest.approx(alone[name], rel=1e-4, abs=1e-6), name
    assert not any(name.startswith(("retriever/", "credit/")) for row in rows[:3] for name in row)
    assert not any(name.startswith(("policy/", "gap/")) for row in rows[3:] for name in row)
    a, b = exported(runs("vt_search")[0]), exported(workdir)
    assert all(np.allclose(a[name], b[name], atol=1e-5) for name in a)
    assert moved(workdir, "retriever")
    assert tuple(rows[-1][name] for name in COUNTS) == (3, 3, 192)
    assert rows[3]["epoch"] == rows[0]["epoch"]  # the second stage starts over with the questions


def test_rag_then_rl_starts_with_the_retriever(runs):
    workdir, rows = runs("rag_then_rl")
    assert not any(name.startswith("policy/") for row in rows[:3] for name in row)
    assert not any(name.startswith("retriever/") for row in rows[3:] for name in row)
    assert rows[2]["retriever/drift"] > 0
    assert moved(workdir, "policy_lora") and moved(workdir, "retriever")
    assert tuple(rows[-1][name] for name in COUNTS) == (3, 3, 192)
    assert {path.name for path in (workdir / "eval").iterdir()} == {f"step_{n:06d}.json" for n in (0, 3, 6)}


@pytest.mark.parametrize(
    ("method", "killed_in"), [("rag_then_rl", 3), ("rag_then_rl", 5), pytest.param("two_state", 2, marks=pytest.mark.long)]
)
def test_an_interrupted_run_goes_on_bit_for_bit(world, runs, tmp_path, monkeypatch, method, killed_in):
    """Across stages, and with a second retriever in the state."""
    whole, rows = runs(method)
    show = Display.step

    def interrupt(self, number, metrics):
        show(self, number, metrics)
        if number == killed_in:
            raise KeyboardInterrupt

    monkeypatch.setattr(Display, "step", interrupt)
    assert train.main(command(world, tmp_path, method)) == 130
    monkeypatch.setattr(Display, "step", show)
    assert train.main(command(world, tmp_path, method)) == 0
    assert results(tmp_path) == rows
    for part in ("policy_lora", "retriever"):
        a, b = exported(whole, part), exported(tmp_path, part)
        assert all(np.array_equal(a[name], b[name]) for name in a)


def test_two_state_and_drop_correct_the_policy_alone(runs):
    """On the first step bridge's rollouts and retriever; then the policy goes another way, and two_state's less far than drop's."""
    (_, bridge), (folder, two_state), (_, drop) = runs("bridge"), runs("two_state"), runs("drop")
    for rows in (two_state, drop):
        for name in ("reward/mean", "retriever/loss", "retriever/grad_norm"):
            assert rows[0][name] == pytest.approx(bridge[0][name], rel=1e-3, abs=1e-6), name
        assert rows[0]["two_state/correction_norm"] > 0
        assert rows[0]["policy/grad_norm"] != pytest.approx(bridge[0]["policy/grad_norm"], rel=1e-3)
    assert 0 < two_state[0]["two_state/weight_change"] < drop[0]["two_state/weight_change"] == pytest.approx(1.0, abs=1e-5)
    assert two_state[0]["two_state/correction_norm"] < drop[0]["two_state/correction_norm"]
    assert two_state[-1]["two_state/star_drift"] > 0 and "two_state/star_drift" not in drop[-1]
    assert not any(name.startswith("two_state/") for name in bridge[-1])
    assert (folder / "checkpoints" / "3" / "star").is_dir()


def test_a_run_in_stages_cannot_be_lengthened(world, runs, capsys):
    workdir, _ = runs("rag_then_rl")
    assert train.main(command(world, workdir, "rag_then_rl", "--config.train.steps=4")) == 2
    assert "train.steps was 3, now 4" in capsys.readouterr().err


def test_r1_searcher_changes_its_reward_between_stages(runs):
    _, rows = runs("r1_searcher")
    assert [(row["step"], row["stage"]) for row in rows] == [(1, 1), (2, 2), (3, 2)]
    assert 0 <= rows[0]["reward/mean"] <= 1 and rows[0]["reward/mean"] != rows[0]["reward/em"]
    for row in rows[1:]:  # F1, less 2 for a wrong format
        assert -2 <= row["reward/mean"] - row["reward/f1"] <= 0
    assert any(row["reward/mean"] < 0 for row in rows[1:]) and all(row["policy/grad_norm"] > 0 for row in rows)


def test_simple_deep_searcher_learns_from_what_it_selected(world, runs):
    overrides = "policy.trainable=full", "selection.min_searches=0", "selection.per_question=8", "warmstart.lr=1e-2"
    workdir, rows = runs("simple_deep_searcher", *(f"--config.{override}" for override in overrides))
    assert [tuple(row[name] for name in COUNTS) for row in rows] == [(0, 0, 32 * n) for n in (1, 2, 3)]
    files = [workdir / "selected" / f"step_00000{n}.jsonl" for n in (1, 2, 3)]
    kept = [json.loads(line) for file in files for line in file.read_text().splitlines()]
    assert len(kept) == sum(row["selection/kept"] for row in rows) == rows[-1]["selection/traces"] >= 2
    for row in rows:
        fell = [value for name, value in row.items() if name.startswith("selection/") and name != "selection/traces"]
        assert sum(fell) == 32  # every rollout is kept, or fell to one reason
    assert rows[-1]["sft/steps"] == 2 * math.ceil((len(kept) - 1) / 4) and rows[-1]["sft/heldout_after"] > 0
    start, end = (load_file(folder / "policy" / "model.safetensors") for folder in (world, workdir))
    assert any(np.abs(start[name] - end[name]).max() > 1e-4 for name in start)
    assert not (workdir / "selected" / "warmstart_state").exists()
