"""What `python -m bridge_jax.evaluate` does once its flags are read: open, answer what is missing, aggregate, write, show."""

from __future__ import annotations

import argparse
import dataclasses
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import jax
from ml_collections import ConfigDict
from rich.console import Console

from bridge_jax import config as configuration
from bridge_jax import endpoint
from bridge_jax.data.corpora import SHIPPED
from bridge_jax.errors import UserError
from bridge_jax.evaluation import aggregate, mirage, paired, provenance, sources
from bridge_jax.evaluation.baselines import baseline_of
from bridge_jax.evaluation.driver import Driver
from bridge_jax.evaluation.sources import DRY_RUN
from bridge_jax.evaluation.store import Store, find_result, parts_folder, read_result
from bridge_jax.evaluation.table import against_table, medical_table, results_table
from bridge_jax.retrieval.progress import track
from bridge_jax.rollout.generators import DryGenerator, EndpointGenerator
from bridge_jax.training.assets import refuse_strange_corpus
from bridge_jax.training.session import open_session


def evaluate(args: argparse.Namespace, config: ConfigDict, specs: Sequence[str], sets, name: str) -> tuple[Path, dict | None]:
    """Answer the questions that have no record yet -> (result file, result), or (the parts, None) while other shards work.

    The result's predictions are without `store.LONG` where this call has written them; the file has them whole.
    """
    folder = Path(args.workdir) / "eval"
    baseline = baseline_of(args.baseline) if args.baseline else None
    searches = baseline is None or baseline.may_search
    corpora, encoders = _split(args.corpora), _split(args.encoders)
    if corpora:  # the first one stands for the configured one, which is then not opened for nothing
        config = config.copy_and_resolve_references().unlock()
        config.index.corpus, config.index.folder = corpora[0], ""
    if searches:
        _refuse_strange_corpus(config, specs, sets)
    client = session = generator = None
    shard = args.shard or (jax.process_index(), jax.process_count())
    if args.endpoint:
        name = args.name or f"{_slug(args.model or '')}_{name}"
        client = endpoint.from_flags(args, parts_folder(folder, name) / f"requests.{shard[0]}of{shard[1]}.jsonl")
        generator = EndpointGenerator(client)
    elif args.dry_run:
        name, generator = args.name or f"dry-run_{name}", DryGenerator()
    else:
        session = open_session(config, args.workdir, args.checkpoint)
        name = args.name or f"step_{session.step:06d}_{name}"
        if encoders and encoders[0] != config.retriever.encoder:
            if session.step:
                raise UserError(f"--encoders={args.encoders}: the run has trained {config.retriever.encoder}: name that one first")
            session = dataclasses.replace(session, retriever_lora=None)  # untrained, and of another encoder
    own = searches and (session is None or corpora or encoders)
    search = sources.open_search(config, corpora, encoders) if own else None
    if baseline is None:
        answerer, answered = sources.agent(session, config, search)
    else:
        limits = sources.limits_of(config, baseline, args.context_tokens, generator is not None)
        answered = provenance.of_baseline(baseline, limits)
        if generator is not None:
            answerer = Driver(baseline, generator, search.retriever if search else None, limits)
        else:
            answerer = sources.baseline_of_policy(session, config, search, baseline, limits)
    parts = {"session": session, "search": search, "endpoint": client, "candidates": answerer.k, "searches": searches}
    settings = sources.settings(args, config, sets, answered, **parts)
    store = Store(folder, name, settings, sets, shard)
    if (finished := store.finished()) is not None:
        return store.result_path, finished
    with store.open():
        outages = answer_pending(store, answerer)
        if outages:
            raise UserError(
                f"{outages} questions met an index that failed (see the log); the others are kept: run the same command again"
            )
        if store.missing():  # others may have finished, and cleared up, since this one read what they had
            finished = store.finished()
            return (store.result_path, finished) if finished else (store.parts, None)
        records = store.records()
        result = {
            "step": session.step if session else None,
            "checkpoint": args.checkpoint if session else None,
            "limit": config.data.eval_limit if args.limit is None else args.limit,
            "split": config.data.eval_split if args.split is None else args.split,
            "settings": store.settings,
            "machine": provenance.machine(),
            "config": {key: list(v) if isinstance(v, tuple) else v for key, v in configuration.flatten(config).items()},
            "seconds": sum(row["seconds"] for rows in records.values() for row in rows),
        }
        if client is not None:
            result["endpoint"] = client.spent()
        result |= aggregate.result(records, answerer.k, config.train.seed)
        write_mirage(store.result_path, result["settings"], {name: store.whole(name) for name in store.sets})
        path = store.write(result)
    return path, result


