"""One GRPO step (loss, gradients, AdamW) of ours against Tunix's and TRL's: same weights, rollouts and loss, float32, in turns.

    python benchmarks/grpo_step.py --peers-python=peers/bin/python
    python benchmarks/grpo_step.py --quick

A random 4.5 M parameter Qwen2. Three cases: *dense*, 8 rollouts of 64 + 192 tokens; *ragged*, 32 rollouts of search agents
(`step_inputs.ragged`), which peers pad to the longest and we pack; *full_vocab*, dense with V = 151,936. Time is of whole steps,
with packing and transfer, compilation left out. Loss and gradient norm of the first step must agree: all do the same.
Keys ratio_vs_tunix (dense) and ratio_vs_tunix_ragged: our speed over Tunix's, median over rounds; memory_vs_tunix_full_vocab: our
peak memory over Tunix's (below 1 is less; resident bytes above interpreter and libraries, compilation left out on Linux).
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

import compare
import numpy as np
import peer_models
import plots
import training_runs as runs
from arguments import some_of
from peers import step_inputs

from bridge_jax.errors import main_guard

NAME = "grpo_step"
SCRIPTS = {"ours": "ours_step", "tunix": "tunix_step", "trl": "trl_step"}
PEERS = ("tunix", "trl")
CASES = ("dense", "ragged", "full_vocab")
VOCAB, FULL_VOCAB = 8192, 151_936
LOSS = {"lr": 1e-6, "epsilon": 0.2, "dual_clip": 3.0, "grad_clip": 1.0}
TOLERANCE = 1e-3  # relative: of first losses and gradient norms


@main_guard
def main() -> None:
    parser = compare.parser(__doc__, rounds=10)
    parser.add_argument("--cases", type=some_of(CASES), default=",".join(CASES))
    args = parser.parse_args()
    rounds = 1 if args.quick else args.rounds
    engines = compare.Engines(args.peers_python, runs.root_of(args, NAME))
    cases = {}
    with tempfile.TemporaryDirectory() as scratch:
        for name in args.cases.split(","):
            vocab, rollouts = case(name, args.seed, args.quick)
            folder, inputs = Path(scratch) / f"model-{vocab}", Path(scratch) / f"{name}.npz"
            model = peer_models.random_config(vocab)
            if not folder.exists():
                peer_models.write_random(folder, model, args.seed)
            step_inputs.write(inputs, rollouts)
            found = engines.compare(SCRIPTS, {"folder": str(folder), "inputs": str(inputs), **LOSS}, rounds)
            cases[name] = {"parameters": peer_models.count(model), **sizes(rollouts), **measured(found)}
            runs.say(line(name, cases[name]))
    result = headline(cases) | engines.conditions(args, rounds)
    result["cases"] = cases
    path = runs.save(NAME, result, args)
    plot(path, cases)
    print(json.dumps({key: value for key, value in result.items() if key != "cases"}))


def case(name: str, seed: int, quick: bool) -> tuple[int, list[step_inputs.Rollout]]:
    """(vocabulary, rollouts)"""
    rng = np.random.default_rng(seed)
    if name == "dense":
        return VOCAB, step_inputs.dense(rng, VOCAB, 1, *((16, 16) if quick else (64, 192)))
    if name == "ragged":
        return VOCAB, step_inputs.ragged(rng, VOCAB, 1 if quick else 4, 8 if quick else 48)
    return FULL_VOCAB, step_inputs.dense(rng, FULL_VOCAB, 1, *((16, 16) if quick else (64, 192)))


def sizes(rollouts: list[step_inputs.Rollout]) -> dict:
    lengths = [len(r.prompt) + len(r.tokens) for r in rollouts]
    return {"rollouts": len(rollouts), "tokens": sum(lengths), "longest": max(lengths)}


def measured(found: dict[str, dict]) -> dict:
    """A case's figures: {"engines": {engine: seconds, peak_bytes, first loss and norm, or failed}, ratios}.

    Raises:
      SystemExit: an engine's first loss or gradient norm is another: it does not do the same step.
    """
    figures = {}
    for engine, one in found.items():
        if "failed" in one:
            figures[engine] = {"failed": one["failed"]}
            continue
        seconds = compare.spread([row["seconds"] for row in one["rounds"]])
        shown = {name: one[name] for name in ("loss", "grad_norm", "computed_tokens")}
        figures[engine] = {"seconds": seconds, "peak_bytes": compare.peak(found, engine), **shown}
        for name in ("loss", "grad_norm"):
            if not np.isclose(one[name], found["ours"][name], rtol=TOLERANCE, atol=TOLERANCE * 1e-2):
                raise SystemExit(f"{engine}: first {name} {one[name]}, ours {found['ours'][name]}: not the same step")
    ratios: dict[str, object] = {}
    for peer in PEERS:
        if figures.get(peer, {}).get("seconds"):
            ratios[f"ratio_vs_{peer}"] = compare.speedup(found, peer)
            ratios[f"memory_vs_{peer}"] = figures["ours"]["peak_bytes"] / figures[peer]["peak_bytes"]
    return {"engines": figures, **ratios}


def headline(cases: dict[str, dict]) -> dict[str, float]:
    """The budget's keys, of the cases that were measured."""
    found = {}
    for key, name in (("ratio_vs_tunix", "dense"), ("ratio_vs_tunix_ragged", "ragged")):
        if "ratio_vs_tunix" in cases.get(name, {}):
            found[key] = cases[name]["ratio_vs_tunix"]["median"]
    if "memory_vs_tunix" in cases.get("full_vocab", {}):
        found["memory_vs_tunix_full_vocab"] = cases["full_vocab"]["memory_vs_tunix"]
    return found


def line(name: str, case: dict) -> str:
    shown = [
        f"{engine} {one['seconds']['median']:.2f} s, {one['peak_bytes'] / 1e9:.2f} GB" if "seconds" in one else f"{engine} failed"
        for engine, one in case["engines"].items()
    ]
    return f"{name}: {'; '.join(shown)}"


def plot(result: Path, cases: dict[str, dict]) -> None:
    """Seconds a step, a bar a case and engine, from the fastest round to the slowest."""
    bars = {}
    for name, case in cases.items():
        for engine, one in case["engines"].items():
            if "seconds" in one:
                seconds = one["seconds"]
                bars[f"{name}, {engine}"] = {"mean": seconds["median"], "low": seconds["min"], "high": seconds["max"]}
    plots.bars(result.with_suffix(".png"), bars, "seconds a step")


if __name__ == "__main__":
    sys.exit(main())
