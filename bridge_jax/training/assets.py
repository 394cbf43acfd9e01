"""Everything of a run that does not change while it trains: models, tokenizer, encoder, index, corpus, rollout engine."""

from __future__ import annotations

import dataclasses
import logging
from pathlib import Path

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from ml_collections import ConfigDict

from bridge_jax.data.cache import cache_dir
from bridge_jax.data.formats import canonical_name
from bridge_jax.data.qa import OFFICIAL
from bridge_jax.errors import UserError
from bridge_jax.files import AnyPath, as_path, local_copy
from bridge_jax.mesh import batch_ways, make_mesh, rollout_mesh, shard_tree
from bridge_jax.models import e5, hub, qwen2
from bridge_jax.models.attention_kernels import choose_backend
from bridge_jax.models.lora import LoRAConfig
from bridge_jax.plugins import load_function
from bridge_jax.retrieval.corpus import Corpus
from bridge_jax.retrieval.retriever import Retriever
from bridge_jax.rollout.episodes import RolloutConfig, RolloutEngine
from bridge_jax.training.methods import method_of, stage_of
from bridge_jax.training.search import open_corpus, open_retriever, open_trained

log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, eq=False)
class Assets:
    """Loaded once a process; `base_params` is the policy's starting point (and, without `lora`, the reference policy).

    What learns lies on `mesh`, of all devices of all processes: `policy`, `base_params`, `tower` (the encoder whose query side
    learns). What plays and searches lies on `rollout_mesh`, this process' own devices: `rollout_policy` (the same module),
    `encoder`, the index. On a single device both meshes are None, and `tower` is `encoder`.
    """

    config: ConfigDict
    mesh: Mesh | None
    rollout_mesh: Mesh | None
    policy: qwen2.Qwen2
    rollout_policy: qwen2.Qwen2
    base_params: dict
    tokenizer: object
    eos_ids: tuple[int, ...]
    tower: e5.Encoder
    encoder: e5.Encoder
    corpus: Corpus
    index: object  # None for BM25, which has no vectors
    retriever: Retriever
    engine: RolloutEngine
    policy_fingerprint: str  # of the weights the policy starts from


def load_assets(config: ConfigDict, workdir: Path, *, use_warmstart: bool = True, trained: AnyPath | None = None) -> Assets:
    """Load models and corpus, build the index where there is none yet.

    Args:
      trained: a folder with the encoder that took the place of config.retriever.encoder, and its index (`trained_folder`).
      use_warmstart: False gives the model that `config.policy.model` names even when a warm start is configured.

    Raises:
      UserError: a missing model, corpus, index or warm start, or one that does not fit another.
    """
    refuse_strange_corpus(config)
    mesh = make_mesh(config.mesh.data, config.mesh.fsdp, config.mesh.tensor)
    ways = batch_ways(mesh)
    if config.grpo.microbatch % ways:
        log.warning(
            "config.grpo.microbatch=%d does not split over %d batch devices: each computes every row; use a multiple of %d",
            *(config.grpo.microbatch, ways, ways),
        )
    mesh = mesh if mesh.size > 1 else None
    rollouts = rollout_mesh(mesh, config.mesh.rollout_tensor)
    tool = load_function(config.rollout.tool, "rollout.tool")
    corpus = open_corpus(config)
    encoder = load_encoder(config, rollouts, trained)
    source = policy_source(config, as_path(workdir)) if use_warmstart else config.policy.model
    folder, compute_dtype = hub.resolve(source), jnp.dtype(config.policy.compute_dtype)
    head_dim = qwen2.config_from_folder(folder).head_dim
    policy, base_params = qwen2.load(
        folder,
        dtype=jnp.float32 if config.policy.trainable == "full" else compute_dtype,
        mesh=mesh,
        compute_dtype=compute_dtype,
        lora=policy_lora(config),
        remat=config.policy.remat,
        attention=choose_backend(config.policy.attention, jax.local_devices()[0], compute_dtype, head_dim),
    )
    rollout_policy = policy.clone(mesh=rollouts)
    tokenizer = qwen2.load_tokenizer(folder)
    eos_ids = qwen2.eos_ids(folder, tokenizer)
    retriever = open_search(config, encoder, corpus, rollouts, trained)  # last: what can be wrong is found before the long work
    playing = rollout_config(config, encoder if trained else None)
    return Assets(
        config=config,
        mesh=mesh,
        rollout_mesh=rollouts,
        policy=policy,
        rollout_policy=rollout_policy,
        base_params=base_params,
        tokenizer=tokenizer,
        eos_ids=eos_ids,
        tower=on_mesh(encoder, mesh),
        encoder=encoder,
        corpus=corpus,
        index=getattr(retriever, "index", None),
        retriever=retriever,
        engine=RolloutEngine(rollout_policy, tokenizer, eos_ids, playing, retriever, tool),
        policy_fingerprint=hub.weights_fingerprint(folder),
    )


