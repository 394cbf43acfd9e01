"""One BRIDGE step as a pure function: the retriever's update, then the policy's, on one batch of rollouts.

Source: METHOD 1, 4 and 5. One retriever state is kept, the penalised one: it descends L_eta = J_ret + gamma L_RAG first (lower
level); then the policy descends J_RL alone. Methods are static settings of this step: `StepConfig.retriever = None` is `vt_search`,
`RetrieverLossConfig.use_outcome / use_rag` give the decoupled ones, and `objectives.two_state` has what the comparators of the one
state need beyond this module: a second retriever in the state, and a correction of the policy's gradient.

The document likelihoods l come *in the batch*: which documents were retrieved is data, so they are scored by
`scoring.Scorer` with the same theta_n before this step. Everything here is jit-able, holds no host callback, and works on
sharded arrays.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec as P

from bridge_jax.mesh import BATCH, constrain
from bridge_jax.objectives.grpo import GRPOConfig, displacement_guard, loss_denominator, policy_loss
from bridge_jax.objectives.logprobs import sequence_logps
from bridge_jax.objectives.ppo import PPOConfig
from bridge_jax.objectives.rag import RetrieverLossConfig, retriever_loss


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
    """AdamW behind a global-norm clip. The rate grows linearly over `warmup` updates (the first has lr / warmup), then stays."""

    lr: float
    weight_decay: float = 0.0
    clip: float = 1.0
    warmup: int = 0


@dataclasses.dataclass(frozen=True)
class StepConfig:
    """What one step does. Changing a field means another compiled program.

    trainable: "full" (state.policy is the parameter tree) or "lora" (state.policy is the adapter on the frozen parameters).
    epochs: passes over the rollouts; the shape of `Rollouts` says which make an optimiser step, and which one forward and backward.
    retriever: its loss, or None for no retriever update in this step. turn_minibatch, turn_epochs: likewise for turns.
    estimator: of the policy's gradient, "one_state", "two_state" or "drop" (`objectives.two_state`).
    chunk: tokens unembedded at once. pairs: of document scoring at once (`objectives.credit`), where it has a gradient.
    ppo: `ppo_step.policy_step` takes the place of `policy_step`, with a critic in the state.
    """

    grpo: GRPOConfig
    policy_optimizer: OptimizerConfig
    trainable: str = "lora"
    epochs: int = 1
    chunk: int = 1024
    pairs: int | None = None
    retriever: RetrieverLossConfig | None = None
    retriever_optimizer: OptimizerConfig = OptimizerConfig(lr=1e-4, warmup=20)
    turn_minibatch: int = 64
    turn_epochs: int = 1
    estimator: str = "one_state"
    ppo: PPOConfig | None = None
    critic_optimizer: OptimizerConfig = OptimizerConfig(lr=1e-5)

    def __post_init__(self):
        if self.trainable not in ("full", "lora"):
            raise ValueError(f"trainable {self.trainable!r}: allowed are full, lora")
        if self.estimator not in ("one_state", "two_state", "drop"):
            raise ValueError(f"estimator {self.estimator!r}: allowed are one_state, two_state, drop")


class Rollouts(flax.struct.PyTreeNode):
    """Rollouts as arrays [S, P, R, T]: S minibatches (optimiser steps) of P micro-batches (forward and backward) of R rows.

    A row holds one rollout or several, each its prompt, then everything that followed; padding comes last. Micro-batches without a
    trained token are skipped.
    """

    tokens: jax.Array  # [S, P, R, T] int32, and so on
    positions: jax.Array  # int32, from 0 in every rollout
    segment_ids: jax.Array  # int32: 1, 2, ... along a row, a rollout each; 0 = padding
    mask: jax.Array  # bool: tokens the policy generated and is trained on
    old_logps: jax.Array  # float32: the sampler's, at masked tokens
    advantages: jax.Array  # float32: of the token's rollout, or its own
    ref_logps: jax.Array | None = None  # float32; None: computed here from the frozen parameters
    rewards: jax.Array | None = None  # float32: the outcome of the token's rollout, which PPO makes its own advantages of


class Turns(flax.struct.PyTreeNode):
    """U executed searches; U is a multiple of `StepConfig.turn_minibatch`, padding turns have mask False."""

    query_tokens: jax.Array  # [U, T] int32
    query_mask: jax.Array  # [U, T] bool
    doc_vectors: jax.Array  # [U, C, D] float32: frozen passage vectors, in retrieval order
    doc_mask: jax.Array  # [U, C] bool
    log_likelihood: jax.Array  # [U, C] float32: l
    advantages: jax.Array  # [U] float32
    mask: jax.Array  # [U] bool


class Batch(flax.struct.PyTreeNode):
    rollouts: Rollouts
    turns: Turns | None = None  # not read when StepConfig.retriever is None


class BridgeState(flax.struct.PyTreeNode):
    """All that a step changes."""

    step: jax.Array  # int32
    policy: Any  # the trainable tree: parameters or LoRA, float32
    policy_opt: Any
    retriever: Any  # the penalised query-tower LoRA, eta_gamma
    retriever_opt: Any
    rng: jax.Array  # the run's key; a step uses fold_in(rng, step)
    critic: Any = None  # `models.value`'s tree, with PPO only
    critic_opt: Any = None
    star: Any = None  # two_state alone: the LoRA that descends L_RAG, eta*
    star_opt: Any = None


class Frozen(flax.struct.PyTreeNode):
    """What a step reads and never changes."""

    policy: Any  # reference parameters; with trainable = "lora" also the base the adapter acts on. None: full, and kl_coef = 0
    encoder: Any  # query-tower parameters


@dataclasses.dataclass(frozen=True)
class Modules:
    """The static parts: `policy` (models.qwen2.Qwen2), `encoder` (the module of an e5.Encoder), and the optimisers."""

    policy: Any
    encoder: Any
    policy_optimizer: optax.GradientTransformation
    retriever_optimizer: optax.GradientTransformation
    critic_optimizer: optax.GradientTransformation


def make_optimizer(config: OptimizerConfig) -> optax.GradientTransformation:
    """Clip, AdamW, warm-up."""

    def rate(count):
        return config.lr * jnp.minimum(1.0, (count + 1) / max(config.warmup, 1))

    return optax.chain(optax.clip_by_global_norm(config.clip), optax.adamw(rate, weight_decay=config.weight_decay))


def make_optimizers(config: StepConfig) -> tuple[optax.GradientTransformation, ...]:
    """(policy, retriever, critic)."""
    return tuple(make_optimizer(c) for c in (config.policy_optimizer, config.retriever_optimizer, config.critic_optimizer))


def init_state(modules: Modules, policy, retriever, rng: jax.Array, critic=None) -> BridgeState:
    """A state at step 0 from the trainable tree of the policy, the retriever's LoRA and, with PPO, the critic."""
    critic_opt = None if critic is None else modules.critic_optimizer.init(critic)
    policy_opt, retriever_opt = modules.policy_optimizer.init(policy), modules.retriever_optimizer.init(retriever)
    return BridgeState(jnp.int32(0), policy, policy_opt, retriever, retriever_opt, rng, critic, critic_opt)


