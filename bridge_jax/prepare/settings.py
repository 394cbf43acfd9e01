"""The configuration file that `prepare` writes: settings that follow from the data, and from what the models need."""

from __future__ import annotations

import math
from typing import Any

from bridge_jax.models.pocket_models import MODELS

POLICY, ENCODER = "smollm2-135m-instruct", "minilm-l6-v2"
TOKENS_A_WORD = 1.6  # of English text, with some room; other languages may need more

# By who computes: a laptop's CPU, or one accelerator of 16 GB. See configs/pocket.py and configs/qwen2_5_0_5b_colab.py.
LAPTOP = {
    "policy.trainable": "lora",
    "policy.lora_rank": 16,
    "policy.lora_alpha": 32.0,
    "policy.compute_dtype": "float32",
    "retriever.lora_rank": 8,
    "retriever.lora_alpha": 16.0,
    "rollout.prompt": "brief",
    "rollout.candidates": 16,
    "rollout.max_new_tokens": 80,
    "rollout.chunk": 16,
    "rollout.batch_groups": 4,
    "grpo.group_size": 4,
    "grpo.minibatch_questions": 4,
    "grpo.microbatch": 4,
    "grpo.lr": 2e-4,
    "grpo.warmup_steps": 2,
    "credit.gamma": 1.0,
    "credit.tau": 0.05,
    "credit.max_turns": 32,
    "credit.minibatch": 8,
    "credit.lr": 5e-4,
    "credit.warmup_steps": 5,
    "train.steps": 10,
    "train.questions": 4,
    "train.eval_every": 0,
    "train.checkpoint_every": 1,
    "warmstart.questions": 256,
    "warmstart.epochs": 1,
    "warmstart.batch": 8,
    "warmstart.microbatch": 4,
    "warmstart.lr": 2e-4,
}
ACCELERATOR = {
    "policy.trainable": "lora",
    "rollout.candidates": 20,
    "rollout.max_new_tokens": 128,
    "rollout.batch_groups": 8,
    "grpo.group_size": 8,
    "grpo.minibatch_questions": 8,
    "grpo.lr": 5e-5,
    "credit.gamma": 0.5,
    "credit.max_turns": 64,
    "credit.minibatch": 16,
    "train.steps": 50,
    "train.questions": 8,
    "train.eval_every": 25,
    "train.checkpoint_every": 5,
    "warmstart.questions": 300,
    "warmstart.batch": 16,
    "warmstart.microbatch": 4,
    "warmstart.lr": 2e-5,
}


def settings(policy: str, encoder: str, longest_passage: int, longest_question: int, passages: int, dev: int) -> dict[str, object]:
    """{"group.field": value}. longest_*: words. A passage is shown whole as long as TOKENS_A_WORD holds."""
    small = policy in MODELS or policy == "mini-policy"
    found: dict[str, Any] = dict(LAPTOP if small else ACCELERATOR)
    passage = _up(TOKENS_A_WORD * longest_passage + 16, 16)
    observation = _up(3 * (passage + 16) + 16, 32)
    found |= {
        "policy.model": policy,
        "retriever.encoder": encoder,
        "retriever.max_length": min(512, passage),
        "rollout.candidates": min(found["rollout.candidates"], passages),
        "rollout.shown": min(3, passages),
        "rollout.max_prompt_tokens": _up(TOKENS_A_WORD * longest_question + 224, 64),
        "rollout.max_passage_tokens": passage,
        "rollout.max_observation_tokens": observation,
        "rollout.max_response_tokens": 3 * found["rollout.max_new_tokens"] + 2 * observation + 32,
        "data.eval_limit": min(100, dev),
    }
    return found


def _up(value: float, step: int) -> int:
    return math.ceil(value / step) * step


def config_file(values: dict[str, object], said: str) -> str:
    """The text of a configuration file. The data is found beside it, so the folder can be moved."""
    groups: dict[str, list[str]] = {}
    for name, value in values.items():
        groups.setdefault(name.split(".")[0], []).append(f"    c.{name} = {value!r}\n")
    body = "\n".join("".join(lines) for _, lines in sorted(groups.items()))
    return f'''"""{said}

Written by `python -m bridge_jax.prepare`, and yours to change. Every field, with its default: docs/configuration.md.
"""

from pathlib import Path

from bridge_jax import config as configuration

HERE = Path(__file__).resolve().parent


def get_config():
    c = configuration.default()
    c.index.corpus = str(HERE / "corpus.jsonl")
    c.data.train = (str(HERE / "train.jsonl"),)
    c.data.eval = (str(HERE / "dev.jsonl"),)

{body}    return c
'''
