"""The training loop (METHOD 4): rollouts, reward, document scoring, the pure step; evaluation, checkpoints, logs.

A step depends on (state, step, seed) alone. Whatever a kill destroys is what the last whole checkpoint does not hold; the same
command does it again with the same numbers.

Several processes (`distributed`) run this loop in step: each rolls out its share of the questions and scores its share of the
requests on its own devices; then all hold all episodes and likelihoods, and everything on the host is computed everywhere from the
same numbers. The updates run on the devices of all. The main process alone writes and speaks. What is gathered of a rollout is some
12 KB: 9 bytes a token of the response, 4 a token of the prompt, 320 a search of 40 candidates, and the texts of its trace. 512
questions x 8 are some 50 MB a step.

SIGTERM (`preemption`) breaks off rollouts, scoring and evaluation between two chunks or batches, and the state of the last finished
step is saved. While an update is under way its state has been given away, so the step is finished first; a program that is being
compiled is waited for, too.
"""

from __future__ import annotations

import contextlib
import json
import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import jax
import numpy as np
from ml_collections import ConfigDict

from bridge_jax import config as configuration
from bridge_jax import distributed, preemption
from bridge_jax.data.prompts import build_prompt
from bridge_jax.data.qa import Question, load_questions
from bridge_jax.data.stream import Mixture, QuestionStream
from bridge_jax.errors import Outage, UserError
from bridge_jax.files import as_path, write_text
from bridge_jax.objectives import scoring
from bridge_jax.objectives.bilevel import BridgeState
from bridge_jax.objectives.grpo import group_advantages, informative_groups
from bridge_jax.plugins import load_function
from bridge_jax.rollout.episodes import Played, summarise
from bridge_jax.training import batch as batches
from bridge_jax.training import flops
from bridge_jax.training.agentic import prepare
from bridge_jax.training.alarms import Alarms
from bridge_jax.training.assets import Assets, load_assets, trained_folder
from bridge_jax.training.checkpoints import Checkpoints, newest
from bridge_jax.training.credit_stage import CreditStage
from bridge_jax.training.display import Display
from bridge_jax.training.episode_metrics import judge, rollout_rows, step_metrics
from bridge_jax.training.export import export
from bridge_jax.training.goodput import Clock, Goodput, utilisation
from bridge_jax.training.methods import method_of, stage_ends, stage_of, stages_of, total_steps
from bridge_jax.training.metrics import RunLog, read_metrics
from bridge_jax.training.publish import bytes_per_device
from bridge_jax.training.selection import Selection
from bridge_jax.training.session import claim
from bridge_jax.training.state import Learner, fingerprint
from bridge_jax.training.workdir import exclusive, refuse_unusable, written_field

log = logging.getLogger(__name__)

# (assets, policy_variables, retriever_lora) -> evaluation result with ["averages"]["overall"]["em"]
Evaluate = Callable[[Assets, dict, dict | None], dict]


def run(config: ConfigDict, workdir: Path, evaluate: Evaluate, evaluated: Callable[[], None] = lambda: None) -> bool:
    """Train, or go on training, in `workdir`. Returns whether the run is finished: False when SIGTERM stopped it.

    Args:
      evaluate: greedy evaluation; called before the first step, every `config.train.eval_every` steps and at the end.
      evaluated: called by the main process when an evaluation and the metrics up to it are written.

    Raises:
      UserError: a workdir of another configuration; missing models, data or index; too many non-finite updates in a row.
    """
    workdir = as_path(workdir)

    def load() -> tuple[QuestionStream, Assets]:
        claim(config, workdir, write=False)
        load_function(config.reward.function, "reward.function")  # a name that is none is told before the long work
        stream = QuestionStream(training_mixture(config), config.train.questions, config.train.seed)
        if config.train.questions < distributed.count():
            raise UserError(f"config.train.questions={config.train.questions}: fewer than the {distributed.count()} processes")
        step = newest(workdir / "checkpoints") if method_of(config).trains_encoder else 0
        assets = load_assets(config, workdir, trained=trained_folder(config, workdir, step))
        build_prompt(stream.batch_at(0)[0], assets.tokenizer, config.rollout.prompt)  # an unknown style is told before the claim
        return stream, assets

    distributed.on_main(lambda: refuse_unusable(workdir))
    stream, assets = distributed.together(load)
    learner = Learner(config, assets)
    state = learner.init()
    with contextlib.ExitStack() as stack:
        distributed.on_main(lambda: stack.enter_context(exclusive(workdir)))
        every = max(config.train.checkpoint_every, written_field(workdir, "train.checkpoint_every", 0))
        checkpoints = Checkpoints(workdir / "checkpoints", config.train.keep, fingerprint(config, assets))
        start = checkpoints.latest() or 0
        distributed.together(lambda: _refuse_lost_checkpoints(workdir, start, every))
        distributed.on_main(lambda: claim(config, workdir))
        if distributed.any_process(not (workdir / "config.json").exists()):
            raise UserError(f"{workdir}: not every process sees what the main one wrote there: give a --workdir that all share")
        if start:
            state = distributed.together(lambda: checkpoints.restore(start, state))
        this = Run(config, workdir, evaluate, evaluated, assets, learner, stream, checkpoints, start)
        with contextlib.closing(checkpoints), this.display, preemption.listening(this.display.say):
            return this.train(state)


