"""Rollout speed: our sampler against Tunix's and Hugging Face's `generate`, same weights, float32, same machine, in turns.

    python benchmarks/rollout.py               # a random 4.5 M Qwen2: groups of 1, 8, 16, prompts of 64, 512, 1536 tokens
    python benchmarks/rollout.py --models=smollm2-135m-instruct --groups=8    # results/rollout-smollm2-135m-instruct.json
    python benchmarks/rollout.py --quick

One question a batch: G samples of one prompt, all of the same length (nobody stops early), drawn at temperature 1 from the whole
vocabulary; prompt and generation count, compilation does not. Before that, greedy tokens of all engines are compared: it is the
same model. `cases` has everything. Keys ratio_vs_tunix, ratio_vs_hf: our tokens/s over theirs at G = 8 and prompts of 512 with the
first model (of --quick: its only case), median over rounds; a round is one call of each. `peak_bytes` is resident memory above that
of the interpreter and its libraries, compilation left out (Linux).
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
from arguments import at_least, whole_numbers

from bridge_jax.errors import main_guard
from bridge_jax.models import pocket_models, qwen2

NAME = "rollout"
SCRIPTS = {"ours": "ours_rollout", "tunix": "tunix_rollout", "hf": "hf_rollout"}
PEERS = ("tunix", "hf")
RANDOM = "random"
HEADLINE = {"group_size": 8, "prompt": 512}
GREEDY = 24  # tokens compared


@main_guard
def main() -> None:
    parser = compare.parser(__doc__, rounds=5)
    parser.add_argument("--models", default=RANDOM, help=f"of {RANDOM} and {', '.join(language_models())} (fetched before)")
    parser.add_argument("--groups", type=whole_numbers, default="1,8,16", help="samples a prompt")
    parser.add_argument("--prompts", type=whole_numbers, default="64,512,1536", help="tokens")
    parser.add_argument("--new-tokens", type=at_least(1), default=128)
    args = parser.parse_args()
    sizes = [(G, P) for G in args.groups for P in args.prompts]
    new, rounds = args.new_tokens, args.rounds
    if args.quick:
        sizes, new, rounds = [(8, 64)], 16, 1
    engines = compare.Engines(args.peers_python, runs.root_of(args, NAME))
    cases, agreement = [], {}
    with tempfile.TemporaryDirectory() as scratch:
        for model, folder in folders(args.models.split(","), Path(scratch), args.seed).items():
            agreement[model] = agree(engines, folder, args.seed)
            for G, P in sizes:
                found = engines.compare(SCRIPTS, job(folder, P, G, new, 1.0, args.seed), rounds)
                cases.append({"model": model, "group_size": G, "prompt": P, **measured(found, G * new)})
                runs.say(line(cases[-1]))
    result = headline(cases) | engines.conditions(args, rounds)
    result |= {"new_tokens": new, "greedy_agreement": agreement}
    result["cases"] = cases
    name = NAME if args.models == RANDOM else f"{NAME}-{args.models.replace(',', '-')}"
    path = runs.save(name, result, args)
    plot(path, cases)
    print(json.dumps({key: value for key, value in result.items() if key != "cases"}))


def language_models() -> list[str]:
    return [name for name in pocket_models.MODELS if name != "minilm-l6-v2"]


def folders(names: list[str], scratch: Path, seed: int) -> dict[str, Path]:
    """{model: a Qwen2 folder}. Weights that are not in the cache are not fetched: that is said, and the model left out."""
    found = {}
    for name in names:
        folder = pocket_models.cache_folder() / name
        if name == RANDOM:
            found[name] = peer_models.write_random(scratch / name, peer_models.random_config(), seed)
        elif name in language_models() and folder.is_dir():
            found[name] = peer_models.as_qwen2(folder, scratch / name)
        elif name in language_models():
            runs.say(f"{name} left out: python -c 'from bridge_jax.models import hub; hub.resolve(\"{name}\")' fetches it")
        else:
            raise SystemExit(f"--models={name}: there are {RANDOM}, {', '.join(language_models())}")
    return found


def job(folder: Path, prompt: int, group_size: int, new_tokens: int, temperature: float, seed: int) -> dict:
    """What a worker gets. Prompts are random ids: 0 is left out, some engines take it for padding."""
    vocab = min(qwen2.config_from_folder(folder).vocab_size, 30_000)
    return {
        "folder": str(folder),
        "prompts": np.random.default_rng([seed, prompt]).integers(1, vocab, (1, prompt)).tolist(),
        "group_size": group_size,
        "new_tokens": new_tokens,
        "temperature": temperature,
        "seed": seed,
    }


def agree(engines: compare.Engines, folder: Path, seed: int) -> dict[str, int]:
    """{peer: how many of the first GREEDY greedy tokens are ours, up to the first other one}."""
    found = engines.compare(SCRIPTS, job(folder, 64, 1, GREEDY, 0.0, seed), rounds=0)
    (mine,) = found["ours"]["tokens"]
    return {peer: same_tokens(mine, found[peer]["tokens"][0]) for peer in PEERS if "tokens" in found.get(peer, {})}


def same_tokens(a: list[int], b: list[int]) -> int:
    """Length of the common beginning."""
    return next((n for n, (x, y) in enumerate(zip(a, b, strict=True)) if x != y), len(a))


def measured(found: dict[str, dict], tokens: int) -> dict:
    """A case's figures: {"engines": {engine: tokens_per_second and peak_bytes, or failed}, "ratio_vs_<peer>": spread}."""
    figures = {}
    for engine, one in found.items():
        if "failed" in one:
            figures[engine] = {"failed": one["failed"]}
        else:
            speed = compare.spread([tokens / row["seconds"] for row in one["rounds"]])
            figures[engine] = {"tokens_per_second": speed, "peak_bytes": compare.peak(found, engine)}
    ratios = {f"ratio_vs_{peer}": compare.speedup(found, peer) for peer in PEERS}
    return {"engines": figures} | {name: ratio for name, ratio in ratios.items() if ratio}


def headline(cases: list[dict]) -> dict[str, float]:
    """The ratios of the case that the budget names, or of the only one; a peer that was not measured has no key."""
    case = next((case for case in cases if HEADLINE.items() <= case.items()), cases[0])
    names = [f"ratio_vs_{peer}" for peer in PEERS]
    return {name: case[name]["median"] for name in names if name in case} | {
        "of": {name: case[name] for name in ("model", "group_size", "prompt")}
    }


def line(case: dict) -> str:
    speeds = [
        f"{engine} {one['tokens_per_second']['median']:.0f} tokens/s" if "tokens_per_second" in one else f"{engine} failed"
        for engine, one in case["engines"].items()
    ]
    return f"{case['model']}, G = {case['group_size']}, prompt {case['prompt']}: {', '.join(speeds)}"


def plot(result: Path, cases: list[dict]) -> None:
    """Tokens/s over the prompt's length, a panel a model and group size."""
    panels: dict[str, dict[str, tuple[list, list]]] = {}
    for case in cases:
        panel = panels.setdefault(f"{case['model']}, G = {case['group_size']}", {})
        for engine, one in case["engines"].items():
            if "tokens_per_second" in one:
                xs, ys = panel.setdefault(engine, ([], []))
                xs.append(case["prompt"])
                ys.append(one["tokens_per_second"]["median"])
    plots.lines(result.with_suffix(".png"), panels, "prompt, tokens", "tokens/s", logx=True, logy=True)


if __name__ == "__main__":
    sys.exit(main())
