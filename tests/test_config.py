"""Configuration: every shipped file loads, every mistake is one line that names the field."""

import argparse
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from bridge_jax import config as configuration
from bridge_jax.errors import UserError
from bridge_jax.evaluation import cli
from bridge_jax.models import known
from bridge_jax.training.workdir import claim_workdir

ROOT = Path(__file__).parent.parent
POCKET = ROOT / "configs" / "pocket.py"


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.py")), ids=lambda p: p.stem)
def test_shipped_configs_load(path):
    config = configuration.load(path)
    assert config.is_locked
    assert set(configuration.flatten(config)) == set(configuration.flatten(configuration.default()))


def test_overrides_take_the_field_type():
    config = configuration.load(
        POCKET, ["credit.gamma=2", "data.train=a.jsonl, b.jsonl", "policy.remat=false", "grpo.lr=1e-3", "index.corpus=7"]
    )
    assert config.credit.gamma == 2.0 and isinstance(config.credit.gamma, float)
    assert config.data.train == ("a.jsonl", "b.jsonl")
    assert config.policy.remat is False
    assert config.grpo.lr == 1e-3
    assert config.index.corpus == "7"


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("credit.gama=1", ("credit.gama", "credit.gamma")),
        ("method.name=brigde", ("method.name", "did you mean 'bridge'")),
        ("train.steps=many", ("train.steps", "int")),
        ("train.steps=1.5", ("train.steps", "int")),
        ("train.steps=0", ("train.steps", "at least 1")),
        ("rollout.temperature=nan", ("rollout.temperature",)),
        ("policy.remat=3", ("policy.remat", "bool")),
        ("credit.tau=0", ("credit.tau", "at least 1e-06")),
        ("credit.gamma=1e999", ("credit.gamma", "finite")),
        ("credit.gamma=" + "9" * 400, ("credit.gamma", "finite")),
        ("credit.gamma={[]: 1}", ("credit.gamma", "float")),
        ("train.steps=" + "-" * 100_000 + "1", ("train.steps", "int")),
        ("data.weights=(1e999,)", ("data.weights", "above 0")),
        ("data.train=[1,2,3]", ("data.train", "str")),
        ("policy.lora_targets=q_proj,3", ("policy.lora_targets", "str")),
        ("credit.period=11", ("credit.period", "train.steps=10")),
        ("rollout.max_searches=0", ("rollout.max_searches", "method bridge", "vt_search")),
        ("grpo.group_size=1", ("grpo.group_size", "advantage 0")),
        ("rollout.temperature=0", ("rollout.temperature", "above 0")),
        ("credit.target=next", ("credit.target", "answer, next_action, both")),
        ("data.weights=1,2", ("data.weights", "1 sources")),
        ("rollout.top_p=0", ("rollout.top_p", "at most 1")),
        ("rollout.top_p=1.1", ("rollout.top_p", "at most 1")),
        ("rollout.top_k=65", ("rollout.top_k", "at most 64")),
        ("rollout.min_new_tokens=81", ("rollout.min_new_tokens", "max_new_tokens=80")),
        ("rollout.candidates=2", ("rollout.candidates", "rollout.shown")),
        ("grpo.microbatch=5", ("grpo.microbatch", "divide")),
        ("policy.algorithm=ppo", ("policy.algorithm", "method bridge", "search_r1")),
        ("ppo.discount=1.5", ("ppo.discount", "at most 1")),
        ("ppo.value_clip=0", ("ppo.value_clip", "above 0")),
        ("credit=1", ("credit",)),
    ],
)
def test_mistakes_name_the_field(override, words):
    with pytest.raises(UserError) as caught:
        configuration.load(POCKET, [override])
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("fields", "unread"),
    [
        (["method.name=decoupled_rl", "credit.gamma=2"], "config.credit.gamma"),
        (["method.name=search_r1", "credit.lr=1e-3", "credit.tau=0.5", "retriever.lora_rank=4"],
         "config.credit.lr, config.retriever.lora_rank"),
        (["method.name=decoupled_rag", "credit.clamp_negative=true"], "config.credit.clamp_negative"),
        (["ppo.kl_coef=0.1"], "config.ppo.kl_coef"),
        (["method.name=decoupled_rl", "credit.clamp_negative=true"], None),
        (["method.name=vt_search", "credit.lr=1e-4"], None),  # the default
        (["method.name=vt_search"], None),  # a file's own settings are for all methods
    ],
)  # fmt: skip
def test_what_a_method_does_not_read_is_said(fields, unread, caplog):
    configuration.load(POCKET, fields)
    said = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert [line.split(": ")[0] for line in said] == ([f"nothing reads {unread}"] if unread else [])


def test_a_command_that_only_uses_a_run_may_set_what_teaches_nothing(tmp_path, caplog):
    """And a run that a method without groups or searches trains may, too."""
    claim_workdir(configuration.load(POCKET, ["method.name=decoupled_rl"]), tmp_path)
    idle = ["--config.rollout.max_searches=0", "--config.rollout.temperature=0", "--config.rollout.top_p=0.9"]
    parser = argparse.ArgumentParser()
    cli.add_flags(parser)
    _, config = cli.parse(parser, [f"--workdir={tmp_path}", *idle, "--config.credit.gamma=3", "--config.grpo.group_size=1"])
    assert config.rollout.max_searches == 0 and not [record for record in caplog.records if record.levelname == "WARNING"]
    configuration.load(POCKET, ["method.name=vt_search", "rollout.max_searches=0", "credit.period=99"])
    configuration.load(POCKET, ["method.name=vt_search", "policy.algorithm=ppo", "grpo.group_size=1"])


