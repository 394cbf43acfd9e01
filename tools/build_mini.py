"""Train the mini world's tokenizer, policy and encoder, and write them into the package (bridge_jax/models/shipped).

    python tools/build_mini.py                    # both: half an hour on two cores
    python tools/build_mini.py --only=encoder
    python tools/build_mini.py --out=/tmp/shipped --policy-steps=50      # does it run?

Deterministic for one machine and jax version; nothing of world 0, the one that experiments use, is ever seen.
"""

from __future__ import annotations

import argparse
import functools
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "mini"))

import encoder as encoder_training
import policy as policy_training
import tokenizer as tokenizers

from bridge_jax.models import e5, hub, qwen2

SHIPPED = Path(hub.__file__).parent / "shipped"
say = functools.partial(print, flush=True)


def build_encoder(folder: Path, steps: int) -> None:
    tokenizer = tokenizers.build(for_encoder=True)
    module, params = encoder_training.train(tokenizer, steps, say=say)
    figures = encoder_training.recall(module, params, tokenizer)
    say("ideal one-hop queries over world 0:", " ".join(f"{name} {value:.3f}" for name, value in figures.items()))
    e5.save(folder, e5.Encoder(module, params, tokenizer, folder.name, "mean", "query: ", "passage: ", 64, ""))


def build_policy(folder: Path, steps: int) -> None:
    tokenizer = tokenizers.build(for_encoder=False)
    model, params = policy_training.train(tokenizer, steps, say=say)
    qwen2.save(folder, model, params, tokenizer)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=SHIPPED, help="folder that gets mini-policy/ and mini-encoder/")
    parser.add_argument("--only", choices=("encoder", "policy"), help="train one of the two")
    parser.add_argument("--encoder-steps", type=int, default=encoder_training.STEPS)
    parser.add_argument("--policy-steps", type=int, default=policy_training.STEPS)
    args = parser.parse_args()
    if args.only != "policy":
        build_encoder(args.out / "mini-encoder", args.encoder_steps)
    if args.only != "encoder":
        build_policy(args.out / "mini-policy", args.policy_steps)


if __name__ == "__main__":
    main()
