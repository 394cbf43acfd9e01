"""launch/fit.py on virtual CPU devices, and what it says when something is missing."""

import dataclasses
import importlib.util
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import advice
import compiling
import fit
import jax
import pytest
import targets

from bridge_jax import config as configuration
from bridge_jax.errors import UserError
from bridge_jax.models import known, qwen2

HOME = Path(__file__).parents[2]
SMALL = ("rollout.batch_groups=4", "train.questions=4", "grpo.minibatch_questions=2", "grpo.microbatch=4", "credit.max_turns=32")


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("BRIDGE_JAX_CACHE", str(tmp_path))
    for name in ("JAX_PLATFORMS", "XLA_FLAGS", "TPU_SKIP_MDS_QUERY"):  # fit sets them: back to what they were afterwards
        monkeypatch.setenv(name, os.environ.get(name, ""))


def run(*more, target="cpux4", config="mini"):
    command = [
        sys.executable,
        str(HOME / "launch" / "fit.py"),
        f"--config={HOME / 'configs' / f'{config}.py'}",
        f"--target={target}",
    ]
    overrides = [f"--config.{override}" for override in SMALL]
    return subprocess.run([*command, *overrides, *more], capture_output=True, text=True, timeout=600)


def test_every_program_of_a_run_on_four_devices(tmp_path):
    done = run("--json", f"--out={tmp_path / 'fit.json'}")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result == json.loads((tmp_path / "fit.json").read_text())
    assert result["fits"] and result["mesh"]["train"] == {"data": 1, "fsdp": 4, "tensor": 1}
    entries = result["programs"]
    assert set(entries) == {
        "publish", "enter", "decode", "append", "widen", "score", "logprobs", "retriever_step", "policy_step"
    }  # fmt: skip
    for name, entry in entries.items():
        assert entry["phase_bytes"] >= entry["argument_bytes"] + entry["temp_bytes"], name
        assert entry["roofline_seconds"] > 0, name
    # The mini policy in full: float32 weights and two moments over four devices; norms, biases and the retriever's LoRA on each.
    weights = 4 * sum(math.prod(x.shape) for x in jax.tree.leaves(qwen2.abstract_params(known.policy_config("mini-policy"))))
    assert 3 * weights / 4 < result["resident_bytes"]["training state"] < 3.6 * weights / 4
    # Forward, gradient, and the reference's forward pass; attention is computed in full, and padded.
    assert 1 <= entries["policy_step"]["flops_ratio"] < 1.4
    assert 1 <= entries["decode"]["flops_ratio"] < 1.1
    assert entries["policy_step"]["collectives"]["all-gather"]["bytes"] > 0
    assert "all-gather" not in entries["decode"]["collectives"]  # rows split, weights whole: nothing is gathered for a token


def plan_for(memory, *overrides):
    config = configuration.load(HOME / "configs" / "mini.py", [*SMALL, *overrides])
    target = targets.parse("cpux1")
    return config, dataclasses.replace(target, chip=dataclasses.replace(target.chip, memory=memory))


def test_what_does_not_fit_is_named_with_its_mend():
    result = fit.fit(*plan_for(100_000_000, "rollout.batch_groups=16"), ["decode"])
    assert not result["fits"]
    line, *largest = fit.shortages(result)
    entry = result["programs"]["decode"]
    missing = (entry["argument_bytes"] + entry["temp_bytes"] + entry["elsewhere_bytes"] - 100_000_000) / 2**30
    assert line.startswith(f"decode does not fit cpux1: {missing:.2f} GiB missing (needs ")
    assert "try --config.rollout.batch_groups=" in line and largest
    groups = int(line.split("batch_groups=")[1].split()[0])
    assert fit.fit(*plan_for(100_000_000, f"rollout.batch_groups={groups}"), ["decode"])["fits"]  # it does fit then


TRAIN = {"rows": 32, "ways": 16, "local_rows": 2, "width": 8192, "logits": 4 * 16 * 8192**2}


