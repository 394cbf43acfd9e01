"""Estimator fidelity: how near are `bridge` (one state) and `drop` to the two-state gradient of the policy, and why?

    python benchmarks/fidelity.py             # an early and a late checkpoint of `two_state`, four gammas, three batches
    python benchmarks/fidelity.py --quick

At a checkpoint of a `two_state` run, on batches of fresh training questions: rollouts, their document likelihoods, an update of
both lower levels, then the three gradients of `objectives.two_state.policy_gradients` at the same theta, on the same rollouts.
Cosine and relative error are against `two_state`. The lower levels in two ways: "training", one update of the run's own eta_gamma
and eta* with their optimisers; and "descended", towards METHOD 1's definition: both from the run's eta_gamma, `--passes` times over
the turns of the batch (no warm-up). For each the lower levels' values and gradient norms before and after: w is a constant in
J_ret, so what its gradient descends is the potential mean_turns A * (- logsumexp(log p + l)), and with gamma the same of
A + gamma. Where A + gamma < 0 a turn's potential has no minimum, so eta_gamma is not defined by it, only by the descent.

The landscape behind it, descended at the config's gamma: the retriever's losses along the line from eta* to eta_gamma, and J_RL and
gamma times the pair of RAG terms along the policy's own step. Writes results/fidelity.json, fidelity_eta.png, fidelity_theta.png.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import ablation
import jax
import jax.numpy as jnp
import numpy as np
import optax
import plots
import stats
import training_runs as runs
from arguments import at_least
from machine import about

from bridge_jax import config as configuration
from bridge_jax.data.prompts import build_prompt
from bridge_jax.data.stream import QuestionStream
from bridge_jax.errors import main_guard
from bridge_jax.objectives import bilevel, rewards, two_state
from bridge_jax.objectives.grpo import group_advantages
from bridge_jax.objectives.rag import responsibilities
from bridge_jax.training import batch as batches
from bridge_jax.training.credit_stage import Credited, CreditStage
from bridge_jax.training.loop import training_mixture
from bridge_jax.training.session import open_state
from bridge_jax.training.state import step_config

NAME = "fidelity"
GAMMAS = (0.002, 0.02, 0.2, 2.0)
EARLY = 5  # steps
FRESH = 1000  # seed of the batches measured on: draws of their own from the training questions, which runs have partly seen
PAPERS_GAMMA = 0.02


@main_guard
def main() -> None:
    parser = runs.parser(__doc__, seeds=1)
    parser.add_argument("--batches", type=at_least(1), default=3, help="batches of questions a checkpoint (default 3)")
    parser.add_argument("--passes", type=at_least(1), default=50, help="over a batch's turns, descending (default 50)")
    parser.add_argument("--read", action="store_true", help="compute nothing: the plots of the result that is there")
    args = parser.parse_args()
    if args.read:
        return plot(json.loads((runs.RESULTS / f"{NAME}.json").read_text(encoding="utf-8")), runs.RESULTS)
    root, shared = runs.root_of(args, ablation.NAME), ablation.base(args)
    early = {**shared, "train.steps": 1 if args.quick else EARLY, "method.name": "two_state"}
    wanted = {
        "early": runs.seeded("two_state_early", args, early),
        "late": ablation.runs_of("two_state", {"method.name": "two_state"}, args, shared),
    }
    runs.conclude(runs.execute([run for found in wanted.values() for run in found], root, args.jobs))
    runs.share_programs(root)

    number, passes = (1, 2) if args.quick else (args.batches, args.passes)
    gammas = GAMMAS[:2] if args.quick else GAMMAS
    result = {
        "machine": about(),
        "config": args.config,
        "seeds": args.seeds,
        "batches": number,
        "passes": passes,
        "checkpoints": {},
    }
    for name, found in wanted.items():
        points = [Point(run, root) for run in found]
        of_point = [point.batch(i) for point in points for i in range(number)]
        result.setdefault("zero_advantage_turns", {})[name] = float(np.mean([batch.without_advantage() for batch in of_point]))
        own = points[0].config.credit.gamma
        result["checkpoints"][name] = {
            "training": {str(gamma): fidelity(of_point, gamma, 0) for gamma in (PAPERS_GAMMA, own)},
            "descended": {str(gamma): fidelity(of_point, gamma, passes) for gamma in gammas},
        }
        runs.say(f"{name}: {json.dumps(result['checkpoints'][name])}")
        if name == "late":
            result["landscape"] = landscape(of_point[0], passes, args)
    path = runs.save(NAME, result, args)
    plot(result, path.parent)
    print(json.dumps({key: value for key, value in result.items() if key != "landscape"}))


class Point:
    """A run's last checkpoint, opened for gradients."""

    def __init__(self, run: runs.Run, root: Path):
        overrides, _ = configuration.split_overrides(run.words())
        config = configuration.load(runs.HOME / run.config, overrides)
        self.config = config
        self.learner, self.state = open_state(config, root / run.name, "latest")
        self.assets, self.step = self.learner.assets, int(self.state.step)
        self.frozen = bilevel.Frozen(self.assets.base_params, self.assets.encoder.params)
        self.credit = CreditStage(config, self.assets)
        self._stream = QuestionStream(training_mixture(config), config.train.questions, FRESH)

    def batch(self, number: int) -> Measured:
        """Rollouts at the checkpoint, and what they are credited by: the first half of a training step."""
        config, assets = self.config, self.assets
        questions = self._stream.batch_at(number)
        variables = self.learner.policy_variables(self.state)
        episodes, _ = assets.engine.run(
            variables,
            questions,
            prompts=[build_prompt(question, assets.tokenizer, config.rollout.prompt) for question in questions],
            group_size=config.grpo.group_size,
            key=jax.random.fold_in(jax.random.key(FRESH), number),
            temperature=config.rollout.temperature,
            retriever_lora=self.state.retriever,
        )
        scores = np.asarray(
            [rewards.score_episode(e.answer, e.status, e.question.golds, any(turn.shown for turn in e.turns))[0] for e in episodes],
            np.float32,
        )
        advantages = np.asarray(group_advantages(scores.reshape(-1, config.grpo.group_size), config.grpo.advantage)).reshape(-1)
        credited, _ = self.credit(number, variables, episodes, scores, advantages)
        rollouts = batches.pack_rollouts(config, assets.mesh, episodes, scores, advantages, np.ones(len(episodes), bool))
        return Measured(self, rollouts, credited, advantages, list(self.credit.scorer.batches(credited.requests)))


