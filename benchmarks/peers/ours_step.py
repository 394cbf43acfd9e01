"""Our GRPO step (`objectives.bilevel.policy_step`): packing on the host, loss, gradient, AdamW, all rollouts in one minibatch."""

import functools

import jax
import numpy as np
import step_inputs
from serve import Memory, serve, versions

from bridge_jax import config as configuration
from bridge_jax.models import qwen2
from bridge_jax.objectives import bilevel
from bridge_jax.rollout.episodes import Episode
from bridge_jax.training import batch as batches
from bridge_jax.training import state as learning


def setup(job: dict, memory: Memory):
    """job: folder, inputs (a file of `step_inputs.write`), lr, clip, epsilon, dual_clip, grad_clip."""
    memory.imported()
    model, params = qwen2.load(job["folder"])
    rollouts = step_inputs.read(job["inputs"])
    config = settings(job, rollouts)
    settled = learning.step_config(config)
    modules = bilevel.Modules(model, None, *bilevel.make_optimizers(settled))
    step = jax.jit(functools.partial(bilevel.policy_step, settled, modules), donate_argnums=1)
    state = bilevel.init_state(modules, params, {}, jax.random.key(0))
    del params
    episodes = [
        Episode(
            None, b // step_inputs.GROUP, b % step_inputs.GROUP, r.prompt, r.tokens, r.generated, r.logps, [], "answered", "", []
        )
        for b, r in enumerate(rollouts)
    ]
    advantages = np.asarray([r.advantage for r in rollouts], np.float32)
    shape = []

    def update() -> dict:
        nonlocal state
        packed = pack(config, episodes, advantages)
        shape[:] = packed.tokens.shape
        state, metrics = step(bilevel.Frozen(None, None), state, batches.place(packed, None))
        return jax.block_until_ready(metrics)

    first = update()
    return update, {
        "loss": float(first["policy/loss"]),
        "grad_norm": float(first["policy/grad_norm"]),
        "computed_tokens": int(np.prod(shape)),
        "versions": versions(("jax", "jaxlib", "flax", "optax")),
    }


def settings(job: dict, rollouts):
    """A run's configuration that has all rollouts in one minibatch and one forward and backward pass."""
    config = configuration.default()
    config.method.name = "vt_search"
    config.policy.trainable, config.policy.compute_dtype, config.policy.remat = "full", "float32", False
    config.rollout.max_prompt_tokens = max(len(r.prompt) for r in rollouts)
    config.rollout.max_response_tokens = max(len(r.tokens) for r in rollouts)
    grpo = config.grpo
    grpo.group_size, grpo.minibatch_questions, grpo.microbatch = (
        step_inputs.GROUP,
        len(rollouts) // step_inputs.GROUP,
        len(rollouts),
    )
    grpo.clip_low = grpo.clip_high = job["epsilon"]
    grpo.dual_clip, grpo.kl_coef, grpo.aggregation = job["dual_clip"], 0.0, "token_mean"
    grpo.lr, grpo.weight_decay, grpo.grad_clip, grpo.warmup_steps = job["lr"], 0.0, job["grad_clip"], 0
    return config


def pack(config, episodes, advantages):
    """As `training.loop` packs a step's episodes."""
    rewards, trained = np.zeros(len(episodes), np.float32), np.ones(len(episodes), bool)
    return batches.pack_rollouts(config, None, episodes, rewards, advantages, trained)


if __name__ == "__main__":
    serve(setup)