def answer_pending(store: Store, answerer) -> int:
    """Append a record for every question of the shard that has none -> how many have none still, because the index failed."""
    outages = 0
    for name in store.sets:
        pending = store.pending(name)
        done = len(store.sets[name][store.shard[0] :: store.shard[1]]) - len(pending)
        if not pending:
            continue
        with track(f"evaluating {name}", done + len(pending), "questions", done) as advance:

            def keep(outcome, name=name, advance=advance):
                nonlocal outages
                advance(1)
                if outcome.outage:  # nobody's answer: an outage must not become a number
                    outages += 1
                    return
                record = aggregate.record(outcome, answerer.corpus, answerer.k)
                store.append(name, record | {"latency": outcome.latency})

            for at in range(0, len(pending), answerer.block):
                answerer.answer(pending[at : at + answerer.block], finished=keep)
    return outages


def write_mirage(path: Path, settings: Mapping, predictions: Mapping) -> list[Path]:
    """The multiple-choice predictions in MIRAGE's layout, in the folder <result>.mirage."""
    llm = settings["endpoint"]["model"] if "endpoint" in settings else settings["policy"]["model"]
    found, search = settings["retriever"], None
    if found:
        names = ("+".join(Path(one["name"]).name.removesuffix(".jsonl") for one in found[part]) for part in ("corpora", "encoders"))
        search = (settings["limits"]["shown"], *names)
    return mirage.write(path.with_suffix(".mirage"), predictions, llm, search)


def show(console: Console, result: Mapping) -> None:
    settings = result["settings"]
    who = settings["endpoint"]["model"] if "endpoint" in settings else f"{result['checkpoint']} checkpoint, step {result['step']}"
    if settings.get("policy") == DRY_RUN:
        who = "dry run (no model: these are not results)"
    how = f"baseline {settings['baseline']}" if settings["baseline"] else "search protocol"
    console.print(results_table(result, title=f"{who}, {how}, greedy"))
    if any("accuracy" in row for row in result["datasets"].values()):
        console.print(medical_table(result))
    if "endpoint" in result:
        counts = result["endpoint"].items()
        spent = ", ".join(f"{value:.4f} {name}" if name == "dollars" else f"{value:,} {name}" for name, value in counts)
        console.print(f"the endpoint was asked this time: {spent}", highlight=False)


def show_against(console: Console, result: Mapping, run: str, path: Path) -> None:
    """Print the paired comparison with another result."""
    other = find_result(run, path.stem)
    found = paired.compare(result, read_result(other), result["config"]["train.seed"])
    console.print(against_table(found, title=f"this run minus {other}"))
    for which, count in (("this", found["only_ours"]), ("the other", found["only_theirs"])):
        if count:
            console.print(f"{count} questions that only {which} has are left out", highlight=False)
    if found["settings"]:
        console.print(f"they differ in: {', '.join(found['settings'])}", markup=False, highlight=False)


def _refuse_strange_corpus(config: ConfigDict, specs: Sequence[str], sets) -> None:
    medical = [name for name in sets if name in aggregate.MEDICAL]
    if medical and config.index.corpus in SHIPPED:
        raise UserError(
            f"config.index.corpus={config.index.corpus} has no passage for {medical[0]}: give --corpora=A,B (JSON lines)"
        )
    if specs:
        own = config.copy_and_resolve_references().unlock()
        own.data.train, own.data.eval = ("embedded/hotpotqa",), tuple(specs)
        refuse_strange_corpus(own)


def _split(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def _slug(model: str) -> str:
    return re.sub(r"[^\w.+-]+", "-", model)