def guarded_update(optimizer: optax.GradientTransformation, gradient, opt_state, params, wanted: jax.Array):
    """One optimiser step, left out when the gradient is not finite or not `wanted` (nothing was in the batch).

    Returns (params, opt_state, gradient norm, skipped): `skipped` is 1 for a non-finite gradient, whose norm is reported as 0.
    """
    norm = optax.tree.norm(gradient)
    finite = jnp.isfinite(norm)
    apply = finite & wanted
    gradient = jax.tree.map(lambda g: jnp.where(apply, g, 0.0), gradient)
    updates, new_opt_state = optimizer.update(gradient, opt_state, params)
    new_params = optax.apply_updates(params, updates)
    params, opt_state = jax.tree.map(lambda new, old: jnp.where(apply, new, old), (new_params, new_opt_state), (params, opt_state))
    return params, opt_state, jnp.where(finite, norm, 0.0), (~finite).astype(jnp.float32)


def retriever_update(config: StepConfig, modules: Modules, encoder_params, lora, opt_state, turns: Turns, key: jax.Array):
    """The lower level: minibatches of turns, query vectors recomputed, AdamW on L_eta.

    Returns (lora, opt_state, metrics). Turns are shuffled each epoch, padding last, so minibatches are full as long as turns last.
    """
    U = turns.mask.shape[0]
    if U == 0 or U % config.turn_minibatch:
        raise ValueError(f"{U} turns: pad them to a multiple of turn_minibatch = {config.turn_minibatch}")
    count = U // config.turn_minibatch

    def loss(lora, rows: Turns):
        queries = modules.encoder.apply({"params": encoder_params, "lora": lora}, rows.query_tokens, rows.query_mask)
        base = modules.encoder.apply({"params": encoder_params}, rows.query_tokens, rows.query_mask)
        total, turns_in, sums = retriever_loss(
            queries, rows.doc_vectors, rows.log_likelihood, rows.advantages, rows.mask, config.retriever, rows.doc_mask, base
        )
        return total / jnp.maximum(turns_in, 1.0), (total, turns_in, sums)

    def minibatch(carry, rows: Turns):
        lora, opt_state = carry
        rows = constrained(rows, modules.policy)
        gradient, (total, turns_in, sums) = jax.grad(loss, has_aux=True)(lora, rows)
        lora, opt_state, norm, skipped = guarded_update(modules.retriever_optimizer, gradient, opt_state, lora, turns_in > 0)
        return (lora, opt_state), (sums | {"retriever/loss": total}, turns_in, norm, skipped)

    def epoch(carry, key):
        order = jnp.argsort(jnp.where(turns.mask, jax.random.uniform(key, (U,)), 2.0))
        shuffled = jax.tree.map(lambda x: x[order].reshape(count, config.turn_minibatch, *x.shape[1:]), turns)
        return jax.lax.scan(minibatch, carry, shuffled)

    (lora, opt_state), out = jax.lax.scan(epoch, (lora, opt_state), jax.random.split(key, config.turn_epochs))
    sums, turns_in, norms, skipped = jax.tree.map(jnp.ravel, out)
    metrics = {name: _mean(value.sum(), turns_in.sum()) for name, value in sums.items()}
    metrics["retriever/grad_norm"] = _mean(norms.sum(), ((turns_in > 0) & (skipped == 0)).sum())
    metrics["retriever/skipped_updates"] = skipped.sum()
    return lora, opt_state, metrics


