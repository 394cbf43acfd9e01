"""Supervised cold start: `python -m bridge_jax.warmstart --config=configs/pocket.py --workdir=runs/pocket`.

Builds search traces from gold passages and real retrieval, trains the policy on them, and writes `<workdir>/warmstart` as a
Hugging Face folder. `train` starts from it when `config.policy.warmstart` is "auto".
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import sys
from collections.abc import Sequence

import numpy as np
from ml_collections import ConfigDict
from rich.console import Console

from bridge_jax import config as configuration
from bridge_jax.data.qa import Question, load_questions
from bridge_jax.errors import UserError, main_guard
from bridge_jax.files import AnyPath, as_path, is_remote, write_text, written_locally
from bridge_jax.models import qwen2
from bridge_jax.retrieval.progress import track
from bridge_jax.retrieval.retriever import RetrievalFault
from bridge_jax.training import sft
from bridge_jax.training.assets import Assets, load_assets
from bridge_jax.training.inputs import claim_inputs
from bridge_jax.training.traces import Trace, TraceBuilder, trace_row
from bridge_jax.training.workdir import claim_workdir, exclusive, refuse_unwritable

HELD_OUT = 20  # traces kept out of training, to see that it generalises; a tenth where they are fewer than 200
# What the warm start depends on; a rerun may change everything else.
GROUPS = ("warmstart", "rollout", "retriever", "index")
FIELDS = ("policy.model", "policy.compute_dtype", "data.train", "data.train_split", "train.seed")


@main_guard
def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bridge_jax.warmstart",
        description="Teach the policy the search protocol on supervised traces (think, search, information, answer), before RL.",
        epilog="Example:\n"
        "  python -m bridge_jax.warmstart --config=configs/pocket.py --workdir=runs/pocket --config.warmstart.epochs=1\n"
        "Interrupted? The same command goes on where it stopped.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    configuration.add_config_flag(parser)
    parser.add_argument("--workdir", required=True, type=as_path, metavar="FOLDER", help="the run's folder; gets warmstart/")
    args, config = configuration.parse_args(parser, argv)
    run(config, args.workdir)
    return 0


def run(config: ConfigDict, workdir: AnyPath) -> AnyPath:
    """Everything the command does. Returns the folder of the warm-started policy.

    Raises:
      UserError: another configuration's workdir, missing models or data, no usable question, a diverged loss.
    """
    console = Console(file=sys.stderr, highlight=False)
    claim(config, workdir, write=False)
    workdir = as_path(workdir)
    folder = workdir / "warmstart"
    if (folder / "config.json").is_file():
        console.print(
            f"{folder} is complete; nothing to do (delete it to make it anew). Next: python -m bridge_jax.train",
            markup=False,
            soft_wrap=True,
        )
        return folder
    refuse_unwritable(workdir)
    assets = load_assets(config, workdir, use_warmstart=False)
    traces, heldout = build_traces(assets, console)
    with exclusive(workdir):
        claim(config, workdir)
        return _train(config, workdir, folder, assets, traces, heldout, console)


def _train(
    config, workdir: AnyPath, folder: AnyPath, assets: Assets, traces: list[Trace], heldout: list[Trace], console: Console
) -> AnyPath:
    write_traces(workdir / "warmstart_traces.jsonl", traces, heldout)
    w = config.warmstart
    settings = sft.SFTConfig(epochs=w.epochs, batch=w.batch, microbatch=w.microbatch, lr=w.lr, seed=config.train.seed)
    params, summary = sft.train(assets.policy, assets.base_params, traces, heldout, settings, workdir, assets.mesh)
    export(assets, params, folder)
    sft.delete_state(workdir)
    console.print(
        f"warm start done: {summary['steps']} steps, held-out loss {summary['heldout_before']:.3f} -> "
        f"{summary['heldout_after']:.3f}; policy in {folder}. Next: python -m bridge_jax.train, same --config and --workdir",
        markup=False,
        soft_wrap=True,
    )
    return folder


def claim(config: ConfigDict, workdir: AnyPath, write: bool = True) -> None:
    """The workdir's warm start belongs to one configuration (see GROUPS and FIELDS), and to the content of what it reads."""
    free = [name for name in configuration.flatten(config) if name.split(".")[0] not in GROUPS and name not in FIELDS]
    claim_workdir(config, workdir, name="warmstart_config.json", may_change=free, write=write)
    claim_inputs(config, workdir, "warmstart_inputs.json", write)


