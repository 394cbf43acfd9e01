"""The training loop (METHOD 4): rollouts, reward, document scoring, the pure step; evaluation, checkpoints, logs.

A step depends on (state, step, seed) alone. Whatever a kill destroys is what the last whole checkpoint does not hold; the same
command does it again with the same numbers.
"""

from __future__ import annotations

import contextlib
import json
import logging
import time
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np
from ml_collections import ConfigDict

from bridge_jax import config as configuration
from bridge_jax.data.prompts import build_prompt
from bridge_jax.data.qa import load_questions
from bridge_jax.data.stream import Mixture, QuestionStream
from bridge_jax.errors import UserError
from bridge_jax.files import write_text
from bridge_jax.models import pocket_models, qwen2
from bridge_jax.models.lora import merge_lora, save_peft
from bridge_jax.objectives import rewards, scoring
from bridge_jax.objectives.bilevel import BridgeState
from bridge_jax.objectives.grpo import group_advantages, informative_groups
from bridge_jax.training import batch as batches
from bridge_jax.training.assets import Assets, load_assets, policy_lora, policy_source, retriever_lora
from bridge_jax.training.checkpoints import Checkpoints
from bridge_jax.training.credit_stage import CreditStage
from bridge_jax.training.display import Display
from bridge_jax.training.episode_metrics import rollout_rows, step_metrics
from bridge_jax.training.methods import method_of, stage_of, total_steps
from bridge_jax.training.metrics import RunLog, read_metrics
from bridge_jax.training.session import claim
from bridge_jax.training.state import Learner, fingerprint
from bridge_jax.training.workdir import exclusive, written_field

log = logging.getLogger(__name__)

# (assets, policy_variables, retriever_lora) -> evaluation result with ["averages"]["overall"]["em"]
Evaluate = Callable[[Assets, dict, dict | None], dict]


def run(config: ConfigDict, workdir: Path, evaluate: Evaluate) -> Path:
    """Train, or go on training, in `workdir`. Returns it.

    Args:
      evaluate: greedy evaluation; called before the first step, every `config.train.eval_every` steps and at the end.

    Raises:
      UserError: a workdir of another configuration; missing models, data or index; too many non-finite updates in a row.
    """
    workdir = Path(workdir)
    claim(config, workdir, write=False)
    stream = QuestionStream(training_mixture(config), config.train.questions, config.train.seed)
    assets = load_assets(config, workdir)
    learner = Learner(config, assets)
    state = learner.init()
    build_prompt(stream.batch_at(0)[0], assets.tokenizer, config.rollout.prompt)  # an unknown style is told before the claim
    with exclusive(workdir):
        every = max(config.train.checkpoint_every, written_field(workdir, "train.checkpoint_every", 0))
        checkpoints = Checkpoints(workdir / "checkpoints", config.train.keep, fingerprint(config, assets))
        start = checkpoints.latest() or 0
        _refuse_lost_checkpoints(workdir, start, every)
        claim(config, workdir)
        if start:
            state = checkpoints.restore(start, state)
        return _train(config, workdir, evaluate, assets, learner, state, stream, checkpoints, start)


def _train(config, workdir, evaluate, assets, learner, state, stream, checkpoints: Checkpoints, start: int) -> Path:
    run_log = RunLog(workdir, start, config.train.tensorboard, config.train.wandb, configuration.flatten(config))
    loop = Loop(config, assets, learner, stream, run_log)
    total = total_steps(config)

    with contextlib.closing(checkpoints), Display(total, start) as display:
        if start:
            display.say(f"{workdir}: going on after step {start}")
        _evaluation(workdir, start, evaluate, learner, state, display, only_if_missing=True)
        for step in range(start + 1, total + 1):
            state, metrics = loop.step(step, state)
            score = None
            ends_stage = step % config.train.steps == 0
            if ends_stage or (config.train.eval_every and step % config.train.eval_every == 0):
                score = _evaluation(workdir, step, evaluate, learner, state, display)
                metrics["eval/em"] = score
            run_log.write({"step": step, **metrics})
            loop.check(step, metrics, display)
            if score is not None or step % config.train.checkpoint_every == 0:
                checkpoints.save(step, state, score)
            display.step(step, metrics)
        checkpoints.wait()
        export(workdir, config, assets, state)
        display.say(f"done: policy in {workdir / 'policy'}, retriever LoRA in {workdir / 'retriever'}, metrics in {run_log.path}")
    return workdir


