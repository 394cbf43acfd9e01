"""The compiled programs of a run, on abstract arrays: from a configuration and a target to what `launch/fit.py` compiles.

Every program is the run's own jitted function with the shapes, dtypes and shardings that the run gives it, at the largest lengths
that the configuration allows: full prompts, full responses, the longest observation. Nothing is allocated.

Two meshes, as in a run: training on all chips (`config.mesh`); rollouts and scoring on the chips of one host, weights in the
compute dtype split `config.mesh.rollout_tensor` ways and replicated over the rest, every host alike.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import analytic
import jax
import jax.numpy as jnp
import numpy as np
import targets
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from ml_collections import ConfigDict

from bridge_jax import mesh as meshes
from bridge_jax.errors import UserError
from bridge_jax.models import e5, known, qwen2
from bridge_jax.models.attention_kernels import choose_backend
from bridge_jax.objectives import bilevel, logprobs, ppo_step, scoring
from bridge_jax.rollout import flight, sampler, stopping
from bridge_jax.rollout.protocol import STOP_STRINGS
from bridge_jax.training import batch as batches
from bridge_jax.training import flops, publish
from bridge_jax.training import state as training
from bridge_jax.training.assets import policy_lora, retriever_lora, rollout_config
from bridge_jax.training.credit_stage import scoring_config
from bridge_jax.training.methods import method_of

NAMES = ("publish", "enter", "decode", "append", "widen", "score", "logprobs", "retriever_step", "policy_step")
LEAD, ANSWER = 4, 32  # tokens of "<answer> ", and of a gold answer: longer ones cost time, not memory


@dataclasses.dataclass(frozen=True)
class Program:
    """One program and what is on the chips while it runs.

    fn: the jitted function. args, static: what it is lowered with. chips: of its mesh. live: names of `Plan.resident` that are on
    the chips meanwhile; passed: bytes of them that are among its arguments. model_flops: of the whole program. least_bytes: what a
    chip must move, or 0. steps: turns of its loop, one of which FLOPs and bytes are of. shape: sizes that memory depends on, for
    advice.
    """

    name: str
    fn: Any
    args: tuple
    static: Mapping[str, Any]
    chips: int
    live: tuple[str, ...]
    passed: float
    model_flops: float
    least_bytes: float = 0.0
    steps: int = 1
    shape: Mapping[str, float] = dataclasses.field(default_factory=dict)

    def lower(self):
        return self.fn.lower(*self.args, **self.static)


@dataclasses.dataclass(frozen=True)
class Plan:
    """A run on a target. resident: what stays on a chip, in bytes. notes: what a user should know before the numbers."""

    config: ConfigDict
    target: targets.Target
    model: qwen2.Qwen2Config
    train_mesh: Mesh
    rollout_mesh: Mesh
    resident: dict[str, float]
    programs: dict[str, Callable[[], Program]]
    notes: list[str]


def devices_of(target: targets.Target, shape: str) -> list:
    """Devices to compile for; none of them is there.

    Raises:
      UserError: the compiler is not installed, or does not know the shape.
    """
    if target.chip.platform == "cpu":
        found = jax.devices("cpu")
        if len(found) < target.chips:
            raise UserError(f"--target={target.name}: this process has {len(found)} virtual CPU devices; name the target first")
        return found[: math.prod(map(int, shape.split("x")))]
    try:
        if target.chip.platform == "tpu":
            alone = {"chips_per_host_bounds": (1, 1, 1)} if target.chips == 1 else {}
            name = f"{target.chip.name}:{shape}"
            return list(topologies.get_topology_desc(platform="tpu", topology_name=name, **alone).devices)
        description = targets.gpu_description(target.chip)
        return list(topologies.get_topology_desc(platform="cuda", target_config=description, topology=shape).devices)
    except Exception as error:  # the plugins raise several kinds
        why = " ".join(str(error).split())[:200]
        raise UserError(f"--target={target.name}: the compiler gives no topology {shape} of {target.chip.title} ({why})") from error


def plan(config: ConfigDict, target: targets.Target) -> Plan:
    """What a run of `config` on `target` compiles and holds.

    Raises:
      UserError: a model of unknown shape, a mesh that does not fill the chips, an attention kernel that does not run there.
    """
    return _Builder(config, target).plan()


def rollout_tensor(config: ConfigDict) -> int:
    return config.mesh.get("rollout_tensor", 1)


class _Builder:
    def __init__(self, config: ConfigDict, target: targets.Target):
        self.config, self.target = config, target
        self.shape = known.policy_config(config.policy.model)
        self.encoder_shape = known.encoder_config(config.retriever.encoder)
        self.dtype = jnp.dtype(config.policy.compute_dtype)
        self.full = config.policy.trainable == "full"
        self.train = meshes.make_mesh(config.mesh.data, config.mesh.fsdp, config.mesh.tensor, devices_of(target, target.shape))
        local = self.train.devices.flatten().tolist() if target.hosts == 1 else devices_of(target, target.local_shape)
        ways = rollout_tensor(config)
        if len(local) % ways:
            raise UserError(f"config.mesh.rollout_tensor={ways}: must divide the {len(local)} chips of a host")
        self.rollout = Mesh(np.asarray(local).reshape(-1, 1, ways), meshes.AXES, axis_types=(AxisType.Auto,) * 3)
        self.units = meshes.common_units(self.shape.units, self.encoder_shape.units)
        self.lora = policy_lora(config)
        self.settings = training.step_config(config)
        adapter = retriever_lora(config, self.encoder_shape)
        self.encoder = e5.make_module(self.encoder_shape, "mean", jnp.float32, adapter, self.train)
        self.policy = self._model(self.train)
        self.modules = bilevel.Modules(self.policy, self.encoder, *bilevel.make_optimizers(self.settings))

    def _model(self, mesh: Mesh) -> qwen2.Qwen2:
        chip = self.target.chip
        capability = f"{chip.gpu[1]}.{chip.gpu[2]}" if chip.gpu else ""
        device = SimpleNamespace(platform=chip.platform, compute_capability=capability)
        attention = choose_backend(self.config.policy.attention, device, self.dtype, self.shape.head_dim)
        return qwen2.Qwen2(self.shape, self.dtype, self.lora, self.config.policy.remat, mesh, attention)

    def plan(self) -> Plan:
        config = self.config
        base = self._place(_cast(qwen2.abstract_params(self.shape), jnp.float32 if self.full else self.dtype), self.train)
        encoder = self._place(e5.abstract_params(self.encoder_shape), self.train)
        make = functools.partial(training.make_state, config, self.settings, self.modules)
        self.state = self._place(jax.eval_shape(make, base, encoder), self.train)
        reference = self._reference(base)
        self.frozen = bilevel.Frozen(reference, encoder)
        self.variables = self._published(self.rollout)
        self.sampler, self.decoding = self._decoding()
        resident = {
            "training state": shard_bytes(self.state),
            "reference" if self.full else "base weights": shard_bytes(reference),
            "encoder": shard_bytes(encoder) + self._searching(encoder),
            "published weights": self._published_bytes(),
            "cache": shard_bytes(self.decoding),
            # New keys and the old values, while the new values are made; and all that does not grow.
            "widening": shard_bytes(self.decoding) - shard_bytes(self.decoding.private.v) + shard_bytes(self._old_block()),
        }
        programs = {name: getattr(self, f"_{name}") for name in NAMES}
        if not method_of(self.config).trains_retriever:
            del programs["score"], programs["retriever_step"]
        args = self.config, self.target, self.shape, self.train, self.rollout
        return Plan(*args, resident, programs, self._notes())

    def _notes(self) -> list[str]:
        config, notes = self.config, []
        ways = meshes.batch_ways(self.train)
        if config.grpo.microbatch % ways:
            notes.append(
                f"config.grpo.microbatch={config.grpo.microbatch} does not split over {ways} chips: each computes every row; use a "
                f"multiple of {ways}"
            )
        if config.train.questions % self.target.hosts:
            notes.append(f"config.train.questions={config.train.questions} does not split over {self.target.hosts} hosts")
        if self.shape.num_kv_heads % rollout_tensor(config):
            notes.append(
                f"config.mesh.rollout_tensor={rollout_tensor(config)}: the model has {self.shape.num_kv_heads} key/value heads: "
                "every chip holds all of the cache of its rows"
            )
        if self.settings.estimator != "one_state":
            notes.append(f"method {config.method.name}: its backward pass through document scoring is not among the programs")
        return notes

    # --- what is on the chips

    def _place(self, tree, mesh: Mesh):
        """Shapes with the shardings that a run gives them."""
        placed = meshes.shardings(mesh, tree, self.units)
        return jax.tree.map(lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), tree, placed)

    def _searching(self, encoder) -> float:
        """The encoder that searches lies on the rollout mesh; on a single chip it is the one that learns."""
        return shard_bytes(self._place(encoder, self.rollout)) if self.target.chips > 1 else 0.0

    def _reference(self, base):
        if not self.full:
            return base
        if (self.config.ppo.kl_coef if self.config.policy.algorithm == "ppo" else self.config.grpo.kl_coef) == 0:
            return None
        return self._place(_cast(base, self.dtype), self.train)

    def _published(self, mesh: Mesh) -> dict:
        params = self._place(_cast(qwen2.abstract_params(self.shape), self.dtype), mesh)
        return {"params": params} if self.full else {"params": params, "lora": self._place(self.state.policy, mesh)}

    def _published_bytes(self) -> float:
        if not self.full and self.target.chips == 1:
            return 0.0  # the adapter and the base weights are the trainer's own
        return shard_bytes(self.variables)

    def _decoding(self):
        config, mesh = rollout_config(self.config), self.rollout
        transitions, accepting = stopping.byte_automaton([stop.encode() for stop in STOP_STRINGS])
        table = stopping.StopTable(np.zeros((len(transitions), self.shape.vocab_size), np.int8), accepting, ())
        options = {"top_p": config.top_p, "top_k": config.top_k, "min_new_tokens": config.min_new_tokens}
        made = sampler.Sampler(self._model(mesh), table, self.shape.eos_token_ids, **options)
        self.groups, self.width = config.batch_groups, flight.private_widths(config)[-1]
        self.rows, self.prompt = self.groups * self.config.grpo.group_size, config.max_prompt_tokens
        sizes = {"groups": self.groups, "rows": self.rows, "prompt_width": self.prompt, "width": self.width}
        state = jax.eval_shape(functools.partial(made._empty_impl, **sizes))
        return made, jax.tree.map(lambda x: self._array(x.shape, x.dtype, mesh, sampler.rows_spec(x.ndim)), state)

    def _array(self, shape, dtype, mesh: Mesh, spec: P | None = None):
        """spec: entries that do not divide are dropped, as `mesh.constrain` does."""
        spec = spec or P()
        padded = (*spec, *(None,) * (len(shape) - len(spec)))[: len(shape)]
        ways = [math.prod(mesh.shape[a] for a in ((s,) if isinstance(s, str) else s or ())) for s in padded]
        kept = P(*(s if size % w == 0 else None for s, w, size in zip(padded, ways, shape)))
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, kept))

    def _old_block(self):
        """Keys, or values, at the width before the greatest."""
        *_, before, _ = (0, *flight.private_widths(rollout_config(self.config)))
        block = self.decoding.private.k
        shape = *block.shape[:2], before or self.width, *block.shape[3:]
        return self._array(shape, block.dtype, self.rollout, sampler.rows_spec(5))

    # --- programs

    def _held(self, *more: str) -> tuple[str, ...]:
        """What is on the chips in every phase, and more."""
        return ("training state", "reference" if self.full else "base weights", "encoder", *more)

    def _publish(self) -> Program:
        """The largest parameter of the policy from the training layout into the rollout layout and the compute dtype.

        Each has a program of its own; beside the last ones lie all others, published.
        """
        policy, dtype = self.state.policy, self.dtype if self.full else None
        programs = publish.programs(self.train, rollout_tensor(self.config), policy, self.units, dtype)[0]
        pairs = zip(jax.tree.leaves(programs), jax.tree.leaves(policy), strict=True)
        fn, largest = max(pairs, key=lambda pair: shard_bytes(pair[1]))
        live = self._held("published weights")
        return Program("publish", fn, (largest,), {}, self.target.chips, live, shard_bytes(largest), 0.0)

    def _rollout(self, name: str, fn, args: tuple, static: dict, model_flops: float, **more) -> Program:
        live, passed = self._held("published weights", "cache"), shard_bytes(args[:3])
        return Program(name, fn, args, static, self.rollout.size, live, passed, model_flops, **more)

    def _enter(self) -> Program:
        """Prompts of a part of the batch read into the shared block."""
        entering = flight.a_part(self.groups, meshes.batch_ways(self.rollout))
        samples = entering * self.config.grpo.group_size
        integers = [(entering, self.prompt), (entering,), (entering,), (samples,), (samples,)]
        given = [self._array(shape, jnp.int32, self.rollout) for shape in integers]
        model_flops = analytic.forward(self.shape, entering * self.prompt, entering * flops.causal(self.prompt), 0)
        fn = self.sampler._enter
        return self._rollout(
            "enter", fn, (self.variables, self.decoding, *given), {}, model_flops, shape={"rows": entering, "columns": self.prompt}
        )

    def _decode(self) -> Program:
        """A chunk of decoding at the widest cache; FLOPs and bytes are those of one step."""
        key = jax.eval_shape(lambda: jax.random.key(0))
        table = self._array(self.sampler._next_state.shape, jnp.int8, self.rollout)
        args = (
            self.variables,
            table,
            self.decoding,
            self._array((), key.dtype, self.rollout),
            self._array((), jnp.float32, self.rollout),
        )
        model_flops = analytic.forward(self.shape, self.rows, self.rows * (self.width + self.prompt), self.rows)
        weights = shard_bytes(self.variables)
        if not self.shape.tie_embeddings:
            weights -= shard_bytes(self.variables["params"]["embed"])  # a row a token
        least = weights + shard_bytes((self.decoding.shared, self.decoding.private))
        steps = self.config.rollout.chunk
        return self._rollout("decode", self.sampler._decode, args, {"steps": steps}, model_flops, least_bytes=least, steps=steps)

    def _append(self) -> Program:
        """The longest observations appended to a part of the rows."""
        rows = flight.a_part(self.rows, meshes.batch_ways(self.rollout), flight.LEAST_ROWS)
        length = self.config.rollout.max_observation_tokens
        given = [self._array(shape, jnp.int32, self.rollout) for shape in ((rows,), (rows, length), (rows,), (rows,))]
        pairs = rows * flops.causal(length, self.prompt + self.width - length)
        model_flops = analytic.forward(self.shape, rows * length, pairs, 0)
        shape = {"rows": rows, "columns": self.prompt + self.width}
        return self._rollout("append", self.sampler._append, (self.variables, self.decoding, *given), {}, model_flops, shape=shape)

    def _widen(self) -> Program:
        """Keys (then values) moved into a block of the greatest width, while both old ones are there."""
        old = self._old_block()
        before = old.shape[2]
        order = self._array((self.rows, before), jnp.int32, self.rollout, sampler.rows_spec(2))
        live, passed = self._held("published weights", "widening"), shard_bytes(old)
        return Program("widen", self.sampler._move, (old, order), {"width": self.width}, self.rollout.size, live, passed, 0.0)

    def _score(self) -> Program:
        """A batch of turns with all candidates, after the longest history, at the longest documents."""
        settings, limits = scoring_config(self.config), self.config.rollout
        ways = meshes.batch_ways(self.rollout)
        U, C = -(-settings.turns_per_batch // ways) * ways, self.config.rollout.candidates * settings.golds
        history = scoring._width(limits.max_prompt_tokens + limits.max_response_tokens, 32, 2)
        document = min(limits.max_observation_tokens, limits.max_passage_tokens or limits.max_observation_tokens)
        length, rows = scoring._width(document + LEAD + ANSWER, 4, 4), meshes.BATCH
        arrays = {
            name: self._array(shape, dtype, self.rollout, P(rows))
            for name, shape, dtype in (
                ("history", (U, history), jnp.int32),
                ("history_valid", (U, history), jnp.bool_),
                ("continuation", (U, C, length), jnp.int32),
                ("continuation_valid", (U, C, length), jnp.bool_),
                ("answer_mask", (U, C, length), jnp.bool_),
            )
        }
        options = {"answer_tokens": ANSWER, "chunk": settings.chunk, "pairs": settings.pairs_at_once}
        pairs = U * flops.causal(history) + U * C * flops.causal(length, history)
        model_flops = analytic.forward(self.shape, U * history + U * C * length, pairs, U * C * ANSWER)
        args, live = (self._model(self.rollout), self.variables), self._held("published weights")
        shape = {"turns": U / ways, "history": history, "continuation": length}
        return Program(
            "score",
            scoring._score,
            args,
            arrays | options,
            self.rollout.size,
            live,
            shard_bytes(self.variables),
            model_flops,
            shape=shape,
        )

    def _rows(self, leading: tuple[int, ...] = ()):
        limit, rows = self._limit(), self.config.grpo.microbatch
        width = batches.row_widths(limit, limit)[-1]
        split = meshes.BATCH if rows % meshes.batch_ways(self.train) == 0 else None
        spec = P(*(None,) * len(leading), split)
        return lambda dtype: self._array((*leading, rows, width), dtype, self.train, spec), rows, width

    def _limit(self) -> int:
        return self.config.rollout.max_prompt_tokens + self.config.rollout.max_response_tokens

    def _train_shape(self, rows: int, width: int) -> dict[str, float]:
        ways = meshes.batch_ways(self.train)
        local = rows / ways if rows % ways == 0 else rows
        tensor = self.train.shape["tensor"]
        heads = self.shape.num_heads / (tensor if self.shape.num_heads % tensor == 0 else 1)
        return {"rows": rows, "local_rows": local, "ways": ways, "width": width, "logits": 4 * heads * width**2}

    def _logprobs(self) -> Program:
        """One micro-batch's log-probs by the reference policy: a part of the policy's step, alone."""
        of, rows, width = self._rows()
        params = self.frozen.policy if self.frozen.policy is not None else self.state.policy
        fn = jax.jit(functools.partial(logprobs.sequence_logps, self.policy, chunk=self.settings.chunk))
        args = {"params": params}, of(jnp.int32)
        static = {"positions": of(jnp.int32), "segment_ids": of(jnp.int32)}
        model_flops = analytic.forward(self.shape, rows * width, rows * flops.causal(width), rows * width)
        live, shape = self._held("published weights"), self._train_shape(rows, width)
        return Program("logprobs", fn, args, static, self.target.chips, live, shard_bytes(params), model_flops, shape=shape)

    def _policy_step(self) -> Program:
        """All minibatches of a step, every row a rollout of the greatest length."""
        config = self.config
        rollouts = config.grpo.minibatch_questions * config.grpo.group_size
        leading = config.train.questions // config.grpo.minibatch_questions, rollouts // config.grpo.microbatch
        of, rows, width = self._rows(leading)
        whole, real, flags = of(jnp.int32), of(jnp.float32), of(jnp.bool_)
        batch = bilevel.Rollouts(whole, whole, whole, flags, real, real, rewards=real)
        ppo = config.policy.algorithm == "ppo"
        step = ppo_step.policy_step if ppo else bilevel.policy_step
        fn = jax.jit(functools.partial(step, self.settings, self.modules), donate_argnums=1, out_shardings=self._kept())
        args = (self.frozen, self.state, batch)
        reference = self.frozen.policy is not None and (config.grpo.kl_coef > 0 or ppo)
        model_flops = analytic.training(self.shape, math.prod(leading) * rows, width, not self.full, reference)
        live, passed = self._held("published weights"), shard_bytes((self.state, self.frozen.policy))
        return Program(
            "policy_step", fn, args, {}, self.target.chips, live, passed, model_flops, shape=self._train_shape(rows, width)
        )

    def _kept(self):
        """A step's state lies after it as it did before; metrics anywhere."""
        return jax.tree.map(lambda x: x.sharding, self.state), None

    def _retriever_step(self) -> Program:
        """The query tower's minibatches over all turns a step may credit."""
        U, C = batches.turn_rows(self.config), self.config.rollout.candidates
        T, D = e5.padded_length(self.config.retriever.max_length, self.config.retriever.max_length), self.encoder_shape.hidden_size
        rows = P(meshes.BATCH) if U % meshes.batch_ways(self.train) == 0 else P()

        def of(shape, dtype):
            return self._array(shape, dtype, self.train, rows)

        turns = bilevel.Turns(
            of((U, T), jnp.int32), of((U, T), jnp.int32), of((U, C, D), jnp.float32), of((U, C), jnp.bool_),
            of((U, C), jnp.float32), of((U,), jnp.float32), of((U,), jnp.bool_),
        )  # fmt: skip
        fn = jax.jit(
            functools.partial(bilevel.retriever_step, self.settings, self.modules), donate_argnums=1, out_shardings=self._kept()
        )
        # Forward, its gradient, and the base's forward.
        model_flops = 3 * self.config.credit.epochs * analytic.encoding(self.encoder_shape, U, T)
        args, live = (self.frozen, self.state, turns), self._held("published weights")
        passed = shard_bytes((self.frozen.encoder, self.state.retriever, self.state.retriever_opt))  # jit drops what is not read
        return Program("retriever_step", fn, args, {}, self.target.chips, live, passed, model_flops)


def _cast(params, dtype):
    return jax.eval_shape(lambda p: publish.in_dtype(p, dtype), params)


def shard_bytes(tree) -> float:
    """Bytes of one chip's part of abstract arrays."""
    total = 0.0
    for x in jax.tree.leaves(tree):
        if not isinstance(x, jax.ShapeDtypeStruct):
            continue  # a static argument
        size = 4 if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x.dtype.itemsize
        total += math.prod(x.sharding.shard_shape(x.shape)) * size
    return total
