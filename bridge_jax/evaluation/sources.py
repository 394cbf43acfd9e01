"""Who answers and what is searched, opened as the flags of `evaluate` say."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass

from ml_collections import ConfigDict

from bridge_jax.endpoint import Endpoint
from bridge_jax.errors import UserError
from bridge_jax.evaluation import provenance
from bridge_jax.evaluation.baselines import Baseline
from bridge_jax.evaluation.driver import Driver, Limits
from bridge_jax.evaluation.fusion import FusedRetriever
from bridge_jax.evaluation.run import Agent, evaluation_engine
from bridge_jax.files import as_path
from bridge_jax.retrieval.retriever import Retriever
from bridge_jax.rollout.generators import PolicyGenerator
from bridge_jax.training import assets as run_assets
from bridge_jax.training.search import open_corpus, open_retriever
from bridge_jax.training.session import Session

DRY_RUN = {"model": "dry-run"}  # who answers it, in the settings
TEMPLATE_TOKENS = 256  # more than the words of any baseline around the question


@dataclass(frozen=True)
class Search:
    """retriever: what is searched. retrievers: its parts, one an encoder."""

    retriever: object
    retrievers: list[Retriever]


def open_search(config: ConfigDict, corpora: Sequence[str], encoders: Sequence[str]) -> Search:
    """The retriever over `corpora`, merged by config.index.merge, by `encoders`, which are fused (empty: the configured ones)."""
    retrievers = []
    for name in encoders or (config.retriever.encoder,):
        own = config.copy_and_resolve_references().unlock()
        own.retriever.encoder = name
        if corpora:
            own.index.corpus = ",".join(corpora)
        if corpora or encoders:
            own.index.folder = ""  # the configured one is of another corpus or encoder
        retrievers.append(open_retriever(own, run_assets.load_encoder(own, None), open_corpus(own), None))
    return Search(retrievers[0] if len(retrievers) == 1 else FusedRetriever(retrievers), retrievers)


def limits_of(config: ConfigDict, baseline: Baseline, context_tokens: int | None, unlimited: bool) -> Limits:
    """What a baseline may read and write, from the configuration.

    context_tokens of a search: as given; else without a limit (`unlimited`: no policy of ours reads it), and for our own policy
    what the configuration allows one search, in proportion to the passages that the baseline shows.
    """
    r = config.rollout
    shown = baseline.shown or r.shown
    if context_tokens is None:
        context_tokens = 0 if unlimited else r.max_observation_tokens * -(-shown // r.shown)
    return Limits(r.max_searches, shown, max(r.candidates, shown), r.max_new_tokens, context_tokens, r.max_passage_tokens)


def agent(session: Session, config: ConfigDict, search: Search | None) -> tuple[Agent, dict]:
    """The policy with the search protocol -> (answerer, settings)."""
    assets = session.assets
    engine = evaluation_engine(assets, search.retriever if search else None)
    made = Agent(
        engine, session.policy_variables, config.rollout.prompt, retriever_lora=session.retriever_lora, seed=config.train.seed
    )
    return made, provenance.of_agent(config)


def baseline_of_policy(session: Session, config: ConfigDict, search: Search | None, baseline: Baseline, limits: Limits) -> Driver:
    assets = session.assets
    searches = limits.searches if baseline.searches is None else baseline.searches
    if searches and not limits.context_tokens:
        raise UserError("--context-tokens=0: a policy of ours needs a limit; give the tokens that one search may show")
    generator = PolicyGenerator(
        assets.policy,
        assets.tokenizer,
        assets.eos_ids,
        session.policy_variables,
        width=config.rollout.batch_groups * config.grpo.group_size,
        prompt_tokens=config.rollout.max_prompt_tokens + TEMPLATE_TOKENS + searches * (limits.context_tokens + limits.new_tokens),
        chunk=config.rollout.chunk,
    )
    return Driver(baseline, generator, search.retriever if search else assets.retriever, limits, lora=session.retriever_lora)


def settings(
    args: argparse.Namespace, config: ConfigDict, sets, answered: dict, *, session: Session | None, search: Search | None,
    endpoint: Endpoint | None, candidates: int, searches: bool,
) -> dict:  # fmt: skip
    """What affects a number, for the result file and for a resumed run to be compared with."""
    retrievers = search.retrievers if search else [session.assets.retriever] if session else []
    found = {
        "code": provenance.code(),
        "datasets": provenance.of_sets(sets),
        "baseline": args.baseline or None,
        **answered,
        "retriever": provenance.of_retriever(retrievers, candidates) if retrievers and searches else None,
    }
    if endpoint is not None:
        return found | {"endpoint": endpoint.describe()}
    if session is None:
        return found | {"policy": DRY_RUN}
    assets, where = session.assets, (as_path(args.workdir), args.checkpoint, session.step)
    return found | {"policy": provenance.of_policy(config, assets.policy_fingerprint, assets.tokenizer, *where)}
