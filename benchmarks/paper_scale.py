"""What a step of BRIDGE costs over one of VT-Search at the paper's scale: counted, where it cannot be run.

    python benchmarks/paper_scale.py           # Qwen2.5-3B, the defaults of bridge_jax/config.py; a minute, no weights

FLOPs a token are XLA's of compiled programs (`credit.py` says how loops are counted): reading, scoring, log-probs, and the policy's
gradient with remat. What a step puts through them follows from the config (rollouts, candidates, `credit.max_turns`) and LENGTHS.
Bytes are counted for decoding alone, whose time they bound: all weights once a step of the batch, and the cache columns in use.
Seconds are a roofline of one H200: products at MFU of its peak, decoding at its bandwidth, phases one after the other. They weigh
FLOPs against bytes, no more. The retriever's update (a query tower of 12 x 768 over 512 queries) is below a thousandth, left out.
Keys: bridge_over_vt_search at the defaults; `by_turns`, at other numbers of credited turns, the last one all of them.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json

import credit
import jax
import numpy as np
import training_runs as runs
from machine import about

from bridge_jax import config as configuration
from bridge_jax.models import qwen2
from bridge_jax.objectives.logprobs import token_logps

NAME = "paper_scale"
H200 = {"flops": 989e12, "bytes": 4.8e12}  # dense bfloat16; NVIDIA's data sheet
MFU = 0.4
BYTES = 2  # bfloat16
# Share of the batch's rows that is decoding in a step, of ragged rollouts with the lengths below.
OCCUPANCY = 0.35  # `rows_decoding` of results/flight_play.json


@dataclasses.dataclass(frozen=True)
class Lengths:
    """Tokens, as `credit.py` has them: Search-R1's prompt with a question, three passages of 100 words an observation."""

    prompt: int = 250
    generation: int = 80
    searches: float = 1.5
    observation: int = 470
    document: int = credit.DOCUMENT
    answer: int = credit.ANSWER

    @property
    def generated(self) -> float:
        return self.generation * (self.searches + 1)

    @property
    def observed(self) -> float:
        return self.observation * self.searches

    @property
    def rollout(self) -> int:
        return round(self.prompt + self.generated + self.observed)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    parser.add_argument("--quick", action="store_true", help="the same (it is quick); the result lies under runs/")
    parser.set_defaults(root=None)
    args = parser.parse_args()
    config, lengths = configuration.default(), Lengths()
    counted = flops(credit.QWEN_3B, lengths, config.rollout.candidates)
    every_turn = round(config.train.questions * config.grpo.group_size * lengths.searches)
    turns = sorted({config.credit.max_turns, 2 * config.credit.max_turns, every_turn})
    by_turns = {count: cost(credit.QWEN_3B, config, lengths, counted, count) for count in turns}
    result = {
        "bridge_over_vt_search": by_turns[config.credit.max_turns]["bridge_over_vt_search"],
        "by_turns": by_turns,
        "flops": counted,
        "lengths": dataclasses.asdict(lengths),
        "chip": H200 | {"mfu": MFU},
        "machine": about(),
    }
    runs.save(NAME, result, args)
    print(json.dumps(result))


def flops(model: qwen2.Qwen2Config, lengths: Lengths, candidates: int) -> dict[str, float]:
    """FLOPs of: a token read, a token's log-prob (forward), a token trained (log-prob, gradient, remat), a turn scored."""
    T = lengths.rollout
    tokens = {"tokens": np.zeros((1, T), np.int32)}
    history = round(lengths.prompt + lengths.generation)
    arrays, answer = credit.random_turn(model, 0, history, lengths.document, lengths.answer, candidates)
    return {
        "token_read": credit.compiled_flops(read, model, tokens, 0) / T,
        "token_logp": credit.compiled_flops(logps, model, tokens, 0) / T,
        "token_trained": credit.compiled_flops(gradient, model, tokens, 0) / T,
        "turn_scored": credit.compiled_flops(credit.shared, model, arrays, answer),
    }


def read(model, variables, given, answer_tokens: int, chunk: int) -> jax.Array:
    return model.apply(variables, given["tokens"], output="hidden")


def logps(model, variables, given, answer_tokens: int, chunk: int) -> jax.Array:
    head = functools.partial(qwen2.unembed, variables["params"], config=model.config)
    return token_logps(read(model, variables, given, answer_tokens, chunk), head, given["tokens"], chunk)[0].sum()


def gradient(model, variables, given, answer_tokens: int, chunk: int):
    return jax.grad(lambda x: logps(model.clone(remat=True), x, given, answer_tokens, chunk))(variables)


def cost(model: qwen2.Qwen2Config, config, lengths: Lengths, counted: dict[str, float], turns: int) -> dict[str, float]:
    """Roofline seconds of a step's phases, and their ratio, when `turns` searches are credited."""
    rollouts = config.train.questions * config.grpo.group_size
    read_tokens = config.train.questions * lengths.prompt + rollouts * (lengths.generated + lengths.observed)
    batch = config.rollout.batch_groups * config.grpo.group_size
    decode_steps = rollouts * lengths.generated / (batch * OCCUPANCY)
    columns = lengths.prompt / config.grpo.group_size + (lengths.generated + lengths.observed) / 2
    weights = sum(x.size for x in jax.tree.leaves(qwen2.abstract_params(model)))
    cache = batch * columns * model.num_layers * 2 * model.num_kv_heads * model.head_dim
    peak = MFU * H200["flops"]
    seconds = {
        "read": read_tokens * counted["token_read"] / peak,
        "decode": decode_steps * BYTES * (weights + cache) / H200["bytes"],
        # the gradient, and the reference policy's log-probs for the KL
        "policy": rollouts * lengths.rollout * (counted["token_trained"] + counted["token_logp"]) / peak,
        "score": turns * counted["turn_scored"] / peak,
    }
    without = sum(seconds.values()) - seconds["score"]
    return {"seconds": seconds, "bridge_over_vt_search": 1 + seconds["score"] / without, "decode_steps": decode_steps}


if __name__ == "__main__":
    main()