@dataclasses.dataclass
class Measured:
    """One batch at one checkpoint."""

    point: Point
    rollouts: bilevel.Rollouts
    credited: Credited
    advantages: np.ndarray
    scored: list

    def without_advantage(self) -> float:
        """Share of the turns; where it is 1, the two states are one and J_RL has only its KL term: nothing to compare."""
        turns = self.credited.turns
        return float(np.mean(np.asarray(turns.advantages)[np.asarray(turns.mask)] == 0.0))

    def settings(self, gamma: float) -> bilevel.StepConfig:
        config = step_config(self.point.config)
        return dataclasses.replace(config, retriever=dataclasses.replace(config.retriever, gamma=gamma))

    def starting(self, passes: int) -> bilevel.BridgeState:
        """The state whose lower levels `descended` moves."""
        return two_state.with_star(self.point.learner.modules, self.point.state) if passes else self.point.state

    def descended(self, gamma: float, passes: int) -> bilevel.BridgeState:
        """The state with eta_gamma and eta*: after `passes` over the turns from one start, or (0) one step of the run."""
        point, settings, state = self.point, self.settings(gamma), self.point.state
        modules = point.learner.modules
        if passes:
            settings = dataclasses.replace(
                settings, retriever_optimizer=dataclasses.replace(settings.retriever_optimizer, warmup=0)
            )
            modules = dataclasses.replace(modules, retriever_optimizer=bilevel.make_optimizer(settings.retriever_optimizer))
            state = state.replace(retriever_opt=modules.retriever_optimizer.init(state.retriever))
            state = two_state.with_star(modules, state)
        return two_state.solve_lower_level(settings, modules, point.frozen, state, self.credited.turns, passes or 1)[0]


