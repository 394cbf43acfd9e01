"""Fields that say something only together: contradictions, settings that teach nothing, and settings that nothing reads.

`bridge_jax.config` checks each field by itself, then calls `check`. Every rule asks what the method does
(`training/methods.py`), not what it is called.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Collection

from ml_collections import ConfigDict

from bridge_jax.errors import UserError
from bridge_jax.rollout.limits import check_sampling
from bridge_jax.training.methods import METHODS, Method, method_of, stage_ends

log = logging.getLogger(__name__)


def check(config: ConfigDict, training: bool, unlike: Collection[str] = ()) -> None:
    """Refuse what contradicts itself; for training also what cannot learn, and warn of settings that nothing reads.

    Args:
      config: every field is there and has a value of its type and range.
      training: False for commands that only use a run.
      unlike: fields ("group.field") that this run was given another value than the default; the others say nothing.

    Raises:
      UserError: naming the fields and the mend.
    """
    _refuse_sizes(config)
    _refuse_index(config, method_of(config))
    _refuse_policy(config, method_of(config))
    _refuse_credit(config, method_of(config))
    _refuse_comparator(config, method_of(config))
    check_sampling(config.rollout, "config.rollout.")
    if training:
        _refuse_idle(config, method_of(config))
        _warn_of_bias(config)
        _warn_of_unread(config, unlike)


def _refuse_sizes(config: ConfigDict) -> None:
    if not config.data.train or not config.data.eval:
        raise UserError("config.data.train and config.data.eval need at least one source each")
    weights = tuple(config.data.weights)
    if not all(isinstance(weight, int | float) and 0 < weight < math.inf for weight in weights):
        raise UserError(f"config.data.weights={weights!r}: must be numbers above 0, one a source of config.data.train")
    if weights and len(weights) != len(config.data.train):
        raise UserError(f"config.data.weights has {len(weights)} entries for {len(config.data.train)} sources of config.data.train")
    if config.rollout.candidates < config.rollout.shown:
        raise UserError(
            f"config.rollout.candidates={config.rollout.candidates}: must be at least config.rollout.shown={config.rollout.shown}"
        )
    rollouts = config.grpo.minibatch_questions * config.grpo.group_size
    if rollouts % config.grpo.microbatch:
        raise UserError(
            f"config.grpo.microbatch={config.grpo.microbatch}: must divide minibatch_questions x group_size = {rollouts}"
        )
    if config.train.questions % config.grpo.minibatch_questions:
        raise UserError(
            f"config.grpo.minibatch_questions={config.grpo.minibatch_questions}: must divide config.train.questions="
            f"{config.train.questions}"
        )
    if config.warmstart.batch % config.warmstart.microbatch:
        raise UserError(
            f"config.warmstart.microbatch={config.warmstart.microbatch}: must divide "
            f"config.warmstart.batch={config.warmstart.batch}"
        )


def _refuse_index(config: ConfigDict, method: Method) -> None:
    if config.index.kind == "bm25" and not method.leaves_retriever:
        raise UserError(
            f"config.index.kind=bm25: method {config.method.name} trains an encoder: use scann or exact, or {_frozen()}"
        )
    if config.index.server and method.trains_encoder:
        raise UserError(
            f"config.index.server: method {config.method.name} indexes the corpus anew with every encoder it trains, which a "
            "server does not: leave it empty"
        )
    if config.index.server and config.index.folder:
        raise UserError(
            "config.index.server and config.index.folder are both set: the server has its index; leave one of them empty"
        )


def _refuse_policy(config: ConfigDict, method: Method) -> None:
    grpo, ppo = config.grpo, config.policy.algorithm == "ppo"
    if 0 < grpo.dual_clip <= 1:
        raise UserError(f"config.grpo.dual_clip={grpo.dual_clip!r}: must be above 1, or 0 for none")
    if config.ppo.value_clip <= 0:
        raise UserError(f"config.ppo.value_clip={config.ppo.value_clip!r}: must be above 0")
    if ppo and method.trains_retriever:
        raise UserError(
            f"config.policy.algorithm=ppo: method {config.method.name} trains the retriever, whose credit is GRPO's advantage: use "
            f"--config.policy.algorithm=grpo, or a method that leaves the retriever alone ({_frozen()})"
        )
    if ppo and grpo.llds:
        raise UserError(
            f"config.grpo.llds={grpo.llds}: the guard needs one advantage an action, and PPO has one a token: set it to 0"
        )
    if grpo.llds and config.train.questions == grpo.minibatch_questions:
        raise UserError(
            f"config.grpo.llds={grpo.llds}: with one minibatch a step no likelihood has fallen when it looks: set "
            f"config.grpo.minibatch_questions to less than config.train.questions={config.train.questions}, or llds to 0"
        )
    if ppo and grpo.filter_zero_advantage:
        raise UserError("config.grpo.filter_zero_advantage=True: PPO learns from every rollout: set it to False, or use grpo")


def _refuse_credit(config: ConfigDict, method: Method) -> None:
    if method.use_rag and not method.use_outcome and config.credit.gamma == 0:
        raise UserError(
            f"config.credit.gamma=0: method {config.method.name} trains the retriever by gamma L_RAG alone: give one above 0"
        )
    if config.credit.first_hop == "mask" and config.credit.target != "answer":
        raise UserError(
            f"config.credit.target={config.credit.target!r}: config.credit.first_hop='mask' leaves it no turn; use one of the two"
        )


def _refuse_comparator(config: ConfigDict, method: Method) -> None:
    name, a, s = config.method.name, config.agentic, config.selection
    ends = stage_ends(config)
    if min(after - before for before, after in zip((0, *ends), ends)) < 1:
        raise UserError(f"config.train.steps={config.train.steps}: method {name} has {len(ends)} stages, and each needs a step")
    if method.trains_encoder:
        if a.judge not in ("likelihood", "policy") and not a.judge.startswith(("http://", "https://")):
            raise UserError(
                f"config.agentic.judge={a.judge!r}: must be likelihood, policy, or an address such as http://host:8000/v1"
            )
        if a.judge.startswith("http") and not a.judge_model:
            raise UserError("config.agentic.judge_model is empty: name the model that config.agentic.judge serves")
        if a.min_local > 100:
            raise UserError(f"config.agentic.min_local={a.min_local}: local scores are 0 to 100")
        if a.candidates < config.rollout.shown:
            raise UserError(
                f"config.agentic.candidates={a.candidates}: must be at least config.rollout.shown={config.rollout.shown}"
            )
        if a.batch % a.microbatch:
            raise UserError(f"config.agentic.microbatch={a.microbatch}: must divide config.agentic.batch={a.batch}")
    if any(stage.collect for stage in method.stages):
        if config.policy.trainable != "full":
            raise UserError(
                f"config.policy.trainable={config.policy.trainable}: method {name} trains all parameters: set it to full"
            )
        if s.min_searches > s.max_searches:
            raise UserError(f"config.selection.min_searches={s.min_searches}: above config.selection.max_searches={s.max_searches}")


def _refuse_idle(config: ConfigDict, method: Method) -> None:
    """Settings with which a run would go through all its steps and one of its learners would stay as it is."""
    name, grpo, steps = config.method.name, config.grpo, config.train.steps
    if method.trains_retriever and config.rollout.max_searches == 0:
        raise UserError(
            f"config.rollout.max_searches=0: method {name} trains the retriever, which nobody asks: allow at least 1, or use a "
            f"method that leaves the retriever alone ({_frozen()})"
        )
    if method.trains_retriever and config.credit.period > steps:
        raise UserError(
            f"config.credit.period={config.credit.period}: method {name} would never train the retriever in "
            f"config.train.steps={steps}: set it to at most {steps}"
        )
    if method.trains_policy and config.policy.algorithm == "grpo":
        if grpo.group_size == 1:
            other = "" if method.trains_retriever else ", or use --config.policy.algorithm=ppo"
            raise UserError(
                f"config.grpo.group_size=1: a rollout that is its whole group always has advantage 0: set it to at least 2{other}"
            )
        if config.rollout.temperature == 0:
            raise UserError(
                "config.rollout.temperature=0: the greedy rollouts of a group are all the same, so every advantage is 0: set it "
                "above 0, such as 1.0 (evaluation and ask are greedy by themselves)"
            )


def _frozen() -> str:
    return ", ".join(name for name, method in METHODS.items() if method.leaves_retriever)


def _warn_of_bias(config: ConfigDict) -> None:
    """What a token is drawn from is not what the trainer computes with: right for evaluation and `ask` only."""
    neutral = {"top_p": 1, "top_k": 0, "min_new_tokens": 0}
    off = {name: config.rollout[name] for name, value in neutral.items() if config.rollout[name] != value}
    if off:
        shown = ", ".join(f"config.rollout.{name}={value}" for name, value in off.items())
        log.warning(
            "%s: tokens are drawn from a renormalised distribution, while the trainer's log-probs are the full softmax's: in "
            "training the importance ratios are biased (evaluation and ask may well use it)",
            shown,
        )


def _warn_of_unread(config: ConfigDict, unlike: Collection[str]) -> None:
    found = {name: why for name, why in unread(config).items() if name in unlike}
    for why in dict.fromkeys(found.values()):
        names = ", ".join(f"config.{name}" for name, reason in found.items() if reason == why)
        log.warning("nothing reads %s: %s; leave it out, or choose another method", names, why)


def unread(config: ConfigDict) -> dict[str, str]:
    """{"group.field": why no step of this run reads it}"""
    method, name, ppo = method_of(config), config.method.name, config.policy.algorithm == "ppo"
    found = {} if ppo else {f"ppo.{field}": "the policy learns by GRPO" for field in config.ppo}
    if not method.trains_encoder:
        found |= {f"agentic.{field}": f"method {name} does not train the whole encoder" for field in config.agentic}
    if not any(stage.collect for stage in method.stages):
        found |= {f"selection.{field}": f"method {name} selects no rollouts" for field in config.selection}
    if ppo:
        found["grpo.kl_coef"] = "the policy learns by PPO, which has config.ppo.kl_coef"
    if not method.trains_retriever:
        why = f"method {name} " + (
            "trains the whole encoder, by InfoNCE" if method.trains_encoder else "leaves the retriever alone"
        )
        read = {"tau"}  # by the logged p of a search
        if method.trains_encoder and config.agentic.judge == "likelihood":
            read |= {"golds", "turns_per_batch", "pairs_at_once"}  # by document scoring
        found |= {f"credit.{field}": why for field in config.credit if field not in read}
        return found | {f"retriever.{field}": why for field in ("lora_rank", "lora_alpha")}
    if not method.use_rag:
        found["credit.gamma"] = f"method {name} has no RAG term"
    if method.distil != "replug":
        found["credit.likelihood_tau"] = f"method {name} has no softmax over likelihoods"
    if not method.use_outcome:
        found |= {f"credit.{field}": f"method {name} has no outcome credit" for field in ("clamp_negative", "shown_only")}
    if config.credit.target == "answer":
        why = "config.credit.target=answer has no next action"
        found |= {f"credit.{field}": why for field in ("no_span", "sibling")}
    return found