class Run:
    """A run under way in this process: what is written where, and when it stops."""

    def __init__(self, config, workdir, evaluate, evaluated, assets, learner, stream, checkpoints: Checkpoints, start: int):
        self.config, self.workdir, self.evaluate, self.evaluated, self.learner = config, workdir, evaluate, evaluated, learner
        self.checkpoints, self.start, self.total, self.ends = checkpoints, start, total_steps(config), stage_ends(config)
        fields = configuration.flatten(config)
        self.log = RunLog(workdir, start, config.train.tensorboard, config.train.wandb, fields, distributed.is_main())
        self.loop = Loop(config, assets, learner, stream, self.log, start)
        self.display = Display(self.total, start, quiet=not distributed.is_main())
        self.loop.phase = self.display.phase
        self.done = self.saved = start  # the last finished step, and the last saved one
        self.row: dict | None = None  # of the last finished step, until it is written

    def train(self, state: BridgeState) -> bool:
        """Steps up to the last one, and the export. Returns False where SIGTERM ended it."""
        try:
            self._begin(state)
            while self.done < self.total:
                self._obey()
                began = self._begin_round(state)
                state, metrics = self.loop.step(self.done + 1, state)
                self.done += 1
                self._after_step(state, metrics | began)
            self._obey()
        except distributed.Preempted:
            self._stop(state)
            return False
        except Outage:
            self._keep(state)
            raise
        self.checkpoints.wait()
        export(self.workdir, self.config, self.learner.assets, state)
        self.display.say(f"done: {self._left()}")
        return True

    def _left(self) -> str:
        """What the run leaves, and where."""
        method, folder = method_of(self.config), self.workdir
        policy = "policy" if method.trains_policy or any(stage.collect for stage in method.stages) else "untrained policy"
        retriever = f"{'encoder' if method.trains_encoder else 'retriever LoRA'} in {folder / 'retriever'}"
        if method.leaves_retriever:
            retriever = f"the retriever is {self.config.retriever.encoder} as it was"
        return f"{policy} in {folder / 'policy'}, {retriever}, metrics in {self.log.path}"

    def _begin(self, state: BridgeState) -> None:
        """The evaluation before the first step; or the one that a run stopped in, which its row says."""
        if not self.start:
            path = _evaluation_path(self.workdir, 0)
            if not distributed.on_main(path.exists):
                self._evaluation(state)
                if distributed.is_main():
                    self.evaluated()
            return
        self.display.say(f"{self.workdir}: going on after step {self.start}")
        last = [row for row in read_metrics(self.log.path) if row["step"] == self.start]
        if last and last[-1].get("eval/em", 0.0) is None:
            self.log.amend(self.start, {"eval/em": self._evaluation(state)})

    def _begin_round(self, state: BridgeState) -> dict[str, float]:
        """Before a round's first step, where the method trains the encoder: the retriever of this round. Returns its metrics."""
        config, (number, _) = self.config, stage_of(self.config, self.done + 1)
        if not method_of(config).trains_encoder or self.done not in (0, *self.ends):
            return {}
        questions = QuestionStream(training_mixture(config), config.agentic.questions, config.train.seed).batch_at(number - 1)
        variables = self.learner.policy_variables(state)
        assets, metrics = prepare(config, self.workdir, number, self.learner.assets, variables, questions)
        self.learner.use(assets)
        self.loop.assets, self.checkpoints.fingerprint = assets, fingerprint(config, assets)
        return metrics

    def _after_step(self, state: BridgeState, metrics: dict[str, float]) -> None:
        """Evaluate, write the row, save."""
        step, train = self.done, self.config.train
        self.row, score = {"step": step, **metrics, "time/evaluation": 0.0}, None
        if step in self.ends or (train.eval_every and step % train.eval_every == 0):
            self.row["eval/em"] = None
            began = time.monotonic()
            score = self.row["eval/em"] = self._evaluation(state)
            self.row["time/evaluation"] = time.monotonic() - began
        row = self._write()
        if score is not None and distributed.is_main():
            self.evaluated()
        self.loop.alarms.check(step, row, self.display.say)
        if score is not None or step % train.checkpoint_every == 0:
            self._save(state, score)
        self.display.step(step, row)

    def _write(self) -> dict:
        row, self.row = self.row, None
        row |= self.loop.goodput.row(row)
        self.log.write(row)
        return row

    def _save(self, state: BridgeState, score: float | None = None) -> None:
        self.display.phase("checkpoint")
        began = time.monotonic()
        self.checkpoints.save(self.done, state, score)
        self.saved = self.done
        self.loop.saving = time.monotonic() - began

    def _evaluation(self, state: BridgeState) -> float:
        """Evaluate and write `eval/step_<n>.json`; returns the overall exact match."""
        learner = self.learner
        self.display.phase("evaluation")
        result = self.evaluate(learner.assets, learner.policy_variables(state), learner.retriever_lora(state))
        if distributed.is_main():
            text = json.dumps({"step": self.done, **result}, ensure_ascii=False, indent=1)
            write_text(_evaluation_path(self.workdir, self.done), text + "\n")
        overall = result["averages"]["overall"]
        shown = "  ".join(f"{name} {overall[name]:.3f}" for name in ("em", "f1", "recall@3") if overall.get(name) is not None)
        self.display.say(f"evaluation after step {self.done}: {shown}")
        return overall["em"]

    def _obey(self) -> None:
        """Raises Preempted in all processes when one of them has been told to stop."""
        preemption.check_together()

    def _stop(self, state: BridgeState) -> None:
        """SIGTERM: `state` is the last finished step's."""
        self._keep(state)
        self.checkpoints.wait()
        left = f"saved after step {self.done}" if self.done else "before the first step had ended"
        self.display.say(f"stopped by SIGTERM, {left}: the same command goes on from there")

    def _keep(self, state: BridgeState) -> None:
        """What the last finished step left. An evaluation that was broken off is made up for when the run goes on."""
        if self.row is not None:
            self._write()
        if self.done > self.saved:
            self._save(state)


