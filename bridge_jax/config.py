"""The full configuration of a run: every field with its default, loading, overrides and validation.

A config file (`configs/*.py`) defines `get_config()` which starts from `default()` and sets fields; the command line overrides
single fields (`--config.credit.gamma=0.1`). `load` gives a locked, validated `ml_collections.ConfigDict`. Defaults are the paper's
scale (paper, project page, and the published recipes of VT-Search and Search-R1).
"""

from __future__ import annotations

import difflib
import importlib.util
import logging
import math
import sys
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from bridge_jax import settings_check
from bridge_jax.errors import UserError
from bridge_jax.overrides import parse_value, split_overrides
from bridge_jax.training import methods

log = logging.getLogger(__name__)

METHODS = tuple(methods.METHODS)


def default() -> ConfigDict:
    """Every field of a run at the paper's scale (Qwen2.5-3B-Instruct, E5-base-v2, wiki-18)."""
    c = ConfigDict()

    c.method = ConfigDict()
    c.method.name = "bridge"  # see training/methods.py

    c.policy = ConfigDict()
    c.policy.model = "Qwen/Qwen2.5-3B-Instruct"  # hub id, folder, or smollm2-135m-instruct | qwen2.5-coder-0.5b-instruct (fetched)
    c.policy.warmstart = ""  # "" = start from the model; "auto" = <workdir>/warmstart; or a folder
    c.policy.trainable = "full"  # all weights, or a LoRA on frozen ones
    c.policy.algorithm = "grpo"  # grpo | ppo (with a frozen retriever: search_r1, vt_search)
    c.policy.lora_rank = 32  # with trainable = lora
    c.policy.lora_alpha = 64.0  # the update counts lora_alpha / lora_rank times
    # Kernels of every layer that get a LoRA.
    c.policy.lora_targets = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    c.policy.compute_dtype = "bfloat16"  # master weights are float32 when trained in full
    c.policy.remat = True  # compute a layer's activations again in the backward pass instead of keeping them
    c.policy.attention = "auto"  # of the policy's training: auto (xla) | xla | cudnn (NVIDIA, bfloat16) | splash (TPU)

    c.retriever = ConfigDict()
    c.retriever.encoder = "intfloat/e5-base-v2"  # hub id, folder, or minilm-l6-v2 (fetched)
    c.retriever.pooling = "auto"  # mean | cls | last; auto = as the encoder's files or name say (models/recipe.py)
    c.retriever.query_prefix = "auto"  # likewise ("query: " for E5, none where nothing is said)
    c.retriever.passage_prefix = "auto"  # likewise ("passage: " for E5)
    c.retriever.max_length = 256  # tokens of a query or passage that are read
    c.retriever.lora_rank = 16  # of the query tower's LoRA
    c.retriever.lora_alpha = 32.0  # its update counts lora_alpha / lora_rank times

    c.index = ConfigDict()
    c.index.corpus = "embedded"  # passages (retrieval/passages.py), or "embedded" or "mini"; "a,b" = several corpora, merged
    c.index.folder = ""  # "" = built on first use in the cache, keyed by encoder and corpus; "a,b" = one for each corpus
    c.index.kind = "auto"  # auto | scann | exact | approx (exact and approx: on the devices) | bm25 (with a frozen retriever)
    c.index.limit = 0  # first rows of the corpus only; 0 = all
    c.index.merge = "score"  # of several: score | rank (reciprocal rank: each corpus's first, then each one's second, ...)
    c.index.function = ""  # module:function that gives another retriever (docs/extending.md)
    c.index.server = ""  # "http://host:port,..." = python -m bridge_jax.serve holds the index; the corpus is read here

    c.data = ConfigDict()
    c.data.train = ("nq", "hotpotqa")  # files, official names, embedded/<set> or mini/<set>
    c.data.train_split = "train"  # of the sources that have splits
    c.data.weights = ()  # one weight a source; () = by size
    c.data.eval = ("hotpotqa",)  # sources, as in data.train
    c.data.eval_split = ""  # "" = the published evaluation split of each set ("test" for embedded sets)
    c.data.eval_limit = 500  # questions a dataset; 0 = all

    c.rollout = ConfigDict()
    c.rollout.prompt = "search_r1"  # search_r1 | brief | bare (data/prompts.py)
    c.rollout.max_searches = 2  # a rollout; then one last generation, to answer
    c.rollout.shown = 3  # passages the policy reads after a search
    c.rollout.candidates = 40  # passages a search returns, all of which are credited
    c.rollout.temperature = 1.0  # of training; evaluation is greedy
    c.rollout.top_p = 1.0  # below 1: sample from the most likely tokens that hold so much mass (of the 64 most likely)
    c.rollout.top_k = 0  # sample from so many most likely tokens, at most 64; 0 = all
    c.rollout.max_prompt_tokens = 4096  # a longer question is left out, never cut
    c.rollout.max_response_tokens = 4096  # everything after the prompt, observations included
    c.rollout.max_new_tokens = 2048  # one generation
    c.rollout.retry_invalid = False  # True: invalid actions, also generations that are too long, get Search-R1's sentence and go on
    c.rollout.min_new_tokens = 0  # one generation: until then it can neither end its text nor close a tag
    c.rollout.max_observation_tokens = 1024  # what is read after one search, tags included
    c.rollout.cut_inside = False  # a longer one: True = its first tokens are shown, False = its first whole passages
    c.rollout.max_passage_tokens = 0  # of each shown or scored passage; 0 = no limit of its own
    c.rollout.chunk = 32  # tokens decoded between two looks of the host
    c.rollout.batch_groups = 64  # question groups decoded together
    c.rollout.tool = ""  # module:function that answers some of the queries itself (docs/extending.md)
    c.rollout.overlap_search = False  # search while other rows decode: pays when a search takes longer than a few decoding steps

    c.reward = ConfigDict()
    c.reward.function = ""  # module:function; "" = exact match with a gold answer (docs/extending.md)

    c.grpo = ConfigDict()
    c.grpo.group_size = 8  # G: rollouts of a question
    c.grpo.minibatch_questions = 64  # questions in one optimiser step; divides train.questions
    # Rows of the longest rollout in one forward/backward: its tokens; shorter rollouts share rows. Divides minibatch_questions x
    # group_size; on several devices a multiple of those that share a batch (mesh.data x mesh.fsdp), or each computes every row.
    c.grpo.microbatch = 8
    c.grpo.advantage = "grpo"  # r - mean, over the group's deviation (grpo) or not (dr_grpo)
    c.grpo.aggregation = "token_mean"  # over all tokens; of each rollout's mean; over the longest possible length (dr_grpo)
    c.grpo.clip_low = 0.2  # the ratio is clipped to [1 - clip_low, 1 + clip_high]
    c.grpo.clip_high = 0.2  # above clip_low: DAPO's clip-higher
    c.grpo.dual_clip = 3.0  # 0 = off
    c.grpo.kl_coef = 1e-4  # weight of the KL to the starting policy (k3, in the loss)
    c.grpo.filter_zero_advantage = False  # DAPO's dynamic sampling, for the policy only
    c.grpo.llds = 0.0  # weight of the guard against likelihood displacement; 0 = off
    c.grpo.llds_gate = "nonnegative"  # nonnegative (A >= 0) | positive (A > 0): the actions it guards
    c.grpo.lr = 1e-6  # of AdamW, constant after the warm-up
    c.grpo.warmup_steps = 10  # optimiser steps in which the rate grows from 0
    c.grpo.weight_decay = 0.01  # of AdamW
    c.grpo.grad_clip = 1.0  # largest global norm of a gradient

    c.ppo = ConfigDict()  # Search-R1's; clips, minibatches, decay and the policy's rate are grpo's, whose kl_coef is not read
    c.ppo.critic_lr = 1e-5  # of the critic's AdamW
    c.ppo.critic_warmup_steps = 15  # updates: 0.015 of Search-R1's 1005 steps
    c.ppo.gae_lambda = 1.0  # of the advantage estimate, at most 1
    c.ppo.discount = 1.0  # of later rewards, at most 1
    c.ppo.kl_coef = 1e-3  # of the KL to the reference in each token's reward
    c.ppo.value_clip = 0.5  # how far a value may move from the rollout's in one step's loss

    c.credit = ConfigDict()
    c.credit.tau = 1.0  # temperature of p = softmax(score / tau); 0.01 to 0.1 for sharp cosines (REPLUG's gamma; its paper has 0.1)
    c.credit.likelihood_tau = 0.1  # REPLUG's beta: of its softmax over the answer's likelihoods
    c.credit.gamma = 0.02  # weight of L_RAG beside J_ret; 0.1 to 1 below 128 turns an update
    c.credit.golds = 1  # gold answers scored; > 1 = log-mean-exp over the first ones
    c.credit.clamp_negative = False  # advantages clamped at 0 for the retriever
    c.credit.shown_only = False  # outcome credit on the shown documents only
    c.credit.anchor = 0.0  # weight of 1 - cos between a query's vector and the base encoder's
    c.credit.period = 1  # P: steps between retriever updates
    c.credit.max_turns = 512  # M: turns in one retriever update
    c.credit.minibatch = 64  # turns in one gradient step
    c.credit.epochs = 1  # passes over an update's turns
    c.credit.lr = 1e-4  # of the retriever's AdamW
    c.credit.warmup_steps = 20  # gradient steps in which the rate grows from 0
    c.credit.weight_decay = 0.0  # of AdamW
    c.credit.grad_clip = 1.0  # largest global norm of a gradient
    c.credit.turns_per_batch = 4  # turns (times candidates) scored in one program
    # Pairs of a token and a column it attends to (512 more a token) that scoring holds at once on a device, 4 to 8 x heads bytes
    # each: some 8 GB for 16 heads. Beyond it turns, then candidates, follow one another; one history or row is never cut.
    c.credit.pairs_at_once = 2**26
    # What a turn that is followed by another search is credited by; last turns always by the answer (training/next_action.py).
    c.credit.target = "answer"  # answer | next_action | both (the sum)
    c.credit.no_span = "paper"  # without a successful next action: paper (the answer) | zero (no credit)
    c.credit.sibling = "history"  # whose next action may serve: same tokens so far (history) | same query | any of the group
    c.credit.first_hop = "paper"  # paper | mask: no credit on such turns at all

    # Method agentic_r alone (training/agentic.py, docs/comparators.md): rounds of training the whole encoder, then the agent.
    c.agentic = ConfigDict()
    c.agentic.rounds = 2  # they divide train.steps between them
    c.agentic.questions = 10000  # of a round's trajectories
    c.agentic.max_searches = 5  # of trajectories and of what goes on from them; the agent trains with rollout.max_searches
    c.agentic.candidates = 20  # passages judged a search
    c.agentic.judge = "likelihood"  # of local relevance: likelihood (no judge) | policy | http://host:port/v1 (key: OPENAI_API_KEY)
    c.agentic.judge_model = ""  # the model that the endpoint serves
    c.agentic.min_local = 60  # the best candidate's local score (0 to 100), or the search teaches nothing
    c.agentic.positives = 3  # ties with the best candidate, at most
    c.agentic.negatives = 15  # of each positive's own; all passages of the other pairs in the batch are negatives, too
    c.agentic.batch = 256  # pairs in an optimiser step, over all devices
    # Pairs (a query, 1 + negatives passages) encoded at once: divides agentic.batch; the gradient is the batch's all the same. On
    # several devices it is rounded up to a multiple of those that share a batch (mesh.data x mesh.fsdp), the batch to one of it.
    c.agentic.microbatch = 16
    c.agentic.epochs = 2  # over the pairs of a round
    c.agentic.lr = 2e-5  # after a tenth of the steps; then falling to 0
    c.agentic.temperature = 0.01  # of the contrastive loss (InfoNCE)

    # Method simple_deep_searcher alone (training/selection.py): which rollouts it learns from, with the settings of `warmstart`.
    c.selection = ConfigDict()
    c.selection.per_question = 1  # of those that qualify: fewest searches, then fewest tokens
    c.selection.min_searches = 1  # a rollout with fewer is not learnt from
    c.selection.max_searches = 5  # nor one with more
    c.selection.max_tokens = 0  # of the response; 0 = no limit of its own

    c.train = ConfigDict()
    c.train.steps = 250  # of every stage of the method
    c.train.seed = 0  # of everything that is drawn
    c.train.questions = 512  # per step
    c.train.eval_every = 25  # 0 = only at the start and at the end
    c.train.checkpoint_every = 10  # steps
    c.train.keep = 2  # latest checkpoints kept, besides the best
    c.train.log_rollouts_every = 1  # steps between files in rollouts/, which has the last step's, too; 0 = none
    c.train.max_skipped_updates = 3  # non-finite updates in a row before the run stops
    c.train.max_fault_share = 0.5  # of a step's rollouts whose search engine failed: beyond it the run stops; 1 = never
    c.train.tensorboard = False  # write tensorboard/, too
    c.train.wandb = ""  # a Weights & Biases project; "" = off

    c.mesh = ConfigDict()
    c.mesh.data = 1  # ways of the batch without sharding weights
    c.mesh.fsdp = -1  # -1 = all remaining devices
    c.mesh.tensor = 1  # ways of a layer's heads and channels
    c.mesh.rollout_tensor = 1  # of rollouts and scoring, within the devices of a process; their rows are split over the rest

    c.warmstart = ConfigDict()
    c.warmstart.questions = 2000  # traces trained on; a ninth as many more, at most 20, are held out
    c.warmstart.epochs = 2  # passes over the traces
    c.warmstart.batch = 32  # traces in one optimiser step
    c.warmstart.microbatch = 8  # traces in one forward and backward pass; divides warmstart.batch
    c.warmstart.lr = 1e-5  # of AdamW
    c.warmstart.distractors = 2  # other passages shown beside a missing gold passage
    return c


