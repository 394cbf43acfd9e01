"""Supervised training on selected rollouts, as SimpleDeepSearcher does: sample many, filter, then train.

While the stage lasts the policy stays as it is. Of every step's rollouts those are kept that

    are right (exact match), keep to the protocol (`rewards.well_formed`), search between selection.min_searches and
    selection.max_searches times, and are no longer than selection.max_tokens;

of a question the selection.per_question best: fewest searches, then fewest tokens. They are written to
`<workdir>/selected/step_<n>.jsonl`, token for token as they were sampled. At the stage's end the policy is trained on all of them
by `training/sft.py`, with the settings of config.warmstart; passages and corrective messages carry no loss. The traces, its metrics
and, while it trains, its state lie in `<workdir>/selected/`, too, so that a run that is killed there goes on there.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence

import jax
import numpy as np
from ml_collections import ConfigDict

from bridge_jax import distributed
from bridge_jax.data.qa import Question
from bridge_jax.errors import UserError
from bridge_jax.files import AnyPath, write_text
from bridge_jax.objectives import rewards
from bridge_jax.objectives.bilevel import BridgeState
from bridge_jax.rollout.episodes import Episode
from bridge_jax.training import sft
from bridge_jax.training.blocks import read_rows
from bridge_jax.training.methods import stage_ends, stages_of
from bridge_jax.training.state import Learner
from bridge_jax.training.traces import Trace

NAME = "training on the selected rollouts"
HELD_OUT = 20  # selected rollouts kept out of training, a tenth where there are fewer than 200


def why_not(config: ConfigDict, episode: Episode) -> str:
    """The first reason not to learn from a rollout; "" where there is none."""
    c = config.selection
    if not rewards.exact_match(episode.answer, episode.question.golds):
        return "wrong"
    if not rewards.well_formed(episode.status, episode.answer, episode.trace):
        return "format"
    if not c.min_searches <= len(episode.turns) <= c.max_searches:
        return "searches"
    return "length" if c.max_tokens and len(episode.tokens) > c.max_tokens else ""


def select(config: ConfigDict, episodes: Sequence[Episode]) -> tuple[list[Episode], Counter]:
    """The rollouts of a step to learn from, by question, and how many fell to which reason (`over`: to better ones)."""
    fell, good = Counter(dict.fromkeys(("wrong", "format", "searches", "length", "over"), 0)), {}
    for episode in episodes:
        reason = why_not(config, episode)
        if reason:
            fell[reason] += 1
        else:
            good.setdefault(episode.group, []).append(episode)
    chosen = []
    for group in sorted(good):
        best = sorted(good[group], key=lambda e: (len(e.turns), len(e.tokens), e.sample))
        chosen += best[: config.selection.per_question]
        fell["over"] += len(best[config.selection.per_question :])
    return chosen, fell


class Selection:
    """The selected rollouts of a run, and what the policy makes of them."""

    def __init__(self, config: ConfigDict, workdir: AnyPath, learner: Learner):
        self.config, self.learner, self.folder = config, learner, workdir / "selected"
        if distributed.count() > 1 and any(stage.collect for stage in stages_of(config)):
            raise UserError(f"method {config.method.name} trains by supervision, which one process does: leave out --distributed")

    def __call__(self, step: int, state: BridgeState, episodes: Sequence[Episode]) -> tuple[BridgeState, dict[str, float]]:
        """Select from a step's rollouts; after the last step train. -> (state, metrics)

        Raises:
          UserError: hardly a rollout was selected in the whole stage; the training diverged.
        """
        chosen, fell = select(self.config, episodes)
        text = "".join(json.dumps(_row(episode), ensure_ascii=False) + "\n" for episode in chosen)
        distributed.on_main(lambda: write_text(self._path(step), text))
        metrics = {"selection/kept": len(chosen), **{f"selection/{reason}": count for reason, count in fell.items()}}
        return self._train(state, metrics) if step in stage_ends(self.config) else (state, metrics)

    def _path(self, step: int) -> AnyPath:
        return self.folder / f"step_{step:06d}.jsonl"

    def _train(self, state: BridgeState, metrics: dict) -> tuple[BridgeState, dict[str, float]]:
        config, assets, w = self.config, self.learner.assets, self.config.warmstart
        steps = range(1, stage_ends(config)[-1] + 1)
        traces = [_trace(row) for row in distributed.on_main(lambda: [row for n in steps for row in read_rows(self._path(n))])]
        if len(traces) < 2:
            raise UserError(
                f"{self.folder}: {len(traces)} rollouts were selected in {len(steps)} steps: begin with a policy that answers some "
                "questions right (a warm start), or loosen config.selection"
            )
        held = min(HELD_OUT, max(1, len(traces) // 10))
        settings = sft.SFTConfig(epochs=w.epochs, batch=w.batch, microbatch=w.microbatch, lr=w.lr, seed=config.train.seed)
        parts = traces[held:], traces[:held]
        params, found = sft.train(assets.policy, state.policy, *parts, settings, self.folder, assets.mesh, NAME)
        distributed.on_main(lambda: sft.delete_state(self.folder))
        placed = jax.tree.map(lambda new, old: jax.device_put(new, old.sharding), params, state.policy)
        metrics |= {"selection/traces": len(traces), **{f"sft/{name}": value for name, value in found.items() if name != "seconds"}}
        return state.replace(policy=placed), metrics | {"time/sft": found["seconds"]}


def _row(episode: Episode) -> dict:
    question = episode.question
    return {
        **{"id": question.id, "dataset": question.dataset, "question": question.question, "golds": list(question.golds)},
        **{"answer": episode.answer, "searches": len(episode.turns), "sample": episode.sample},
        "trace": [{"kind": kind, "text": text} for kind, text in episode.trace],
        "prompt": episode.prompt.tolist(),
        "tokens": episode.tokens.tolist(),
        "generated": episode.generated.astype(int).tolist(),
    }


def _trace(row: dict) -> Trace:
    question = Question(row["id"], row["question"], tuple(row["golds"]), (), row["dataset"])
    prompt, tokens = np.asarray(row["prompt"], np.int32), np.asarray(row["tokens"], np.int32)
    return Trace(question, prompt, tokens, np.asarray(row["generated"], bool), (), row["answer"], ())