def _refuse_lost_checkpoints(workdir: Path, start: int, every: int) -> None:
    """Metrics far beyond the newest checkpoint mean that checkpoints are gone: going on would delete what they were measured on.

    every: steps between checkpoints while those metrics were written.
    """
    rows = read_metrics(workdir / "metrics.jsonl")
    last = rows[-1]["step"] if rows else 0
    if last - start > 2 * every:  # the newest may have been on its way to disk
        raise UserError(
            f"{workdir / 'metrics.jsonl'} goes to step {last}, but the newest checkpoint is of step {start}: put the missing ones "
            "back, or use another --workdir"
        )
    if len([row for row in rows if row["step"] <= start]) < start:
        log.warning("%s lacks some of the steps up to %d: it was damaged", workdir / "metrics.jsonl", start)


def training_mixture(config: ConfigDict) -> Mixture:
    """The questions of `config.data.train`, weighted by `config.data.weights` or by size."""
    parts = tuple(load_questions(source, config.data.train_split) for source in config.data.train)
    weights = tuple(map(float, config.data.weights)) or tuple(float(len(part)) for part in parts)
    return Mixture(tuple(config.data.train), parts, weights)


# Over the run, for comparing methods at equal cost: phases of one step, each of several optimiser steps; and sampled rollouts.
COUNTS = ("count/policy_updates", "count/retriever_updates", "count/rollouts")


class Loop:
    """One step of a run; holds what steps share."""

    def __init__(self, config: ConfigDict, assets: Assets, learner: Learner, stream: QuestionStream, log: RunLog):
        self.config, self.assets, self.learner, self.stream, self.log = config, assets, learner, stream, log
        self._key = jax.random.key(config.train.seed)
        self._credit = CreditStage(config, assets)
        self._gap_limit = 1e-3 if config.policy.compute_dtype == "float32" else 2e-2
        self._skipped = 0  # steps in a row with a skipped update; a resumed run reads them and the counts back
        self._counts = dict.fromkeys(COUNTS, 0)
        for row in read_metrics(log.path):
            self._count_skipped(row)
            self._counts |= {name: row[name] for name in COUNTS if name in row}

    def step(self, step: int, state: BridgeState) -> tuple[BridgeState, dict[str, float]]:
        """Step number `step` (from 1): -> (state, metrics). The old state is consumed."""
        config, assets, learner = self.config, self.assets, self.learner
        number, within = stage_of(config, step)
        method = method_of(config)
        stage = method.stages[number - 1]
        clock = _Clock()

        variables = learner.policy_variables(state)
        jax.block_until_ready(variables)
        clock.lap("publish")

        questions = self.stream.batch_at(within - 1)  # the same in every stage, and in every method
        episodes, metrics = assets.engine.run(
            variables,
            questions,
            prompts=[build_prompt(q, assets.tokenizer, config.rollout.prompt) for q in questions],
            group_size=config.grpo.group_size,
            key=jax.random.fold_in(self._key, step),
            temperature=config.rollout.temperature,
            retriever_lora=learner.retriever_lora(state),
        )
        clock.lap("rollout")

        judged = [
            rewards.score_episode(e.answer, e.status, e.question.golds, any(turn.shown for turn in e.turns)) for e in episodes
        ]
        scores, reasons = np.asarray([score for score, _ in judged], np.float32), [reason for _, reason in judged]
        groups = scores.reshape(-1, config.grpo.group_size)
        valid = np.asarray([e.status != "environment_fault" for e in episodes]).reshape(groups.shape)
        advantages = np.asarray(group_advantages(groups, config.grpo.advantage, valid)).reshape(-1)
        metrics |= {"stage": number, **step_metrics(episodes, scores, reasons, valid, assets.corpus)}
        self._counts["count/rollouts"] += len(episodes)

        scored, correction = {}, None
        if stage.retriever and within % config.credit.period == 0:
            credited, measured = self._credit(step, variables, episodes, scores, advantages)
            metrics |= measured
            scored = credited.by_turn()
            clock.lap("score")
            state, learned = learner.retriever_step(state, credited.turns)
            metrics |= {name: float(value) for name, value in learned.items()}
            clock.lap("retriever")
            self._counts["count/retriever_updates"] += 1
            if method.estimator != "one_state":
                again = self._credit.scorer.batches(credited.requests)
                correction, measured = learner.correction(state, credited.turns, credited.owners, again)
                metrics |= {name: float(value) for name, value in measured.items()}
                clock.lap("correction")

        if stage.policy:
            trained = valid.copy()
            if config.grpo.filter_zero_advantage:
                trained &= np.asarray(informative_groups(groups, valid))[:, None]
            rollouts = batches.pack_rollouts(config, assets.mesh, episodes, scores, advantages, trained.reshape(-1))
            metrics["policy/packing_fill"] = batches.packing_fill(rollouts)
            state, learned = learner.policy_step(state, rollouts, correction)
            metrics |= {name: float(value) for name, value in learned.items()}
            clock.lap("policy")
            self._counts["count/policy_updates"] += 1
        else:
            state = learner.keep_policy(state)
        if config.train.log_rollouts_every and step % config.train.log_rollouts_every == 0:
            rows = rollout_rows(step, episodes, scores, reasons, advantages, assets.corpus, scored, config.credit.tau)
            self.log.write_rollouts(step, rows)
        metrics |= clock.seconds()
        metrics |= self._counts
        metrics["epoch"] = self.stream.epoch_at(within)
        metrics["compilations/update"], metrics["compilations/score"] = learner.compilations(), scoring.compilations()
        return state, metrics

    def check(self, step: int, metrics: dict, display: Display) -> None:
        """Warn when sampler and trainer disagree; stop a run that only produces non-finite gradients.

        Raises:
          UserError: `config.train.max_skipped_updates` steps in a row had a skipped update.
        """
        if metrics.get("gap/logp_max", 0.0) > self._gap_limit:
            display.say(
                f"warning: step {step}: the sampler's and the trainer's log-probs differ by up to {metrics['gap/logp_max']:.1e} "
                f"(gap/logp_max; expected below {self._gap_limit:.0e}): importance ratios are off"
            )
        self._count_skipped(metrics)
        if self._skipped >= self.config.train.max_skipped_updates:
            raise UserError(
                f"step {step}: non-finite gradients in {self._skipped} steps in a row; the newest checkpoint is good: lower "
                "config.grpo.lr, config.credit.lr or config.ppo.critic_lr and go on in a copy of this workdir"
            )

    def _count_skipped(self, row: dict) -> None:
        skipped = sum(row.get(f"{part}/skipped_updates") or 0.0 for part in ("policy", "retriever", "ppo"))
        self._skipped = self._skipped + 1 if skipped else 0


