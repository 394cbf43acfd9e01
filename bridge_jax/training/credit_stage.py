"""From a step's episodes to the retriever's batch: credited turns, their document likelihoods, the arrays (METHOD 3, 4)."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
from ml_collections import ConfigDict

from bridge_jax.objectives import scoring
from bridge_jax.objectives.bilevel import Turns
from bridge_jax.rollout.episodes import Episode, Turn
from bridge_jax.training import batch as batches
from bridge_jax.training.assets import Assets


@dataclasses.dataclass(frozen=True)
class Credited:
    """What a step credits. chosen: (episode number, turn); likelihoods: l [C] of each; turns: the padded arrays."""

    chosen: list[tuple[int, Turn]]
    likelihoods: list[np.ndarray]
    turns: Turns

    def by_turn(self, episodes: Sequence[Episode]) -> dict[tuple[int, int], np.ndarray]:
        """{(episode number, turn number): l [C]}, for the rollout log."""
        return {(i, _number(episodes[i].turns, turn)): l_d for (i, turn), l_d in zip(self.chosen, self.likelihoods, strict=True)}


class CreditStage:
    """Chooses, scores and packs the turns of a step; holds what steps share."""

    def __init__(self, config: ConfigDict, assets: Assets):
        self.config, self.assets = config, assets
        self._scoring = scoring_config(config)

    def __call__(
        self, step: int, variables: dict, episodes: Sequence[Episode], scores: np.ndarray, advantages: np.ndarray
    ) -> tuple[Credited, dict[str, float]]:
        """-> (what is credited, metrics).

        Args:
          variables: the policy that wrote the episodes (theta_n). scores, advantages: [B] float32, episodes in groups of G.
        """
        config, assets = self.config, self.assets
        chosen = batches.choose_turns(episodes, config.credit.max_turns, config.train.seed, step)
        pairs = [(episodes[i], turn) for i, turn in chosen]
        likelihoods = (
            scoring.score_turns(assets.policy, variables, pairs, assets.corpus, assets.tokenizer, self._scoring) if pairs else []
        )
        turns = batches.pack_turns(assets, chosen, likelihoods, advantages, batches.turn_rows(config))
        return Credited(chosen, likelihoods, turns), {"credit/turns": len(chosen)}


def scoring_config(config: ConfigDict) -> scoring.ScoringConfig:
    return scoring.ScoringConfig(
        golds=config.credit.golds,
        turns_per_batch=config.credit.turns_per_batch,
        max_passage_tokens=config.rollout.max_passage_tokens or config.rollout.max_observation_tokens,
    )


def _number(turns, turn) -> int:
    return next(i for i, other in enumerate(turns) if other is turn)
