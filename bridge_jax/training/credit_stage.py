"""From a step's episodes to the retriever's batch: credited turns, their document likelihoods, the arrays (METHOD 3, 4, 12).

Every process chooses the same turns from the same episodes, scores its share of them, and gets the likelihoods of all.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence

import numpy as np
from ml_collections import ConfigDict

from bridge_jax import distributed, preemption
from bridge_jax.objectives import scoring
from bridge_jax.objectives.bilevel import Turns
from bridge_jax.rollout.episodes import Episode
from bridge_jax.training import batch as batches
from bridge_jax.training import credit_audit
from bridge_jax.training.assets import Assets
from bridge_jax.training.next_action import TurnCredit, credit_of


@dataclasses.dataclass(frozen=True)
class Credited:
    """What a step credits.

    credits: the chosen turns, then the masked ones, which no limit leaves out. turns: the padded arrays, a row a credit that is not
    masked. requests: what was scored.
    owners: the place in `credits` of the turn that each request belongs to; a turn's likelihood is the sum over its requests.
    """

    credits: list[TurnCredit]
    turns: Turns
    requests: list[scoring.Request]
    owners: list[int]

    def by_turn(self) -> dict[tuple[int, int], TurnCredit]:
        """By (episode number, turn number), for the rollout log."""
        return {(credit.episode, credit.number): credit for credit in self.credits}


class CreditStage:
    """Chooses, scores and packs the turns of a step; holds what steps share."""

    def __init__(self, config: ConfigDict, assets: Assets):
        self.config, self.assets = config, assets
        self.scorer = scoring.Scorer(assets.rollout_policy, assets.corpus, assets.tokenizer, scoring_config(config))

    def __call__(
        self, step: int, variables: dict, episodes: Sequence[Episode], scores: np.ndarray, advantages: np.ndarray
    ) -> tuple[Credited, dict[str, float]]:
        """-> (what is credited, metrics).

        Args:
          variables: the policy that wrote the episodes (theta_n), published. scores, advantages: [B] float32; groups of G.
        """
        config, assets = self.config, self.assets
        credits = [credit_of(config, episodes, scores, i, t) for i, t in batches.executed_searches(episodes)]
        masked = [credit for credit in credits if credit.kind == "masked"]
        wanted = [credit for credit in credits if credit.kind != "masked"]
        credits = batches.choose(wanted, config.credit.max_turns, config.train.seed, step) + masked
        asked = [(u, request) for u, credit in enumerate(credits) for request in self._requests(episodes, credit)]
        owners, requests = [u for u, _ in asked], [request for _, request in asked]
        credits = self.scored(variables, credits, requests, owners)
        turns = batches.pack_turns(assets, credits, advantages, batches.turn_rows(config))
        credited = Credited(credits, turns, requests, owners)
        rows = credit_audit.audit(episodes, credited, advantages, assets.corpus, config.credit.tau)
        cut = {"credit/cut_targets": sum(request.cut for request in requests)}
        return credited, _counts(credits) | cut | credit_audit.step_metrics(rows)

    def scored(
        self, variables: dict, credits: Sequence[TurnCredit], requests: Sequence[scoring.Request], owners: Sequence[int]
    ) -> list[TurnCredit]:
        """The credits with their likelihoods under a policy; the last two arguments as in `Credited`."""
        likelihoods: list[np.ndarray | None] = [None] * len(credits)
        for u, values in zip(owners, self._likelihoods(variables, requests), strict=True):
            likelihoods[u] = values if likelihoods[u] is None else likelihoods[u] + values
        return [dataclasses.replace(credit, likelihood=values) for credit, values in zip(credits, likelihoods)]

    def _likelihoods(self, variables: dict, requests: Sequence[scoring.Request]) -> list[np.ndarray]:
        """l of every request. Requests are dealt out by shape, equal ones together.

        Raises:
          Preempted: the run is to stop.
        """
        different = scoring.by_shape(requests)
        mine = different[distributed.index() :: distributed.count()]
        asked = [requests[places[0]] for places in mine]
        likelihoods: list[np.ndarray] = [None] * len(requests)
        for part in distributed.share(lambda: list(zip(mine, self.scorer(variables, asked, preemption.check)))):
            for places, values in part:
                for i in places:
                    likelihoods[i] = values
        return likelihoods

    def _requests(self, episodes: Sequence[Episode], credit: TurnCredit) -> list[scoring.Request]:
        """What is scored for a turn: nothing when it is masked."""
        episode, requests = episodes[credit.episode], []
        if credit.kind in ("answer", "both"):
            requests.append(self.scorer.answer(episode, credit.turn))
        if credit.kind in ("next_action", "both"):
            requests.append(self.scorer.next_action(episode, credit.turn, credit.span))
        return requests


def scoring_config(config: ConfigDict) -> scoring.ScoringConfig:
    return scoring.ScoringConfig(
        golds=config.credit.golds,
        turns_per_batch=config.credit.turns_per_batch,
        pairs_at_once=config.credit.pairs_at_once,
        max_answer_tokens=config.rollout.max_new_tokens,  # no rollout could write more, and no sampled span is longer
        max_passage_tokens=config.rollout.max_passage_tokens or None,
        max_observation_tokens=config.rollout.max_observation_tokens,
    )


def _counts(credits: Sequence[TurnCredit]) -> dict[str, float]:
    kinds, authors = Counter(credit.kind for credit in credits), Counter(credit.author for credit in credits)
    return {
        "credit/turns": len(credits),
        "credit/next_action_turns": kinds["next_action"] + kinds["both"],
        "credit/masked_turns": kinds["masked"],
        "credit/own_span": authors["own"],
        "credit/sibling_span": authors["sibling"],
    }