def fidelity(measured: Sequence[Measured], gamma: float, passes: int) -> dict:
    """{"one_state", "drop": {"cosine", "relative_error"}, "pair_over_rl"}, each the mean, lowest and highest over batches;
    and "descent", means over batches."""
    rows = []
    for batch in measured:
        point, before, after = batch.point, batch.starting(passes), batch.descended(gamma, passes)
        found = two_state.policy_gradients(
            batch.settings(gamma), point.learner.modules, point.frozen, after, batch.rollouts,
            batch.credited.turns, batch.credited.owners, batch.scored,
        )  # fmt: skip
        levels = descent(batch, gamma, before, after)
        rows.append({name: compare(found[name], found["two_state"]) for name in ("one_state", "drop")})
        pair = jax.tree.map(jnp.subtract, found["two_state"], found["one_state"])
        rows[-1]["pair_over_rl"] = float(optax.tree.norm(pair) / optax.tree.norm(found["one_state"]))
        rows[-1]["descent"] = levels
    result = {
        name: {measure: stats.spread([row[name][measure] for row in rows]) for measure in ("cosine", "relative_error")}
        for name in ("one_state", "drop")
    }
    return result | {
        "pair_over_rl": stats.spread([row["pair_over_rl"] for row in rows]),
        "descent": jax.tree.map(lambda *values: float(np.mean(values)), *[row["descent"] for row in rows]),
    }


def descent(batch: Measured, gamma: float, before: bilevel.BridgeState, after: bilevel.BridgeState) -> dict:
    """Of both lower levels: [before, after] of potential and gradient norm; and the share of turns with A + gamma < 0."""
    losses = functools.partial(_lower_losses, batch.point)

    def penalised(lora, turns):
        rag, outcome = losses(lora, turns)
        return outcome + gamma * rag

    turns = batch.credited.turns
    found = {"without_minimum": float(np.mean(np.asarray(turns.advantages)[np.asarray(turns.mask)] + gamma < 0))}
    for name, function, states in (
        ("eta_gamma", penalised, (before.retriever, after.retriever)),
        ("eta_star", lambda lora, turns: losses(lora, turns)[0], (before.star, after.star)),
    ):
        values, gradients = zip(*[jax.jit(jax.value_and_grad(function))(lora, turns) for lora in states], strict=True)
        found[name] = {"potential": list(map(float, values)), "gradient_norm": [float(optax.tree.norm(g)) for g in gradients]}
    return found


def compare(ours, reference) -> dict[str, float]:
    norms = optax.tree.norm(ours) * optax.tree.norm(reference)
    gap = jax.tree.map(jnp.subtract, ours, reference)
    return {
        "cosine": float(optax.tree.vdot(ours, reference) / norms),
        "relative_error": float(optax.tree.norm(gap) / optax.tree.norm(reference)),
    }


def landscape(batch: Measured, passes: int, args: argparse.Namespace) -> dict:
    """{"eta": losses along eta* -> eta_gamma, "theta": J_RL and the pair along the policy's step}, at the config's gamma."""
    point = batch.point
    gamma = point.config.credit.gamma
    settings, state = batch.settings(gamma), batch.descended(gamma, passes)
    losses = jax.jit(functools.partial(_lower_losses, point))

    at = np.linspace(-1, 2, 4 if args.quick else 13)
    along_eta = {"at": at.tolist(), "L_RAG": [], "J_ret": []}
    for s in at:
        lora = _between(state.star, state.retriever, s)
        rag, outcome = losses(lora, batch.credited.turns)
        along_eta["L_RAG"].append(float(rag))
        along_eta["J_ret"].append(float(outcome))

    moved, _ = point.learner.policy_step(jax.tree.map(jnp.copy, state), batch.rollouts)
    rows = bilevel.one_minibatch(batch.rollouts)
    gradient = jax.jit(functools.partial(bilevel.policy_gradient, settings, point.learner.modules))
    at = np.linspace(-3, 3, 3 if args.quick else 9)
    along_theta = {"at": at.tolist(), "J_RL": [], "L_RAG_gamma": [], "L_RAG_star": []}
    for t in at:
        policy = _between(state.policy, moved.policy, t)
        turns = _scored_again(batch, policy)
        along_theta["L_RAG_gamma"].append(float(losses(state.retriever, turns)[0]))
        along_theta["L_RAG_star"].append(float(losses(state.star, turns)[0]))
        sums = gradient(point.frozen.policy, policy, rows)[1]
        along_theta["J_RL"].append(float(sums["loss"] / sums["denominator"]))
    return {"gamma": gamma, "passes": passes, "step": point.step, "eta": along_eta, "theta": along_theta}


