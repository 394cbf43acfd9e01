"""What every method is: one loop, and a row of this table (METHOD 5).

A run goes through the method's stages, `config.train.steps` steps each. In a step both levels read the same rollouts; the retriever
goes first (METHOD 4). Whatever does not learn in a stage stays as the stage before left it, the base models at the start.

This module imports nothing of the project: `bridge_jax.config` reads the names and the implied defaults from here.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

from ml_collections import ConfigDict


@dataclasses.dataclass(frozen=True)
class Stage:
    """Which levels learn in the stage's steps.

    reward: what the policy is rewarded by, a name of `objectives.rewards.REWARDS`. share: of config.train.steps, where the method's
    stages divide them. collect: the rollouts are collected; the policy learns by supervision on selected ones at the stage's end
    (`training/selection.py`).
    """

    retriever: bool
    policy: bool
    reward: str = "em"
    share: float = 1.0
    collect: bool = False


POLICY = Stage(retriever=False, policy=True)
RETRIEVER = Stage(retriever=True, policy=False)
BOTH = Stage(retriever=True, policy=True)


@dataclasses.dataclass(frozen=True)
class Method:
    """A row of the table.

    use_outcome, use_rag, distil: the retriever's loss has J_ret, has gamma L_RAG (METHOD 3), distils the policy's likelihoods
      (`objectives.rag`). None of them: eta stays the base encoder.
    estimator: the policy's gradient (METHOD 1). "one_state": grad J_RL. "drop": + gamma grad L_RAG(eta_gamma). "two_state":
      + gamma [grad L_RAG(eta_gamma) - grad L_RAG(eta*)], which carries eta*, a second retriever that descends L_RAG alone.
    divides: the stages divide config.train.steps between them, and go on with the questions where the one before ended. Else each
      stage has all steps, and the same questions.
    trains_encoder: before each of config.agentic.rounds rounds, which divide the steps, the whole encoder is trained and the corpus
      indexed anew (`training/agentic.py`).
    implied, at_most: config fields that choosing the method sets, or caps, unless the command line says otherwise. An implied value
      may be a function of the configuration as it stands once caps and earlier values are set.
    """

    summary: str
    stages: tuple[Stage, ...]
    use_outcome: bool = False
    use_rag: bool = False
    distil: str = ""
    estimator: str = "one_state"
    divides: bool = False
    trains_encoder: bool = False
    implied: Mapping[str, object] = dataclasses.field(default_factory=dict)
    at_most: Mapping[str, int] = dataclasses.field(default_factory=dict)

    @property
    def trains_retriever(self) -> bool:
        return any(stage.retriever for stage in self.stages)

    @property
    def trains_policy(self) -> bool:
        return any(stage.policy for stage in self.stages)

    @property
    def leaves_retriever(self) -> bool:
        """Whether the retriever stays as it is throughout."""
        return not (self.trains_retriever or self.trains_encoder)


METHODS = {
    # The paper's method and what it is measured against (METHOD 5).
    "bridge": Method("outcome credit and gamma x RAG likelihood, before each policy step", (BOTH,), use_outcome=True, use_rag=True),
    "vt_search": Method("GRPO on the policy alone, the retriever stays as it is", (POLICY,)),
    "search_r1": Method(  # METHOD 9
        "GRPO on the policy alone as Search-R1 sets it: 4 searches, groups of 5, short turns, a larger KL, second tries",
        (POLICY,),
        implied={
            "rollout.max_searches": 4,
            "grpo.group_size": 5,
            "grpo.kl_coef": 1e-3,
            "grpo.minibatch_questions": lambda c: max(1, c.train.questions // 2),  # 256 of 512
            "grpo.microbatch": lambda c: math.gcd(c.grpo.microbatch, c.grpo.minibatch_questions * c.grpo.group_size),
            # 0.285 of the steps, in updates.
            "grpo.warmup_steps": lambda c: round(0.285 * c.train.steps * c.train.questions / c.grpo.minibatch_questions),
            "ppo.critic_warmup_steps": lambda c: (
                round(0.015 * c.train.steps * c.train.questions / c.grpo.minibatch_questions)
                if c.policy.algorithm == "ppo"
                else c.ppo.critic_warmup_steps
            ),
            "rollout.retry_invalid": True,
            "rollout.cut_inside": True,
            # Room for every search and a last answer.
            "rollout.max_response_tokens": lambda c: max(
                c.rollout.max_response_tokens,
                (c.rollout.max_searches + 1) * c.rollout.max_new_tokens + c.rollout.max_searches * c.rollout.max_observation_tokens,
            ),
        },
        at_most={"rollout.max_new_tokens": 500, "rollout.max_observation_tokens": 500},
    ),
    "rag_then_rl": Method(
        "first the retriever from the RAG likelihood under the initial policy, then GRPO with it frozen",
        (RETRIEVER, POLICY),
        use_rag=True,
    ),
    "rl_then_rag": Method(
        "first GRPO, then the retriever from the RAG likelihood under the trained policy", (POLICY, RETRIEVER), use_rag=True
    ),
    "decoupled_rl": Method("outcome credit alone (gamma = 0) beside each policy step", (BOTH,), use_outcome=True),
    "decoupled_rag": Method("RAG likelihood alone (A = 0) beside each policy step", (BOTH,), use_rag=True),
    # Retrievers trained by other losses, on the same turns beside the same policy steps.
    "replug": Method(
        "REPLUG's LSR: KL(retriever | softmax of answer likelihoods) beside each policy step", (BOTH,), distil="replug"
    ),
    "replug_pdist": Method("Atlas' PDist: KL(posterior of the answer | retriever) likewise", (BOTH,), distil="replug_pdist"),
    # Other estimators of the policy's gradient (METHOD 1).
    "two_state": Method(
        "bridge, and the policy's gradient has the pair of RAG terms, at eta_gamma and at eta*",
        (BOTH,),
        use_outcome=True,
        use_rag=True,
        estimator="two_state",
    ),
    "drop": Method(
        "bridge, and the policy's gradient has the RAG term at eta_gamma alone",
        (BOTH,),
        use_outcome=True,
        use_rag=True,
        estimator="drop",
    ),
    # Systems that train their own way (METHOD 8; docs/comparators.md).
    "agentic_r": Method(
        "rounds: the whole encoder by InfoNCE on passages of dual utility, a new index, then GRPO (or PPO) with it",
        (POLICY,),
        trains_encoder=True,
    ),
    "r1_searcher": Method(
        "GRPO in two stages: rewarded for format and for searching; then for the answer's F1, with a penalty on format",
        (Stage(False, True, reward="format_search", share=0.2), Stage(False, True, reward="f1_format", share=0.8)),
        divides=True,
    ),
    "simple_deep_searcher": Method(
        "supervised: many rollouts of the initial policy, filtered; then training on the selected ones",
        (Stage(False, False, collect=True),),
    ),
}


def method_of(config: ConfigDict) -> Method:
    return METHODS[config.method.name]


def stages_of(config: ConfigDict) -> tuple[Stage, ...]:
    """The stages of the run; a method that trains the encoder has one a round."""
    method = method_of(config)
    return method.stages * config.agentic.rounds if method.trains_encoder else method.stages


def stage_ends(config: ConfigDict) -> tuple[int, ...]:
    """The last step of each stage; where stages divide the steps, each has one at least."""
    method, stages, steps = method_of(config), stages_of(config), config.train.steps
    if not (method.divides or method.trains_encoder):
        return tuple(steps * n for n in range(1, len(stages) + 1))
    shares, count = [stage.share for stage in stages], len(stages)
    exact = [round(steps * sum(shares[:n]) / sum(shares)) for n in range(1, count + 1)]
    return tuple(min(max(end, n), steps - (count - n)) for n, end in enumerate(exact, start=1))


def total_steps(config: ConfigDict) -> int:
    """Steps of the whole run."""
    return stage_ends(config)[-1]


def stage_of(config: ConfigDict, step: int) -> tuple[int, int]:
    """Run step `step` (from 1) -> (number of its stage, number of the questions it draws), both from 1."""
    ends = stage_ends(config)
    stage = sum(step > end for end in ends[:-1])
    within = step if ends[-1] == config.train.steps else step - stage * config.train.steps
    return stage + 1, within