class _Clock:
    """Seconds between laps, as metrics `time/<name>`."""

    def __init__(self):
        self._start = self._last = time.monotonic()
        self._laps: dict[str, float] = {}

    def lap(self, name: str) -> None:
        now = time.monotonic()
        self._laps[f"time/{name}"] = now - self._last
        self._last = now

    def seconds(self) -> dict[str, float]:
        return {**self._laps, "time/step": time.monotonic() - self._start}


def _evaluation(
    workdir: Path, step: int, evaluate: Evaluate, learner: Learner, state, display, only_if_missing=False
) -> float | None:
    """Evaluate and write `eval/step_<n>.json`; returns the overall exact match."""
    path = workdir / "eval" / f"step_{step:06d}.json"
    if only_if_missing and (path.exists() or step):
        return None
    result = evaluate(learner.assets, learner.policy_variables(state), learner.retriever_lora(state))
    write_text(path, json.dumps({"step": step, **result}, ensure_ascii=False, indent=1) + "\n")
    overall = result["averages"]["overall"]
    shown = "  ".join(f"{name} {overall[name]:.3f}" for name in ("em", "f1", "recall@3") if overall.get(name) is not None)
    display.say(f"evaluation after step {step}: {shown}")
    return overall["em"]


def export(workdir: Path, config: ConfigDict, assets: Assets, state: BridgeState) -> None:
    """The trained policy as a Hugging Face folder (a LoRA merged into it) and the retriever's LoRA in PEFT's format."""
    if config.policy.trainable == "lora":
        adapter = policy_lora(config)
        save_peft(workdir / "policy_lora", state.policy, adapter, "qwen2", policy_source(config, workdir))
        params = merge_lora(assets.base_params, state.policy, adapter)
    else:
        params = state.policy
    qwen2.save(workdir / "policy", assets.policy, params, assets.tokenizer)
    save_peft(
        workdir / "retriever", state.retriever, retriever_lora(config), "bert", pocket_models.upstream(config.retriever.encoder)
    )