def _lower_losses(point: Point, lora, turns: bilevel.Turns) -> tuple[jax.Array, jax.Array]:
    """(L_RAG, the potential of J_ret) of a retriever, means over turns."""
    queries = point.assets.encoder.module.apply(
        {"params": point.frozen.encoder, "lora": lora}, turns.query_tokens, turns.query_mask
    )
    scores = jnp.einsum("ud,ucd->uc", queries.astype(jnp.float32), jnp.asarray(turns.doc_vectors, jnp.float32))
    candidates = turns.doc_mask | ~turns.mask[:, None]  # padding turns: any finite number
    likelihood = jnp.where(candidates & turns.mask[:, None], turns.log_likelihood, 0.0)
    log_p, _ = responsibilities(scores, likelihood, point.config.credit.tau, candidates)
    nll = jnp.where(turns.mask, -jax.nn.logsumexp(log_p + likelihood, -1), 0.0)
    return nll.sum() / turns.mask.sum(), (turns.advantages * nll).sum() / turns.mask.sum()


def _scored_again(batch: Measured, policy) -> bilevel.Turns:
    """The turns with the document likelihoods of another theta."""
    point, credited = batch.point, batch.credited
    variables = point.learner.policy_variables(point.state.replace(policy=policy))
    credits = point.credit.scored(variables, credited.credits, credited.requests, credited.owners)
    return batches.pack_turns(point.assets, credits, batch.advantages, batches.turn_rows(point.config))


def _between(first, last, s: float):
    return jax.tree.map(lambda a, b: a + s * (b - a), first, last)


def plot(result: dict, folder: Path) -> None:
    found = result["landscape"]
    gamma, eta, theta = found["gamma"], found["eta"], found["theta"]
    point = f"two_state, seed 0, step {found['step']}, one batch"
    at = eta["at"]
    penalised = [outcome + gamma * rag for outcome, rag in zip(eta["J_ret"], eta["L_RAG"])]
    panels = {
        f"{point}:\nfrom eta* (0) to eta_gamma (1)": {
            "L_RAG": (at, _from(eta["L_RAG"], at, 0)), f"J_ret's potential + {gamma:g} L_RAG": (at, _from(penalised, at, 0)),
        }
    }  # fmt: skip
    plots.lines(folder / f"{NAME}_eta.png", panels, "position on the line", "loss, above its value at eta*")
    at = theta["at"]
    pair = [gamma * (a - b) for a, b in zip(theta["L_RAG_gamma"], theta["L_RAG_star"])]
    alone = [gamma * a for a in theta["L_RAG_gamma"]]
    panels = {
        f"{point}:\nalong the policy's step": {
            "J_RL": (at, _from(theta["J_RL"], at, 0)),
            f"{gamma:g} x [L_RAG(eta_gamma) - L_RAG(eta*)], left out by bridge": (at, _from(pair, at, 0)),
            f"{gamma:g} x L_RAG(eta_gamma), added by drop": (at, _from(alone, at, 0)),
        }
    }
    plots.lines(folder / f"{NAME}_theta.png", panels, "policy steps", "loss, above its value at theta")


def _from(values: Sequence[float], at: Sequence[float], where: float) -> list[float]:
    """values less their value at the point nearest `where`."""
    origin = values[int(np.argmin(np.abs(np.asarray(at) - where)))]
    return [value - origin for value in values]


if __name__ == "__main__":
    sys.exit(main())