def policy_gradient(config: StepConfig, modules: Modules, frozen_params, policy, rows: Rollouts):
    """grad J_RL of one minibatch at `policy`: rows [P, R, T] -> (gradient, metric sums, largest gap).

    Exactly the gradient of the minibatch's loss, however it is cut into parts: sums over all parts, divided once.
    """
    model, grpo = modules.policy, config.grpo

    def logps(variables, rows: Rollouts):
        return sequence_logps(
            model, variables, rows.tokens, positions=rows.positions, segment_ids=rows.segment_ids, chunk=config.chunk
        )

    def reference(rows: Rollouts):
        if grpo.kl_coef == 0.0 or rows.ref_logps is not None:
            return rows.ref_logps
        return jax.lax.stop_gradient(logps({"params": frozen_params}, rows)[0])

    def guard(logp, rows: Rollouts):
        return displacement_guard(logp, rows.old_logps, rows.advantages, rows.mask, grpo, rows.segment_ids)

    def loss(policy, rows: Rollouts, ref_logps, guard_scale):
        logp, entropy = logps(policy_variables(config, frozen_params, policy), rows)
        given = rows.old_logps, ref_logps, rows.advantages, rows.mask
        total, denominator, sums = policy_loss(logp, *given, grpo, entropy, rows.segment_ids)
        if grpo.llds:
            fall, fallen = guard(logp, rows)
            scale = denominator / jnp.maximum(fallen, 1.0) if guard_scale is None else guard_scale
            total = total + grpo.llds * scale * fall
            sums |= {"llds": fall, "llds_tokens": fallen}
        gap = jax.lax.stop_gradient(jnp.where(rows.mask, jnp.abs(logp - rows.old_logps), 0.0))
        return total, (sums | {"loss": total, "denominator": denominator, "gap": gap.sum()}, gap.max())

    def micro(rows: Rollouts, guard_scale=None):
        rows = constrained(rows, model)
        gradient, (sums, gap_max) = jax.grad(loss, has_aux=True)(policy, rows, reference(rows), guard_scale)
        return gradient, sums, gap_max

    def counts(rows: Rollouts):
        rows = constrained(rows, model)
        fallen = guard(logps(policy_variables(config, frozen_params, policy), rows)[0], rows)[1]
        return loss_denominator(rows.mask, grpo, rows.segment_ids), fallen

    def combine(a, b):
        return (*added(a[:2], b[:2]), jnp.maximum(a[2], b[2]))

    guard_scale = None
    if grpo.llds and len(rows.tokens) > 1:
        # The guard divides by the tokens that fell in the whole minibatch, which only a forward pass over all of it can tell.
        denominator, fallen = over_parts(counts, rows, rows.mask)
        guard_scale = denominator / jnp.maximum(fallen, 1.0)
    gradient, sums, gap_max = over_parts(lambda rows: micro(rows, guard_scale), rows, rows.mask, combine)
    gradient = jax.tree.map(lambda g: g / jnp.maximum(sums["denominator"], 1.0), gradient)
    return gradient, sums, gap_max