def add_config_flag(parser) -> None:
    """`--config` on an argparse parser; overrides (`--config.a.b=v`) are what `parse_known_args` leaves over."""
    parser.add_argument(
        "--config",
        required=True,
        metavar="FILE",
        help="a config file, such as configs/pocket.py; single fields are overridden with --config.group.field=value",
    )


def parse_args(parser, argv: Sequence[str] | None = None):
    """-> (namespace, config): argparse plus the `--config.*` overrides.

    Raises:
      UserError: an unknown field, a value of the wrong type, a config file that cannot be read.
    """
    overrides, rest = split_overrides(sys.argv[1:] if argv is None else argv)
    args = parser.parse_args(rest)
    return args, load(args.config, overrides)


def load(path: str | Path, overrides: Sequence[str] = (), training: bool = True) -> ConfigDict:
    """Run `get_config()` of the file, apply `group.field=value` overrides, then what the method implies elsewhere; validate, lock.

    Args:
      training: False for commands that only use a run: settings that teach nothing are no mistake there.

    Raises:
      UserError: naming the file, the field (with the nearest known name) or the value and what is allowed.
    """
    config, neutral = _run_file(Path(path)), flatten(default())
    given = [(name, text) for name, _, text in (override.partition("=") for override in overrides)]
    for name, text in given:
        _set(config, neutral, name, text)
    _apply_method(config, {name for name, _ in given})
    # A file serves all methods: what its run gives itself is on the command line.
    own = flatten(config)
    validate(config, training, [name for name, _ in given if own[name] != neutral[name]])
    return config.lock()