def _evaluation_path(workdir: Path, step: int) -> Path:
    return workdir / "eval" / f"step_{step:06d}.json"


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

    def __init__(self, config: ConfigDict, assets: Assets, learner: Learner, stream: QuestionStream, log: RunLog, start: int = 0):
        self.config, self.assets, self.learner, self.stream, self.log = config, assets, learner, stream, log
        self.goodput, self.saving = Goodput(), 0.0  # saving: seconds of the checkpoint after the last step
        self.phase: Callable[[str], None] = lambda name: None  # told what begins, for who watches
        self._key = jax.random.key(config.train.seed)
        self._credit = CreditStage(config, assets)
        self._selection = Selection(config, log.workdir, learner)
        self._reward = load_function(config.reward.function, "reward.function")
        before = [row for row in read_metrics(log.path) if row["step"] <= start]  # a run that goes on counts on
        self.alarms = Alarms(config, before)
        self._counts = dict.fromkeys(COUNTS, 0)
        for row in before:
            self._counts |= {name: row[name] for name in COUNTS if name in row}

    def step(self, step: int, state: BridgeState) -> tuple[BridgeState, dict[str, float]]:
        """Step number `step` (from 1): -> (state, metrics). The old state is consumed.

        Raises:
          Preempted: the run is to stop; the state is whole. Outage: likewise, for searches that failed.
        """
        config, assets, learner = self.config, self.assets, self.learner
        number, within = stage_of(config, step)
        method, stage = method_of(config), stages_of(config)[number - 1]
        clock, model = Clock(), assets.policy.config

        variables, lora = learner.policy_variables(state), learner.retriever_lora(state)
        jax.block_until_ready((variables, lora))
        clock.lap("publish")

        self.phase("rollout")
        questions = self.stream.batch_at(within - 1)  # the same in every stage, and in every method
        episodes, metrics = summarise(distributed.share(lambda: self._play(step, questions, variables, lora)))
        metrics["memory/published_bytes"] = bytes_per_device((variables, lora))
        metrics["flops/rollout"] = flops.rollout_flops(model, episodes)
        clock.lap("rollout")

        scores, reasons = judge(episodes, stage.reward, self._reward)
        groups = scores.reshape(-1, config.grpo.group_size)
        valid = np.asarray([e.status != "environment_fault" for e in episodes]).reshape(groups.shape)
        failed = 1.0 - valid.mean()
        if failed > config.train.max_fault_share:
            said = next(text for e in episodes for kind, text in e.trace if kind == "fault")
            raise Outage(
                f"step {step}: the search engine failed in {failed:.0%} of the rollouts ({said}): the run stops after "
                f"step {step - 1}, and the same command goes on from there; config.train.max_fault_share is what it bears"
            )
        advantages = np.asarray(group_advantages(groups, config.grpo.advantage, valid)).reshape(-1)
        metrics |= {"stage": number, **step_metrics(episodes, scores, reasons, valid, assets.corpus)}
        self._counts["count/rollouts"] += len(episodes)
        clock.lap("host")

        scored, correction = {}, None
        if stage.retriever and within % config.credit.period == 0:
            self.phase("score")
            credited, measured = self._credit(step, variables, episodes, scores, advantages)
            metrics |= measured
            metrics["flops/score"] = flops.scoring_flops(model, credited.requests)
            scored = credited.by_turn()
            clock.lap("score")
            self.phase("retriever")
            state, learned = learner.retriever_step(state, credited.turns)
            metrics |= learned
            clock.lap("retriever")
            self._counts["count/retriever_updates"] += 1
            if method.estimator != "one_state":
                again = self._credit.scorer.batches(credited.requests, assets.mesh)
                correction, measured = learner.correction(state, credited.turns, credited.owners, again)
                metrics |= measured
                clock.lap("correction")
        variables = lora = None  # the update has their memory

        if stage.policy:
            trained = valid.copy()
            if config.grpo.filter_zero_advantage:
                trained &= np.asarray(informative_groups(groups, valid))[:, None]
            rollouts = batches.pack_rollouts(config, assets.mesh, episodes, scores, advantages, trained.reshape(-1))
            metrics["policy/packing_fill"] = batches.packing_fill(rollouts)
            learnt = [e for e, wanted in zip(episodes, trained.reshape(-1), strict=True) if wanted and e.generated.any()]
            metrics["flops/policy"] = flops.policy_flops(config, model, learnt)
            clock.lap("host")
            self.phase("policy")
            state, learned = learner.policy_step(state, rollouts, correction)
            metrics |= learned
            clock.lap("policy")
            self._counts["count/policy_updates"] += 1
        else:
            state = learner.keep_policy(state)
        if stage.collect:
            state, learned = self._selection(step, state, episodes)
            metrics |= learned
            clock.lap("policy")
        every = config.train.log_rollouts_every
        if every and (step % every == 0 or step == total_steps(config)):
            rows = rollout_rows(step, episodes, scores, reasons, advantages, assets.corpus, scored, config.credit.tau)
            self.log.write_rollouts(step, rows)
        clock.lap("host")
        metrics |= clock.seconds() | {"time/checkpoint": self.saving}
        self.saving = 0.0
        metrics |= utilisation(metrics)
        metrics |= self._counts
        metrics["epoch"] = self.stream.epoch_at(within)
        metrics["compilations/update"], metrics["compilations/score"] = learner.compilations(), scoring.compilations()
        return state, metrics

    def _play(self, step: int, questions: Sequence[Question], variables: dict, lora: dict | None) -> Played:
        """This process' share of the step's questions, rolled out. Raises Preempted."""
        numbers = range(distributed.index(), len(questions), distributed.count())
        return self.assets.engine.play(
            variables,
            [questions[i] for i in numbers],
            numbers=numbers,
            prompts=[build_prompt(questions[i], self.assets.tokenizer, self.config.rollout.prompt) for i in numbers],
            group_size=self.config.grpo.group_size,
            key=jax.random.fold_in(self._key, step),
            temperature=self.config.rollout.temperature,
            retriever_lora=lora,
            advance=lambda questions: preemption.check(),
        )