def training_questions(config: ConfigDict) -> list[Question]:
    """All questions of `config.data.train` in one seeded order."""
    questions = [q for source in config.data.train for q in load_questions(source, config.data.train_split)]
    random.Random(f"warmstart {config.train.seed}").shuffle(questions)
    return questions


def build_traces(assets: Assets, console: Console) -> tuple[list[Trace], list[Trace]]:
    """-> (traces to train on, at most `config.warmstart.questions`; held-out traces of other questions)."""
    config, tokenizer = assets.config, assets.tokenizer
    builder = TraceBuilder(
        corpus=assets.corpus,
        retriever=assets.retriever,
        tokenizer=tokenizer,
        eos_id=assets.eos_ids[0] if tokenizer.eos_token_id is None else tokenizer.eos_token_id,
        rollout=assets.engine.config,
        distractors=config.warmstart.distractors,
        prompt_style=config.rollout.prompt,
        seed=config.train.seed,
    )
    questions = training_questions(config)
    wanted = min(built_for(config.warmstart.questions), len(questions))
    with track("building traces", wanted, "traces") as advance:
        try:
            traces, skipped = builder.build(questions, wanted, advance)
        except RetrievalFault as fault:
            raise UserError(f"warm start: {fault}; run the same command again") from fault
    reasons = ", ".join(f"{reason} {count}" for reason, count in sorted(skipped.items()))
    if len(traces) < 2:
        raise UserError(
            f"warm start: only {len(traces)} of {len(questions)} questions of {', '.join(config.data.train)} give a trace "
            f"({reasons}): use questions whose metadata.gold_ids are in the corpus, or raise config.rollout.max_*_tokens"
        )
    held = held_out(len(traces))
    turns = [turn for trace in traces for turn in trace.turns]
    lengths = [len(trace.prompt) + len(trace.tokens) for trace in traces]
    trained = sum(int(trace.generated.sum()) for trace in traces)
    console.print(
        f"{len(traces)} traces ({held} held out): {len(turns) / len(traces):.2f} searches, {np.mean(lengths):.0f} tokens each "
        f"(longest {max(lengths)}), {trained / sum(lengths):.0%} of them trained; the gold passage was retrieved by "
        f"{np.mean([turn.found for turn in turns]):.0%} of the searches" + (f"; skipped: {reasons}" if reasons else ""),
        markup=False,
        soft_wrap=True,
    )
    return traces[held:], traces[:held]


def held_out(built: int) -> int:
    """Traces kept out of training."""
    return min(HELD_OUT, max(1, built // 10))


def built_for(trained: int) -> int:
    """Traces to build, so that `trained` are left to train on."""
    return trained + min(HELD_OUT, max(1, trained // 9))


def write_traces(path: AnyPath, traces: Sequence[Trace], heldout: Sequence[Trace]) -> None:
    rows = [{"split": split, **trace_row(trace)} for split, part in (("train", traces), ("heldout", heldout)) for trace in part]
    write_text(path, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))


def export(assets: Assets, params: dict, folder: AnyPath) -> None:
    """Write the Hugging Face folder under another name first: a folder called `warmstart` is whole.

    In a bucket its config.json is written last.
    """
    if is_remote(folder):
        with written_locally(folder) as scratch:
            qwen2.save(scratch, assets.policy, params, assets.tokenizer)
        return
    fresh = folder.with_name(f"{folder.name}.tmp")
    shutil.rmtree(fresh, ignore_errors=True)
    qwen2.save(fresh, assets.policy, params, assets.tokenizer)
    fresh.rename(folder)


if __name__ == "__main__":
    sys.exit(main())