def _apply_method(config: ConfigDict, given: set[str]) -> None:
    """Set the fields that the method implies, except `given` ones, and say so."""
    known = flatten(config)
    method = methods.METHODS.get(str(known.get("method.name")))
    if method is None:
        return  # `validate` names it
    implied = {}
    for name, value in {**method.at_most, **method.implied}.items():
        if name in given:
            continue
        group, field = name.split(".")
        if name in method.at_most:
            value = min(value, known[name])
        elif callable(value):
            value = value(config)
        config[group][field] = implied[name] = value
    if implied:
        shown = ", ".join(f"{name}={value}" for name, value in implied.items())
        log.info("method %s implies %s (override with --config.group.field=value)", known["method.name"], shown)


def _run_file(path: Path) -> ConfigDict:
    if not path.is_file():
        here = ", ".join(sorted(str(p) for p in path.parent.glob("*.py"))) if path.parent.is_dir() else ""
        raise UserError(f"config file {path} does not exist{f'; there are: {here}' if here else ''}")
    spec = importlib.util.spec_from_file_location(f"bridge_config_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise UserError(f"config file {path}: must be a Python file that ends with .py, such as configs/pocket.py")
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
        config = module.get_config()
    except (AttributeError, SyntaxError, KeyError, TypeError, ImportError) as error:
        raise UserError(f"config file {path}: {type(error).__name__}: {error}") from error
    if not isinstance(config, ConfigDict):
        raise UserError(f"config file {path}: get_config() must return bridge_jax.config.default() with fields set")
    return config


def flatten(config: ConfigDict) -> dict[str, Any]:
    """-> {"group.field": value}"""
    return {f"{group}.{field}": value for group, fields in config.items() for field, value in fields.items()}


def _set(config: ConfigDict, known: dict[str, Any], name: str, text: str) -> None:
    """known: every field with its default, whose type the value has to have."""
    if name not in known:
        raise UserError(f"config has no field {name!r}; {_nearest(name, known)}")
    group, field = name.split(".")
    value = parse_value(text, known[name])
    try:
        config[group][field] = value
    except TypeError as error:
        raise UserError(f"config.{name}={text}: must be {type(known[name]).__name__}, such as {known[name]!r}") from error


def _nearest(name: str, known) -> str:
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f"did you mean {close[0]!r}?" if close else f"groups are {', '.join(default())}"


_CHOICES = {
    "method.name": METHODS,
    "policy.trainable": ("full", "lora"),
    "policy.algorithm": ("grpo", "ppo"),
    "policy.compute_dtype": ("float32", "bfloat16"),
    "policy.attention": ("auto", "xla", "cudnn", "splash"),
    "retriever.pooling": ("auto", "mean", "cls", "last"),
    "index.kind": ("auto", "scann", "exact", "approx", "bm25"),
    "index.merge": ("score", "rank"),
    "grpo.advantage": ("grpo", "dr_grpo"),
    "grpo.aggregation": ("token_mean", "seq_mean", "dr_grpo"),
    "credit.target": ("answer", "next_action", "both"),
    "credit.no_span": ("paper", "zero"),
    "credit.sibling": ("history", "query", "any"),
    "credit.first_hop": ("paper", "mask"),
    "grpo.llds_gate": ("nonnegative", "positive"),
}
_AT_LEAST = {  # smallest allowed value; numbers not named here must be >= 0
    "policy.lora_rank": 1,
    "policy.lora_alpha": 1e-6,  # at 0 the LoRA counts for nothing, and the run would learn nothing
    "retriever.lora_rank": 1,
    "retriever.lora_alpha": 1e-6,
    "retriever.max_length": 8,
    "rollout.shown": 1,
    "rollout.candidates": 1,
    "rollout.max_prompt_tokens": 16,
    "rollout.max_response_tokens": 16,
    "rollout.max_new_tokens": 1,
    "rollout.max_observation_tokens": 16,
    "rollout.chunk": 1,
    "rollout.batch_groups": 1,
    "grpo.group_size": 1,
    "grpo.minibatch_questions": 1,
    "grpo.microbatch": 1,
    "grpo.grad_clip": 1e-6,  # 0 is no "off": it would take all of every gradient
    "credit.tau": 1e-6,
    "credit.likelihood_tau": 1e-6,
    "credit.golds": 1,
    "credit.period": 1,
    "credit.max_turns": 1,
    "credit.minibatch": 1,
    "credit.grad_clip": 1e-6,
    "credit.epochs": 1,
    "credit.turns_per_batch": 1,
    "credit.pairs_at_once": 1,
    "agentic.rounds": 1,
    "agentic.questions": 1,
    "agentic.max_searches": 1,
    "agentic.candidates": 2,
    "agentic.positives": 1,
    "agentic.negatives": 1,
    "agentic.batch": 2,
    "agentic.microbatch": 1,
    "agentic.epochs": 1,
    "agentic.temperature": 1e-6,
    "selection.per_question": 1,
    "train.steps": 1,
    "train.questions": 1,
    "train.checkpoint_every": 1,
    "train.keep": 1,
    "train.max_skipped_updates": 1,
    "mesh.data": -1,
    "mesh.fsdp": -1,
    "mesh.tensor": 1,
    "mesh.rollout_tensor": 1,
    "warmstart.questions": 1,
    "warmstart.batch": 1,
    "warmstart.microbatch": 1,
    "warmstart.epochs": 1,
}
_AT_MOST = {  # largest allowed value, where there is one
    "grpo.clip_low": 1.0,
    "ppo.gae_lambda": 1.0,
    "ppo.discount": 1.0,
    "train.seed": 2**32 - 1,
    "train.max_fault_share": 1.0,
}


def validate(config: ConfigDict, training: bool = True, unlike: Collection[str] = ()) -> None:
    """Refuse unknown fields, wrong types, values out of range, and what `settings_check.check` refuses.

    Raises:
      UserError: naming the field, its value and what is allowed.
    """
    known = flatten(default())
    given = flatten(config)
    for name in given.keys() - known.keys():
        raise UserError(f"config has no field {name!r}; {_nearest(name, known)}")
    for name in known.keys() - given.keys():
        raise UserError(f"config lacks the field {name!r}: start from bridge_jax.config.default()")
    for name, value in given.items():
        like = known[name]
        wanted = (int, float) if isinstance(like, float) else (list, tuple) if isinstance(like, tuple) else type(like)
        if not isinstance(value, wanted) or (isinstance(value, bool) and not isinstance(like, bool)):
            raise UserError(f"config.{name}={value!r}: must be {type(like).__name__}, such as {like!r}")
        if (
            isinstance(value, list | tuple)
            and isinstance(like, tuple)
            and like
            and not all(isinstance(part, type(like[0])) for part in value)
        ):
            raise UserError(f"config.{name}={value!r}: its parts must be {type(like[0]).__name__}, such as {','.join(like)}")
        if isinstance(value, float) and not math.isfinite(value):
            raise UserError(f"config.{name}={value!r}: must be a finite number, such as {like!r}")
        if name in _CHOICES and value not in _CHOICES[name]:
            close = difflib.get_close_matches(str(value), _CHOICES[name], n=1)
            hint = f"; did you mean {close[0]!r}?" if close else ""
            raise UserError(f"config.{name}={value!r}: must be one of {', '.join(_CHOICES[name])}{hint}")
        if isinstance(value, int | float) and not isinstance(value, bool):
            if not value >= _AT_LEAST.get(name, 0):
                raise UserError(f"config.{name}={value!r}: must be at least {_AT_LEAST.get(name, 0)}")
            if value > _AT_MOST.get(name, math.inf):
                raise UserError(f"config.{name}={value!r}: must be at most {_AT_MOST[name]}")
    settings_check.check(config, training, unlike)
