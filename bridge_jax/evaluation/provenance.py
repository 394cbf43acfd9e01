"""Everything that affects a number of an evaluation, as JSON values: a result file says it, a resumed run is compared with it."""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import json
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path

import jax

import bridge_jax
from bridge_jax.data.formats import Question
from bridge_jax.data.prompts import STYLES
from bridge_jax.evaluation.baselines import Baseline
from bridge_jax.evaluation.driver import Limits


def digest(value: object) -> str:
    """A short hash of a JSON value."""
    text = json.dumps(value, sort_keys=True, ensure_ascii=False)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:16]


@functools.cache
def code() -> dict:
    """The package's version, and a hash of its source: a checkout is rarely a release."""
    root = Path(bridge_jax.__file__).parent
    total = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        total.update(f"{path.relative_to(root).as_posix()}\0".encode())
        total.update(path.read_bytes())
    return {"version": _version("bridge-jax"), "source": total.hexdigest()[:16]}


def machine() -> dict:
    """Told, but not compared: rounding aside, the same run on another machine gives the same numbers."""
    return {
        "python": platform.python_version(),
        **{name: _version(name) for name in ("jax", "transformers", "scann")},
        "devices": f"{jax.device_count()} x {jax.devices()[0].device_kind}",
        "processes": jax.process_count(),
    }


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def of_sets(sets: Mapping[str, Sequence[Question]]) -> dict:
    """{set: {"n", "hash" of its questions and golds}}"""
    return {
        name: {"n": len(rows), "hash": digest([[q.id, q.question, q.golds, q.gold_passage_ids] for q in rows])}
        for name, rows in sets.items()
    }


def of_retriever(retrievers: Sequence, candidates: int) -> dict:
    """retrievers: one an encoder, over the same corpora."""
    corpus = retrievers[0].corpus
    indexes = [getattr(retriever, "index", None) for retriever in retrievers]
    merged = next((index.how for index in indexes if hasattr(index, "how")), None)
    return {
        "encoders": [_of_encoder(retriever) for retriever in retrievers],
        "corpora": [
            {"name": _name(one.path), "passages": len(one), "hash": one.fingerprint[:16]}
            for one in getattr(corpus, "corpora", [corpus])
        ],
        "index": sorted({_kind(part) for index in indexes for part in getattr(index, "indexes", [index])}),
        "candidates": candidates,
    } | ({"merged_by": merged} if merged else {})


def _kind(index) -> str:
    return str(getattr(index, "kind", type(index).__name__))


def _of_encoder(retriever) -> dict:
    encoder = getattr(retriever, "encoder", None)
    if encoder is None:  # it searches by words
        return {"name": type(retriever).__name__}
    return {
        "name": str(encoder.name),
        "weights": encoder.fingerprint[:16],
        "pooling": encoder.pooling,
        "query_prefix": encoder.query_prefix,
        "passage_prefix": encoder.passage_prefix,
        "append_eos": encoder.append_eos,
        "max_length": encoder.max_length,  # of a query and of an embedded passage, in tokens
    }


def _name(path) -> str:
    return "+".join(Path(part).name for part in path) if isinstance(path, list | tuple) else Path(path).name


def of_policy(config, fingerprint: str, tokenizer, workdir: Path, checkpoint: str, step: int) -> dict:
    own = workdir / "config.json"
    trained = checkpoint != "start" and own.is_file()
    return {
        "model": config.policy.model,
        "weights": fingerprint[:16],
        "checkpoint": checkpoint,
        "step": step,
        "run": hashlib.sha256(own.read_bytes()).hexdigest()[:16] if trained else None,
        "compute_dtype": config.policy.compute_dtype,
        "chat_template": digest(getattr(tokenizer, "chat_template", None) or ""),
    }


def of_agent(config) -> dict:
    """The search protocol's template and limits; greedy decoding."""
    names = (
        "max_searches", "shown", "max_prompt_tokens", "max_response_tokens", "max_new_tokens", "min_new_tokens",
        "max_observation_tokens", "max_passage_tokens",
    )  # fmt: skip
    style = config.rollout.prompt
    template = {"style": style, "hash": digest(STYLES.get(style, ""))}
    return {"template": template, "limits": {name: config.rollout[name] for name in names}, "decoding": {"temperature": 0.0}}


def of_baseline(baseline: Baseline, limits: Limits) -> dict:
    texts = [baseline.prompt, baseline.going, baseline.last, baseline.found, baseline.condense]
    return {
        "template": {"style": baseline.name, "hash": digest([*texts, *baseline.stops])},
        "limits": {
            "max_searches": limits.searches if baseline.searches is None else baseline.searches,
            "shown": (baseline.shown or limits.shown) if baseline.may_search else 0,
            "max_new_tokens": limits.new_tokens,
            "context_tokens": limits.context_tokens if baseline.may_search else 0,
            "max_passage_tokens": limits.passage_tokens if baseline.may_search else 0,
        },
        "decoding": {"temperature": 0.0, "stops": list(baseline.stops)},
    }
