"""Model FLOPs against XLA's own count of compiled programs and against counting by hand; devices' peaks; shares of a row's time."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bridge_jax import config as configuration
from bridge_jax.models.qwen2 import Qwen2, Qwen2Config, abstract_params
from bridge_jax.objectives.bilevel import Modules, Rollouts, StepConfig, policy_gradient
from bridge_jax.objectives.grpo import GRPOConfig
from bridge_jax.objectives.scoring import Request
from bridge_jax.training import flops, goodput

# One layer: XLA counts the body of a loop once. Wide: matrix products are what counts, as in a real model.
CONFIG = Qwen2Config(256, 256, 512, 1, 8, 2, 32)
T = 64


def counted(fn, *args):
    return jax.jit(fn).lower(*args).compile().cost_analysis()["flops"]


def episode(prompt, response, group=0, generated=None):
    tokens = np.zeros(response, np.int32)
    mask = np.ones(response, bool) if generated is None else np.arange(response) < generated
    return types.SimpleNamespace(prompt=np.zeros(prompt, np.int32), tokens=tokens, generated=mask, group=group)


def test_forward_is_what_xla_counts():
    model, params = Qwen2(CONFIG), abstract_params(CONFIG)
    tokens = jax.ShapeDtypeStruct((2, T), jnp.int32)
    found = counted(lambda params, tokens: model.apply({"params": params}, tokens), params, tokens)
    # XLA computes the masked half of attention too.
    mine = sum(flops.forward(CONFIG, 2 * T, 2 * T * T, 2 * T))
    assert mine == pytest.approx(found, rel=0.03)
    assert sum(flops.forward(CONFIG, 2 * T, 2 * flops.causal(T), 2 * T)) == pytest.approx(found, rel=0.06)


@pytest.mark.parametrize("kl, reference", [(0.0, 0), (1e-3, 1)])
def test_policy_update_is_what_xla_counts(kl, reference):
    """Full training without rematerialisation of layers. XLA's count has the logits once more: their chunks are recomputed."""
    settings = StepConfig(GRPOConfig(kl_coef=kl), None, trainable="full")
    modules = Modules(Qwen2(CONFIG), None, None, None, None)
    rows = {name: jax.ShapeDtypeStruct((1, 2, T), dtype) for name, dtype in (
        ("tokens", jnp.int32), ("positions", jnp.int32), ("segment_ids", jnp.int32), ("mask", jnp.bool_),
        ("old_logps", jnp.float32), ("advantages", jnp.float32),
    )}  # fmt: skip
    params = abstract_params(CONFIG)
    found = counted(
        lambda frozen, policy, rows: policy_gradient(settings, modules, frozen, policy, rows), params, params, Rollouts(**rows)
    )
    config = configuration.default()
    config.grpo.kl_coef = kl
    mine = flops.policy_flops(config, CONFIG, [episode(T // 2, T // 2)] * 2)
    recomputed = 2 * CONFIG.hidden_size * CONFIG.vocab_size * 2 * T
    assert mine + recomputed == pytest.approx(found, rel=0.08)
    assert mine > (3 + reference) * flops.forward(CONFIG, 2 * T, 0, 2 * T)[0]  # 6 (8) FLOPs a weight and token, and attention


def test_rollouts_read_a_prompt_once_a_group():
    tokens, pairs = 10 + 2 * 5, 10 * 11 / 2 + 2 * sum(range(11, 16))
    group = [episode(10, 5, generated=3), episode(10, 5, generated=3), episode(30, 0, group=1)]
    assert flops.rollout_flops(CONFIG, group) == sum(flops.forward(CONFIG, tokens, int(pairs), 6))


def test_equal_requests_are_scored_once():
    document, target = np.zeros(4, np.int32), np.zeros(3, np.int32)
    request = Request(
        np.zeros(20, np.int32), np.asarray([0, 1, -1], np.int32), (document, document), np.zeros(1, np.int32), (target,)
    )
    tokens, pairs = 20 + 2 * 8, 20 * 21 // 2 + 2 * sum(range(21, 29))
    assert flops.scoring_flops(CONFIG, [request, request]) == sum(flops.forward(CONFIG, tokens, pairs, 6))


@pytest.mark.parametrize(
    "kind, tera",
    [
        ("TPU v4", 275), ("TPU v5 lite", 197), ("TPU v5p", 459), ("TPU v5", 459), ("TPU v6 lite", 918), ("Tesla T4", 65),
        ("NVIDIA A100-SXM4-80GB", 312), ("NVIDIA H100 80GB HBM3", 989), ("NVIDIA H100 PCIe", 756), ("NVIDIA H200", 989),
        ("NVIDIA L4", 121), ("NVIDIA L40S", None), ("cpu", None),
    ],
)  # fmt: skip
def test_peaks(kind, tera):
    assert flops.peak(kind) == (tera and pytest.approx(tera * 1e12))


def test_utilisation_and_goodput(monkeypatch):
    row = {"flops/rollout": 3e12, "flops/policy": 7e12, "time/step": 2.0, "time/policy": 1.0}
    assert goodput.utilisation(row) == {}  # a CPU
    monkeypatch.setattr(goodput, "peak", lambda kind: 1e13)
    assert goodput.utilisation(row) == {"mfu": pytest.approx(0.5), "mfu/policy": pytest.approx(0.7)}

    clock, shares = goodput.Clock(), goodput.Goodput()
    shares._last -= 10.0
    jax.jit(lambda x: x * 3 + 1).lower(jnp.ones(3)).compile()
    clock.lap("publish")
    seconds = clock.seconds()
    assert 0 < seconds["time/compile"] <= seconds["time/publish"] <= seconds["time/step"]
    row = shares.row({"time/publish": 1.0, "time/wait": 0.5, "time/checkpoint": 2.0, "time/retrieval": 1.0})
    assert row["time/wall"] == pytest.approx(10, abs=0.5)
    assert row["goodput/idle"] == pytest.approx(0.15, abs=0.01) and row["goodput/checkpoint"] == pytest.approx(0.2, abs=0.01)
    assert sum(value for name, value in row.items() if name.startswith("goodput/")) == pytest.approx(1.0)