def policy_update(config: StepConfig, modules: Modules, frozen_params, policy, opt_state, rollouts: Rollouts, correction=None):
    """The upper level: GRPO minibatches in order, each the exact mean over its micro-batches.

    correction: a tree like the policy that is added to every minibatch's gradient (`objectives.two_state`), or None.
    Returns (policy, opt_state, metrics). `gap/*` compares the sampler's log-probs with the first minibatch's, before any update.
    """

    def minibatch(carry, rows: Rollouts):
        policy, opt_state = carry
        gradient, sums, gap_max = policy_gradient(config, modules, frozen_params, policy, rows)
        wanted = sums["denominator"] > 0
        if correction is not None:
            gradient = added(gradient, correction)
        policy, opt_state, norm, skipped = guarded_update(modules.policy_optimizer, gradient, opt_state, policy, wanted)
        return (policy, opt_state), (sums, gap_max, norm, skipped)

    (policy, opt_state), out = jax.lax.scan(
        lambda carry, _: jax.lax.scan(minibatch, carry, rollouts), (policy, opt_state), None, length=config.epochs
    )
    sums, gap_max, norms, skipped = jax.tree.map(jnp.ravel, out)  # [epochs * S]
    total = {name: value.sum() for name, value in sums.items()}
    metrics = {
        "policy/loss": _mean(total["loss"], total["denominator"]),
        "policy/grad_norm": _mean(norms.sum(), ((sums["denominator"] > 0) & (skipped == 0)).sum()),
        "policy/skipped_updates": skipped.sum(),
        "gap/logp_mean": _mean(sums["gap"][0], sums["tokens"][0]),
        "gap/logp_max": gap_max[0],
    }
    for name in ("clip_fraction", "dual_clip_fraction", "kl", "entropy"):
        if name in total:
            metrics[f"policy/{name}"] = _mean(total[name], total["tokens"])
    for name in ("likelihood_displacement", "likelihood_displacement_ref"):
        if name in total:
            metrics[f"policy/{name}"] = _mean(total[name], total["displacement_tokens"])
    if "llds" in total:
        metrics["policy/llds"] = _mean(total["llds"], total["llds_tokens"])
    return policy, opt_state, metrics


def policy_variables(config: StepConfig, frozen_params, policy) -> dict:
    """What `Qwen2.apply` takes, from the trainable tree."""
    return {"params": policy} if config.trainable == "full" else {"params": frozen_params, "lora": policy}


