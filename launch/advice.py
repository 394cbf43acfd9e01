"""What to change when a program does not fit: settings, and about how many bytes a chip each leaves.

Estimates, from the compiled program's own figures where memory is in proportion to a setting (rows, groups, pairs), else from the
size of what a setting removes. Nothing is tried: the user runs `launch/fit.py` again with the setting.
"""

from __future__ import annotations

import math

from programs import Plan

GIB = 2**30
COPIES = 3  # of attention logits that a backward pass holds at once: the logits, their exponentials, their gradient


def advise(plan: Plan, name: str, shape: dict, entry: dict) -> list[str]:
    """Settings that would make program `name` fit, best first. entry: its figures (see `fit.assess`)."""
    missing, temp = entry["missing_bytes"], entry["temp_bytes"]
    if name in ("policy_step", "logprobs"):
        return _training(plan, shape, missing, temp)
    if name in ("decode", "enter", "append", "widen"):
        return _rollout(plan, missing)
    if name == "score":
        return _scoring(plan, missing, temp)
    if name == "retriever_step":
        return [f"--config.credit.minibatch={max(1, plan.config.credit.minibatch // 2)}"]
    return _weights(plan)


def _training(plan: Plan, shape: dict, missing: float, temp: float) -> list[str]:
    config, found = plan.config, []
    rows, ways = int(shape["rows"]), int(shape["ways"])
    local = shape["local_rows"]
    if rows % ways:
        found.append(f"--config.grpo.microbatch={math.ceil(rows / ways) * ways} (it splits over the {ways} chips)")
    elif local > 1:
        fitting = [n for n in range(1, int(local)) if local % n == 0 and temp * (1 - n / local) >= missing]
        n = max(fitting, default=1)
        saved = _gib(temp * (1 - n / local))
        found.append(f"--config.grpo.microbatch={n * ways} ({n} rows a chip instead of {local:.0f}: about {saved} less)")
    logits = COPIES * local * shape["logits"]
    kernel = {"tpu": "splash", "gpu": "cudnn"}.get(plan.target.chip.platform)
    if config.policy.attention in ("auto", "xla") and kernel and logits > missing / 4:
        found.append(
            f"--config.policy.attention={kernel} (the attention logits of {local:.0f} rows of {shape['width']:.0f} tokens take "
            f"about {_gib(logits)})"
        )
    if not config.policy.remat:
        found.append("--config.policy.remat=true (activations of one layer at a time)")
    held = plan.resident["published weights"]
    if held > missing / 2 and plan.target.local > 1:
        found += _weights(plan)
    if not found:
        found.append("shorter rollouts (--config.rollout.max_response_tokens), --config.policy.trainable=lora, or more chips")
    return found


def _rollout(plan: Plan, missing: float) -> list[str]:
    config = plan.config
    groups = config.rollout.batch_groups
    ways = math.prod(plan.rollout_mesh.shape[a] for a in ("data", "fsdp"))
    a_group = plan.resident["cache"] / groups  # and some of the temporaries, which is not counted on
    fitting = math.floor(groups - missing / a_group)
    fitting -= fitting % ways
    found = []
    if fitting >= ways:
        found.append(f"--config.rollout.batch_groups={fitting} (a group's cache takes {_gib(a_group)} of a chip)")
    else:
        found.append(f"--config.rollout.batch_groups={ways} is not enough by itself")
    return found + _weights(plan)


def _scoring(plan: Plan, missing: float, temp: float) -> list[str]:
    pairs = plan.config.credit.pairs_at_once
    less = pairs
    while less > 2**20 and temp * (1 - less / pairs) < missing:
        less //= 2
    return [f"--config.credit.pairs_at_once={less} (about {_gib(temp * (1 - less / pairs))} less)", *_weights(plan)]


def _weights(plan: Plan) -> list[str]:
    """Weights split further for rollouts."""
    now, heads = plan.rollout_mesh.shape["tensor"], plan.model.num_kv_heads
    more = [n for n in range(now + 1, plan.target.local + 1) if plan.target.local % n == 0 and heads % n == 0]
    if not more:
        return []
    saved = plan.resident["published weights"] * (1 - now / more[0])
    return [f"--config.mesh.rollout_tensor={more[0]} (the published weights take about {_gib(saved)} less)"]


def _gib(count: float) -> str:
    return f"{count / GIB:.1f} GiB"
