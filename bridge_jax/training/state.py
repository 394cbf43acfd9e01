"""From a configuration to the parts of `objectives.bilevel`: step settings, modules, frozen weights, the state at step 0."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
from ml_collections import ConfigDict

from bridge_jax.mesh import common_units, shardings
from bridge_jax.models.lora import init_lora
from bridge_jax.models.value import init_critic
from bridge_jax.objectives import bilevel, ppo_step, two_state
from bridge_jax.objectives.grpo import GRPOConfig
from bridge_jax.objectives.ppo import PPOConfig
from bridge_jax.objectives.rag import RetrieverLossConfig
from bridge_jax.training import batch as batches
from bridge_jax.training.assets import Assets, policy_lora, retriever_lora
from bridge_jax.training.methods import method_of
from bridge_jax.training.publish import Publisher, in_dtype

# A token's log-prob, the sampler's against the trainer's, by rounding alone: a change below it is no change.
LOGP_GAP = {"float32": 1e-4, "bfloat16": 1e-2}


def grpo_config(config: ConfigDict) -> GRPOConfig:
    g = config.grpo
    return GRPOConfig(
        clip_low=g.clip_low,
        clip_high=g.clip_high,
        dual_clip=g.dual_clip or None,  # 0 = off
        kl_coef=0.0 if _ppo(config) else g.kl_coef,
        aggregation=g.aggregation,
        normaliser=float(config.rollout.max_response_tokens),
        llds=g.llds,
        llds_gate=g.llds_gate,
        llds_slack=LOGP_GAP[config.policy.compute_dtype],
    )


def retriever_loss_config(config: ConfigDict) -> RetrieverLossConfig | None:
    """None where the method leaves the retriever alone."""
    method, c = method_of(config), config.credit
    if not method.trains_retriever:
        return None
    return RetrieverLossConfig(
        tau=c.tau,
        gamma=c.gamma,
        use_outcome=method.use_outcome,
        use_rag=method.use_rag,
        distil=method.distil,
        likelihood_tau=c.likelihood_tau,
        clamp_negative=c.clamp_negative,
        anchor=c.anchor,
        credit_shown=config.rollout.shown if c.shown_only else 0,
    )


def ppo_config(config: ConfigDict) -> PPOConfig | None:
    p = config.ppo
    return PPOConfig(p.gae_lambda, p.discount, p.kl_coef, p.value_clip) if _ppo(config) else None


def _ppo(config: ConfigDict) -> bool:
    return config.policy.algorithm == "ppo"


def step_config(config: ConfigDict) -> bilevel.StepConfig:
    """The settings of a step that also updates the retriever (where the method does)."""
    g, c, p = config.grpo, config.credit, config.ppo
    return bilevel.StepConfig(
        grpo=grpo_config(config),
        policy_optimizer=bilevel.OptimizerConfig(g.lr, g.weight_decay, g.grad_clip, g.warmup_steps),
        trainable=config.policy.trainable,
        pairs=c.pairs_at_once,
        retriever=retriever_loss_config(config),
        retriever_optimizer=bilevel.OptimizerConfig(c.lr, c.weight_decay, c.grad_clip, c.warmup_steps),
        turn_minibatch=c.minibatch,
        turn_epochs=c.epochs,
        estimator=method_of(config).estimator,
        ppo=ppo_config(config),
        critic_optimizer=bilevel.OptimizerConfig(p.critic_lr, g.weight_decay, g.grad_clip, p.critic_warmup_steps),
    )


class Learner:
    """The compiled halves of a run's step (`bilevel.bridge_step`) and what they read. Both halves take the state over.

    They run on the training mesh, under a transfer guard: all they read is on the devices before they start. Each leaf of the state
    has a declared sharding (`mesh.shardings`), before a step and after it.
    """

    def __init__(self, config: ConfigDict, assets: Assets):
        self.config, self.assets = config, assets
        settings = step_config(config)
        self.modules = bilevel.Modules(assets.policy, assets.tower.module, *bilevel.make_optimizers(settings))
        self._settings = settings
        self._units = common_units(assets.policy.config.units, assets.tower.module.config.units)
        self._frozen = bilevel.Frozen(_reference(config, assets), assets.tower.params)
        self._shardings = None if assets.mesh is None else shardings(assets.mesh, self.abstract_state(), self._units)
        placed, whole = {}, {}
        if assets.mesh is not None:
            placed = {"out_shardings": (self._shardings, None)}
            whole = {"out_shardings": jax.NamedSharding(assets.mesh, jax.P())}
        self._retriever = jax.jit(functools.partial(bilevel.retriever_step, settings, self.modules), donate_argnums=1, **placed)
        policy_step = ppo_step.policy_step if _ppo(config) else bilevel.policy_step
        self._policy = jax.jit(functools.partial(policy_step, settings, self.modules), donate_argnums=1, **placed)
        self._weights = jax.jit(functools.partial(two_state.correction_weights, settings, self.modules), **whole)
        self._publish = Publisher(assets.mesh, assets.rollout_mesh, self._units)
        # Frozen, so published once: what the policy's LoRA acts on.
        self._base = self._publish(assets.base_params) if config.policy.trainable == "lora" else None

    def use(self, assets: Assets) -> None:
        """Another encoder of the same shape: what is compiled stays."""
        self.assets, self._frozen = assets, self._frozen.replace(encoder=assets.tower.params)

    @property
    def trains_retriever(self) -> bool:
        return method_of(self.config).trains_retriever

    def abstract_state(self) -> bilevel.BridgeState:
        """The state's shapes and dtypes."""
        return jax.eval_shape(self._make, self.assets.base_params, self.assets.tower.params)

    def _make(self, policy, encoder) -> bilevel.BridgeState:
        return make_state(self.config, self._settings, self.modules, policy, encoder)

    def init(self) -> bilevel.BridgeState:
        """The state before the first step, on the training mesh (or committed to the device, as a restored one is: the programs
        compiled for one then serve the other)."""
        trees = self.assets.base_params, self.assets.tower.params
        if self._shardings is None:
            return jax.device_put(self._make(*trees), jax.local_devices()[0])
        return jax.jit(self._make, out_shardings=self._shardings)(*trees)

    def retriever_step(self, state: bilevel.BridgeState, turns: bilevel.Turns) -> tuple[bilevel.BridgeState, dict[str, float]]:
        """-> (state, metrics)"""
        placed = batches.place(turns, self.assets.mesh)
        with jax.transfer_guard("disallow"):
            state, metrics = self._retriever(self._frozen, state, placed)
        return state, _floats(metrics)

    def correction(self, state: bilevel.BridgeState, turns: bilevel.Turns, owners, scored):
        """-> (what `policy_step` adds to the policy's gradient, metrics). owners, scored: as in `two_state.correction`."""
        weights = jax.device_get(self._weights(self._frozen, state, batches.place(turns, self.assets.mesh)))
        turns_in = int(turns.mask.sum())
        added = two_state.correction(self._settings, self.modules, self._frozen, state.policy, weights, owners, turns_in, scored)
        return added, {
            "two_state/weight_change": float(np.abs(weights).sum() / max(turns_in, 1)),
            "two_state/correction_norm": float(optax.tree.norm(added)),
        }

    def policy_step(
        self, state: bilevel.BridgeState, rollouts: bilevel.Rollouts, correction=None
    ) -> tuple[bilevel.BridgeState, dict[str, float]]:
        """-> (state, metrics)"""
        added = () if correction is None else (correction,)
        placed = batches.place(rollouts, self.assets.mesh)
        with jax.transfer_guard("disallow"):
            state, metrics = self._policy(self._frozen, state, placed, *added)
        return state, _floats(metrics)

    def keep_policy(self, state: bilevel.BridgeState) -> bilevel.BridgeState:
        """The state after a step in which the policy does not learn: `policy_step` without its update."""
        return state.replace(step=state.step + 1)

    def policy_variables(self, state: bilevel.BridgeState) -> dict:
        """What `rollout_policy.apply` takes: the policy published in its compute dtype (the values the trainer computes with)."""
        if self.config.policy.trainable == "lora":
            return {"params": self._base, "lora": self._publish(state.policy)}
        return {"params": self._publish(state.policy, self.assets.policy.dtype)}

    def retriever_lora(self, state: bilevel.BridgeState):
        """The query tower's adapter, published; or None (the base tower, bit for bit) where the method leaves it alone."""
        return self._publish(state.retriever) if self.trains_retriever else None

    def compilations(self) -> int:
        own = (self._retriever, self._policy, self._weights)
        return sum(program._cache_size() for program in own) + two_state.compilations()