def added(a, b):
    return jax.tree.map(jnp.add, a, b)


def over_parts(fn, parts, mask: jax.Array, combine=added):
    """`fn` of every micro-batch, combined. parts: a tree of arrays [P, ...]; those whose mask [P, R, T] is empty are skipped."""
    if len(mask) == 1:
        return fn(jax.tree.map(lambda x: x[0], parts))

    def accumulate(so_far, this):
        part, mask = this
        return jax.lax.cond(mask.any(), lambda: combine(so_far, fn(part)), lambda: so_far), None

    like = jax.eval_shape(fn, jax.tree.map(lambda x: x[0], parts))
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), like)
    return jax.lax.scan(accumulate, zeros, (parts, mask))[0]


def one_minibatch(rollouts: Rollouts) -> Rollouts:
    """All micro-batches as those of one minibatch: [S, P, R, T] -> [S * P, R, T]."""
    return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), rollouts)


def constrained(rows, model):
    """A tree of [rows, ...] arrays, split over the batch axes of the model's mesh."""
    return jax.tree.map(lambda x: constrain(x, model.mesh, P(BATCH)), rows)


def retriever_step(config: StepConfig, modules: Modules, frozen: Frozen, state: BridgeState, turns: Turns):
    """The lower level of a step: (state, turns) -> (state, metrics). Pure; the identity when `config.retriever` is None.

    `turns.log_likelihood` must have been scored with `state.policy` (see the module's text).
    """
    if config.retriever is None:
        return state, {}
    key = jax.random.fold_in(state.rng, state.step)
    lora, opt_state, metrics = retriever_update(config, modules, frozen.encoder, state.retriever, state.retriever_opt, turns, key)
    if config.estimator == "two_state":
        # The same minibatches in the same order, without J_ret: the two states differ by the outcome credit alone.
        alone = dataclasses.replace(config, retriever=dataclasses.replace(config.retriever, use_outcome=False))
        star, star_opt, measured = retriever_update(alone, modules, frozen.encoder, state.star, state.star_opt, turns, key)
        metrics |= {f"two_state/star_{name}": measured[f"retriever/{name}"] for name in ("rag_nll", "drift", "grad_norm")}
        metrics["retriever/skipped_updates"] += measured["retriever/skipped_updates"]
        state = state.replace(star=star, star_opt=star_opt)
    return state.replace(retriever=lora, retriever_opt=opt_state), metrics


def policy_step(config: StepConfig, modules: Modules, frozen: Frozen, state: BridgeState, rollouts: Rollouts, correction=None):
    """The upper level of a step, which also counts it: (state, rollouts) -> (state, metrics). Pure. correction: `policy_update`."""
    policy, opt_state, metrics = policy_update(config, modules, frozen.policy, state.policy, state.policy_opt, rollouts, correction)
    return state.replace(step=state.step + 1, policy=policy, policy_opt=opt_state), metrics


def bridge_step(
    config: StepConfig, modules: Modules, frozen: Frozen, state: BridgeState, batch: Batch
) -> tuple[BridgeState, dict[str, jax.Array]]:
    """(state, batch) -> (state, metrics): the retriever on `batch.turns`, then the policy on `batch.rollouts`. Pure.

    The two updates read disjoint parts of the state, and the rollouts are not resampled in between, so their order shows only in
    the next rollouts; `training.state.Learner` compiles them apart, because their shapes change independently.
    """
    state, metrics = retriever_step(config, modules, frozen, state, batch.turns)
    state, policy_metrics = policy_step(config, modules, frozen, state, batch.rollouts)
    return state, metrics | policy_metrics


def make_step(config: StepConfig, modules: Modules):
    """The compiled `step(frozen, state, batch) -> (state, metrics)`; it takes `state` over (its buffers are reused)."""
    return jax.jit(functools.partial(bridge_step, config, modules), donate_argnums=1)


def _mean(total: jax.Array, count: jax.Array) -> jax.Array:
    """total / count, 0 when nothing was counted."""
    return jnp.where(count > 0, total / jnp.maximum(count, 1), 0.0)