def with_encoder(assets: Assets, trained: AnyPath) -> Assets:
    """The same with another encoder and its index, which is built there where it is not yet."""
    config, mesh = assets.config, assets.rollout_mesh
    encoder = load_encoder(config, mesh, trained)
    retriever = open_search(config, encoder, assets.corpus, mesh, trained)
    playing, tool = rollout_config(config, encoder), assets.engine.tool
    engine = RolloutEngine(assets.rollout_policy, assets.tokenizer, assets.eos_ids, playing, retriever, tool)
    return dataclasses.replace(
        assets, encoder=encoder, tower=on_mesh(encoder, assets.mesh), index=retriever.index, retriever=retriever, engine=engine
    )


def open_search(config: ConfigDict, encoder: e5.Encoder, corpus: Corpus, mesh: Mesh | None, trained: AnyPath | None):
    """The retriever of the configuration, or that of an encoder which a run has trained."""
    if trained is None:
        return open_retriever(config, encoder, corpus, mesh)
    return open_trained(config, encoder, corpus, trained / "index", mesh)


def round_folder(workdir: AnyPath, number: int) -> AnyPath:
    """Where round `number` (from 1) of a method that trains the encoder keeps what it made."""
    return workdir / "agentic_r" / f"round_{number}"


def trained_folder(config: ConfigDict, workdir: AnyPath, step: int) -> AnyPath | None:
    """Where the encoder lies that the run has used in step `step`; None for that of the configuration."""
    if not step or not method_of(config).trains_encoder:
        return None
    return round_folder(as_path(workdir), stage_of(config, step)[0])


def separator(encoder: e5.Encoder) -> str:
    """What stands between question and query for an encoder trained on both (METHOD 8): its own separator token."""
    return f" {encoder.tokenizer.sep_token or '[SEP]'} "


def on_mesh(encoder: e5.Encoder, mesh: Mesh | None) -> e5.Encoder:
    """The encoder with its parameters on `mesh`, for what is computed there."""
    if mesh is None:
        return encoder
    params = shard_tree(mesh, encoder.params, encoder.module.config.units)
    return dataclasses.replace(encoder, module=encoder.module.clone(mesh=mesh), params=params)


def policy_source(config: ConfigDict, workdir: Path) -> str:
    """The model id or folder the policy starts from: the warm start when one is configured.

    Raises:
      UserError: the warm start is not there.
    """
    if not config.policy.warmstart:
        return config.policy.model
    folder = workdir / "warmstart" if config.policy.warmstart == "auto" else as_path(config.policy.warmstart)
    if not (folder / "config.json").is_file():
        raise UserError(
            f"no warm-started policy at {folder}: run python -m bridge_jax.warmstart with the same --config and --workdir first, "
            "or pass --config.policy.warmstart= to start from the model as it is"
        )
    return str(local_copy(folder, cache_dir()))


def policy_lora(config: ConfigDict) -> LoRAConfig | None:
    if config.policy.trainable == "full":
        return None
    return LoRAConfig(config.policy.lora_rank, config.policy.lora_alpha, tuple(config.policy.lora_targets))


def retriever_lora(config: ConfigDict, shape: e5.Shape) -> LoRAConfig:
    """shape: the encoder module's `config`."""
    return e5.tower_lora(shape, config.retriever.lora_rank, config.retriever.lora_alpha)


def load_encoder(config: ConfigDict, mesh: Mesh | None, trained: AnyPath | None = None) -> e5.Encoder:
    r = config.retriever
    given = {name: r[name] for name in ("pooling", "query_prefix", "passage_prefix") if r[name] != "auto"}
    name = r.encoder if trained is None else local_copy(trained / "retriever", cache_dir())
    encoder = e5.load(name, mesh=mesh, max_length=r.max_length, **given)
    return dataclasses.replace(encoder, module=encoder.module.clone(lora=retriever_lora(config, encoder.module.config)))


def refuse_strange_corpus(config: ConfigDict) -> None:
    """The embedded passages do not hold the answers of the official sets.

    Raises:
      UserError: official questions over the embedded corpus.
    """
    official = [name for name in (*config.data.train, *config.data.eval) if canonical_name(name) in OFFICIAL]
    if config.index.corpus == "embedded" and official:
        raise UserError(
            f"config.index.corpus is the small embedded one, which cannot answer {official[0]}: give --config.index.corpus=FILE "
            "(wiki-18 in the paper), or train on embedded/hotpotqa"
        )


def rollout_config(config: ConfigDict, trained: e5.Encoder | None = None) -> RolloutConfig:
    """trained: an encoder that reads the question with the query."""
    r = config.rollout
    return RolloutConfig(
        max_searches=r.max_searches,
        shown=r.shown,
        candidates=r.candidates,
        max_prompt_tokens=r.max_prompt_tokens,
        max_new_tokens=r.max_new_tokens,
        max_observation_tokens=r.max_observation_tokens,
        max_passage_tokens=r.max_passage_tokens,
        max_response_tokens=r.max_response_tokens,
        chunk=r.chunk,
        batch_groups=r.batch_groups,
        top_p=r.top_p,
        top_k=r.top_k,
        min_new_tokens=r.min_new_tokens,
        overlap_search=r.overlap_search,
        retry_invalid=r.retry_invalid,
        cut_inside=r.cut_inside,
        question_separator="" if trained is None else separator(trained),
    )