def make_state(config: ConfigDict, settings: bilevel.StepConfig, modules: bilevel.Modules, policy, encoder) -> bilevel.BridgeState:
    """The state before the first step: the policy as loaded (or B = 0), the retriever's LoRA with B = 0; PPO's critic. Traceable.

    policy, encoder: parameters as loaded; copied, where they are trained, since a step takes its state over.
    """
    key = jax.random.key(config.train.seed)
    full = config.policy.trainable == "full"
    if full:
        trained = jax.tree.map(lambda x: jnp.array(x, jnp.float32, copy=True), policy)
    else:
        trained = init_lora(jax.random.fold_in(key, 1), policy, policy_lora(config))
    retriever = init_lora(jax.random.fold_in(key, 2), encoder, retriever_lora(config, modules.encoder.config))
    critic = None
    if _ppo(config):
        critic = init_critic(jax.random.fold_in(key, 4), policy, None if full else policy_lora(config))
    state = bilevel.init_state(modules, trained, retriever, jax.random.fold_in(key, 3), critic)
    return two_state.with_star(modules, state) if settings.estimator == "two_state" else state


def _reference(config: ConfigDict, assets: Assets):
    """Frozen policy weights a step reads: the base under the LoRA (also the reference), or a compute-dtype copy for the KL term."""
    if config.policy.trainable == "lora":
        return assets.base_params
    if (config.ppo.kl_coef if _ppo(config) else config.grpo.kl_coef) == 0:
        return None
    placed = {} if assets.mesh is None else {"out_shardings": jax.tree.map(lambda x: x.sharding, assets.base_params)}
    return jax.jit(functools.partial(in_dtype, dtype=assets.policy.dtype), **placed)(assets.base_params)


def _floats(metrics: dict[str, jax.Array]) -> dict[str, float]:
    return {name: float(value) for name, value in jax.device_get(metrics).items()}


def fingerprint(config: ConfigDict, assets: Assets) -> dict[str, object]:
    """What a checkpoint must share with the run that restores it."""
    c = assets.policy.config
    adapter = (
        (config.policy.lora_rank, config.policy.lora_alpha, *sorted(config.policy.lora_targets))
        if config.policy.trainable == "lora"
        else ()
    )
    return {
        "policy": f"{c.model_type} {c.num_layers} layers x {c.hidden_size}, vocabulary {c.vocab_size}",
        "policy_weights": assets.policy_fingerprint,
        "trainable": " ".join(map(str, (config.policy.trainable, *adapter))),
        "encoder": assets.encoder.fingerprint[:16],
        "retriever_lora": f"{config.retriever.lora_rank} {config.retriever.lora_alpha}",
        "method": config.method.name,
        "algorithm": config.policy.algorithm,
    }