@pytest.mark.parametrize(
    ("shape", "overrides", "wanted"),
    [
        (TRAIN, (), "--config.grpo.microbatch=16 (1 rows a chip"),
        (TRAIN | {"rows": 8, "local_rows": 8}, (), "--config.grpo.microbatch=16 (it splits over the 16 chips)"),
        (TRAIN | {"rows": 16, "local_rows": 1}, (), "--config.policy.attention=splash (the attention logits of 1 rows"),
        (TRAIN | {"rows": 16, "local_rows": 1, "logits": 0}, (), "--config.policy.remat=true"),
    ],
)
def test_advice_for_training(shape, overrides, wanted):
    import programs

    config = configuration.load(HOME / "configs" / "mini.py", overrides)
    resident = {"published weights": 0.0, "cache": 0.0}
    plan = programs.Plan(config, targets.parse("v5e-16"), None, None, None, resident, {}, [])
    entry = {"missing_bytes": 3 * 2**30, "temp_bytes": 12 * 2**30}
    assert any(said.startswith(wanted) for said in advice.advise(plan, "policy_step", shape, entry))


SHORTAGE = """RESOURCE_EXHAUSTED: XLA:TPU compile permanent error. Ran out of memory in memory space hbm. \
Used 20.50G of 15.75G hbm. Exceeded hbm capacity by 4.75G.

Total hbm usage >= 20.75G:
    reserved        258.00M
    program          12.50G
    arguments         8.00G

  Largest program allocations in hbm:

  1. Size: 4.00G
     Operator: op_name="jit(step)/dot_general" source_file="x.py"
     Shape: f32[16,8192,8192]{2,1,0:T(8,128)}
     Unpadded size: 4.00G
     ==========================

  2. Size: 512.00M
     Shape: bf16[16,8192,2048]{2,1,0:T(8,128)(2,1)}
     ==========================
"""


def test_the_compilers_word_on_memory():
    found = compiling.read_shortage(SHORTAGE)
    assert (found["needed_bytes"], found["allowed_bytes"]) == (20.5 * 2**30, 15.75 * 2**30)
    assert found["largest"] == [
        {"bytes": 4 * 2**30, "what": "f32[16,8192,8192] jit(step)/dot_general"},
        {"bytes": 512 * 2**20, "what": "bf16[16,8192,2048]"},
    ]
    message = "Ran out of memory on HBM, the total memory required for HLO temporaries (42.96G) exceeds available HBM (15.75G)."
    assert compiling.read_shortage(message)["needed_bytes"] == 42.96 * 2**30
    assert compiling.read_shortage("RESOURCE_EXHAUSTED: something else")["needed_bytes"] is None


@pytest.mark.parametrize(
    ("target", "command"), [("v5e-16", r"pip install -e '\.\[tpu\]'"), ("h200x8", r"pip install -e '\.\[cuda13\]'")]
)
def test_a_missing_compiler_is_one_command_away(monkeypatch, target, command):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=command):
        compiling.need_compiler(targets.parse(target))


@pytest.mark.parametrize(
    ("more", "why"),
    [
        (("--target=v5e-17",), "--target=v5e-17: TPU v5e has no slice of that size"),
        (("--programs=decod",), "--programs=decod: no such program; there are publish, enter, decode"),
        (("--config.policy.model=nobody/none",), "the shape of nobody/none is not known"),
        (("--config.mesh.rollout_tensor=3",), "config.mesh.rollout_tensor=3"),
    ],
)
def test_bad_input(capsys, more, why):
    assert fit.main([f"--config={HOME / 'configs' / 'mini.py'}", "--target=cpux1", *more]) == 2
    assert why in capsys.readouterr().err


@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="needs libtpu: pip install -e '.[tpu]'")
def test_decoding_on_a_tpu_holds_one_cache():
    """One key/value head of 128 a chip: the compiler once kept a second cache in another layout."""
    overrides = ("--config.policy.model=Qwen/Qwen2.5-1.5B", "--config.policy.compute_dtype=bfloat16", "--programs=decode", "--json")
    lengths = {"batch_groups": 32, "max_response_tokens": 8192, "max_new_tokens": 4096}
    overrides += tuple(f"--config.rollout.{name}={value}" for name, value in lengths.items())
    done = run(*overrides, "--config.mesh.rollout_tensor=2", target="v5e-4")
    result = json.loads(done.stdout)
    entry, cache = result["programs"]["decode"], result["resident_bytes"]["cache"]
    assert cache > 5e9 and entry["temp_bytes"] < cache / 10 and entry["bytes_ratio"] < 1.05