def test_masking_and_crediting_the_same_turns_is_refused():
    with pytest.raises(UserError, match=r"credit\.target='both'.*credit\.first_hop"):
        configuration.load(POCKET, ["credit.target=both", "credit.first_hop=mask"])


def test_ppo_has_no_groups_to_filter():
    ppo = ["method.name=vt_search", "policy.algorithm=ppo"]
    assert configuration.load(POCKET, ppo).policy.algorithm == "ppo"
    with pytest.raises(UserError, match=re.escape("grpo.filter_zero_advantage")):
        configuration.load(POCKET, [*ppo, "grpo.filter_zero_advantage=true"])


def test_the_displacement_guard_is_refused_where_it_cannot_act():
    guard = ["grpo.llds=0.01", "method.name=vt_search"]
    with pytest.raises(UserError, match=r"grpo\.llds=0\.01: with one minibatch a step"):
        configuration.load(POCKET, guard)
    several = [*guard, "grpo.minibatch_questions=2"]
    assert configuration.load(POCKET, several).grpo.llds == 0.01
    with pytest.raises(UserError, match="one advantage an action"):
        configuration.load(POCKET, [*several, "policy.algorithm=ppo"])


def test_missing_and_broken_files(tmp_path):
    with pytest.raises(UserError, match="does not exist"):
        configuration.load(tmp_path / "none.py")
    (tmp_path / "run.json").write_text("{}")
    with pytest.raises(UserError, match="must be a Python file"):
        configuration.load(tmp_path / "run.json")
    broken = tmp_path / "broken.py"
    broken.write_text("def get_config(:\n")
    with pytest.raises(UserError, match=re.escape("broken.py")):
        configuration.load(broken)
    typo = tmp_path / "typo.py"
    typo.write_text("from bridge_jax import config\ndef get_config():\n  c = config.default()\n  c.credit.gama = 1.0\n  return c\n")
    with pytest.raises(UserError, match=re.escape("credit.gamma")):
        configuration.load(typo)


def test_every_field_is_read_somewhere():
    """A field that nothing reads is a promise that nobody keeps."""
    sources = "\n".join(p.read_text() for p in (ROOT / "bridge_jax").rglob("*.py") if p.name != "config.py")
    unread = [
        name for name in configuration.flatten(configuration.default()) if not re.search(rf"\.{name.split('.')[1]}\b", sources)
    ]
    assert not unread


def test_workdir_belongs_to_one_configuration(tmp_path):
    config = configuration.load(POCKET)
    claim_workdir(config, tmp_path)
    before = (tmp_path / "config.json").read_text()
    claim_workdir(config, tmp_path)
    other = configuration.load(POCKET, ["credit.gamma=3"])
    with pytest.raises(UserError, match=r"credit\.gamma was 1\.0, now 3\.0"):
        claim_workdir(other, tmp_path)
    assert (tmp_path / "config.json").read_text() == before
    older = json.loads(before)
    del older["credit.sibling"]  # the folder was made before there was this field
    (tmp_path / "config.json").write_text(json.dumps(older))
    claim_workdir(config, tmp_path)
    with pytest.raises(UserError, match=r"credit\.sibling was 'history', now 'any'"):
        claim_workdir(configuration.load(POCKET, ["credit.sibling=any"]), tmp_path)
    longer = configuration.load(POCKET, ["train.steps=99"])
    claim_workdir(longer, tmp_path, may_change=("train.steps",))
    assert json.loads((tmp_path / "config.json").read_text())["train.steps"] == 99


def test_a_longer_run_is_told_what_its_method_derives_from_the_length(tmp_path):
    words = ["method.name=search_r1", "train.steps=10"]
    claim_workdir(configuration.load(POCKET, words), tmp_path)
    longer, may_change = [*words[:1], "train.steps=40"], ("train.steps",)
    with pytest.raises(
        UserError, match=r"warmup_steps was 6, now 23\): method search_r1 derives .*pass --config\.grpo\.warmup_steps=6 "
    ):
        claim_workdir(configuration.load(POCKET, longer), tmp_path, may_change=may_change)
    claim_workdir(configuration.load(POCKET, [*longer, "grpo.warmup_steps=6"]), tmp_path, may_change=may_change)


def test_command_line_errors_are_one_line_and_exit_2(tmp_path):
    command = [
        sys.executable,
        "-m",
        "bridge_jax.train",
        f"--config={POCKET}",
        f"--workdir={tmp_path / 'run'}",
        "--config.credit.gama=1",
    ]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 2
    assert done.stderr.strip().count("\n") == 0 and "credit.gamma" in done.stderr
    assert not (tmp_path / "run").exists()


def test_the_papers_settings_are_the_defaults():
    """configs/qwen2_5_3b.py says where each number comes from; the other backbones refer to it."""
    defaults = configuration.flatten(configuration.default())
    models = {
        "qwen2_5_3b": "Qwen/Qwen2.5-3B-Instruct",
        "qwen2_5_7b": "Qwen/Qwen2.5-7B",
        "qwen3_14b": "Qwen/Qwen3-14B",
        "r1_distill_llama_8b": "deepseek-ai/DeepSeek-R1-Distill-Llama-8B",
    }
    for name, model in models.items():
        config = configuration.load(Path(__file__).parents[1] / "configs" / f"{name}.py")
        assert configuration.flatten(config) == defaults | {"policy.model": model}
        assert known.policy_config(model).num_layers
