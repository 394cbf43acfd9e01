"""Scoring the C documents of a turn after one shared history, against C forward passes over history, document and answer.

    python benchmarks/credit.py
    python benchmarks/credit.py --quick

And *in place*: as if the history were in the rollout's cache at the moment of its search, so that only the documents are computed.
Its seconds and FLOPs leave out what a real one must add (taking the history out of the rollout's cache, scoring few turns at a time
while the rollouts wait), so the ratio shared over in_place is the most that could be gained.

All compute l_d of `objectives.credit` (METHOD 3) with the same weights and unembed answer tokens only. Cases: *mini*, turns of the
mini world as `objectives.scoring.Scorer` packs them (configs/mini.py; padding and all); *small*, a random 4.5 M parameter Qwen2 at
paper-like lengths; *qwen2.5-3b*, the same lengths, compiled on abstract arrays, no weights. FLOPs are XLA's of the compiled
programs. It counts the body of a loop once: f(L) is the rest and one layer, f(0), of a program without layers, is the rest, and all
layers are f(0) + L (f(L) - f(0)). (f(1) would not do: of a history's last layer only keys and values are computed then.)
Keys: flops_ratio (independent over shared, of qwen2.5-3b), max_abs_diff (of l_d, over the cases that are run).
"""

from __future__ import annotations

import dataclasses
import functools
import json
import sys
import time
from collections.abc import Mapping
from unittest import mock

import compare
import jax
import jax.numpy as jnp
import numpy as np
import peer_models
import training_runs as runs
from machine import about

from bridge_jax import config as configuration
from bridge_jax.data.prompts import build_prompt
from bridge_jax.data.qa import load_questions
from bridge_jax.errors import main_guard
from bridge_jax.models import hub, qwen2
from bridge_jax.objectives import logprobs
from bridge_jax.objectives.credit import after_block, document_log_likelihood
from bridge_jax.objectives.logprobs import token_logps
from bridge_jax.objectives.scoring import Scorer
from bridge_jax.rollout import protocol
from bridge_jax.rollout.episodes import Episode, Turn
from bridge_jax.training.credit_stage import scoring_config
from bridge_jax.training.search import open_corpus

NAME = "credit"
HISTORY, DOCUMENT, ANSWER, DOCUMENTS = 600, 150, 8, 40  # tokens; Search-R1's prompt and a first search, passages of 100 words
QWEN_3B = qwen2.Qwen2Config(151_936, 2048, 11_008, 36, 16, 2, 128, rope_theta=1e6, tie_embeddings=True)
UNCHUNKED = 1 << 30  # all answer tokens in one piece: a loop over pieces would be counted once

Arrays = Mapping[str, np.ndarray]


@main_guard
def main() -> None:
    args = compare.parser(__doc__, rounds=10, peers=False).parse_args()
    runs.share_programs(runs.root_of(args, NAME))
    rounds = 1 if args.quick else args.rounds
    lengths = (60, 15, ANSWER, 8) if args.quick else (HISTORY, DOCUMENT, ANSWER, DOCUMENTS)
    small = peer_models.random_config()
    cases = {
        "mini": run(*mini(args.seed, turns=2 if args.quick else 16), rounds),
        "small": run(
            qwen2.Qwen2(small), peer_models.random_params(small, args.seed), *random_turn(small, args.seed, *lengths), rounds
        ),
        "qwen2.5-3b": flops(QWEN_3B, *random_turn(QWEN_3B, args.seed, HISTORY, DOCUMENT, ANSWER, DOCUMENTS)),
    }
    result = {
        "flops_ratio": cases["qwen2.5-3b"]["flops_ratio"],
        "max_abs_diff": max(case["max_abs_diff"] for case in cases.values() if "max_abs_diff" in case),
        "machine": about(),
        "seed": args.seed,
        "rounds": rounds,
        "cases": cases,
    }
    runs.save(NAME, result, args)
    print(json.dumps(result))


def shared(model, variables, arrays: Arrays, answer_tokens: int, chunk: int = 1024) -> jax.Array:
    """[U, C]: ours."""
    return document_log_likelihood(model, variables, **arrays, answer_tokens=answer_tokens, chunk=chunk)


def in_place(model, variables, given, answer_tokens: int, chunk: int = 1024) -> jax.Array:
    """[U, C]: ours, with the histories in a cache block (`behind_cache`)."""
    return after_block(model, variables, **given, answer_tokens=answer_tokens, chunk=chunk)


def behind_cache(model, variables, arrays: Arrays):
    """What `in_place` is given: the arrays, with a block for the histories."""
    block = model.apply(variables, arrays["history"], valid=arrays["history_valid"], output="block")
    return {"shared": block} | {name: values for name, values in arrays.items() if not name.startswith("history")}


def independent(model, variables, rows: Arrays, answer_tokens: int, chunk: int = 1024) -> jax.Array:
    """[U * C]: a forward pass over every row of `whole_rows`."""
    hidden = model.apply(variables, rows["tokens"], valid=rows["valid"], output="hidden")
    columns = jnp.argsort(~rows["answer_mask"], axis=-1, stable=True)[:, :answer_tokens]
    counted = jnp.take_along_axis(rows["answer_mask"], columns, 1)
    targets = jnp.take_along_axis(rows["tokens"], columns, 1)
    states = jnp.take_along_axis(hidden, jnp.maximum(columns - 1, 0)[..., None], 1)
    logps, _ = token_logps(states, lambda x: qwen2.unembed(variables["params"], x, model.config), targets, chunk)
    return jnp.where(counted, logps, 0.0).sum(-1)


def whole_rows(arrays: Arrays) -> Arrays:
    """The rows [U * C, length of the longest] that the arrays of `document_log_likelihood` stand for."""
    U, C, T = arrays["continuation"].shape

    def joined(history: np.ndarray, continuation: np.ndarray) -> np.ndarray:
        return np.concatenate([np.repeat(history, C, 0), continuation.reshape(U * C, T)], 1)

    valid = joined(arrays["history_valid"], arrays["continuation_valid"])
    order = np.argsort(~valid, 1, kind="stable")[:, : valid.sum(1).max()]
    rows = {
        "tokens": joined(arrays["history"], arrays["continuation"]),
        "valid": valid,
        "answer_mask": joined(np.zeros_like(arrays["history_valid"]), arrays["answer_mask"]),
    }
    return {name: np.take_along_axis(values, order, 1) for name, values in rows.items()}


def run(model, params: dict, arrays: Arrays, answer_tokens: int, rounds: int) -> dict:
    """FLOPs, and seconds and l of both, measured in turns."""
    variables, rows = {"params": params}, whole_rows(arrays)
    calls = {
        "shared": (jax.jit(functools.partial(shared, model, answer_tokens=answer_tokens)), arrays),
        "independent": (jax.jit(functools.partial(independent, model, answer_tokens=answer_tokens)), rows),
        "in_place": (
            jax.jit(functools.partial(in_place, model, answer_tokens=answer_tokens)),
            jax.jit(functools.partial(behind_cache, model))(variables, arrays),
        ),
    }
    values = {name: np.ravel(call(variables, given)) for name, (call, given) in calls.items()}
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, (call, given) in calls.items():
            begin = time.perf_counter()
            jax.block_until_ready(call(variables, given))
            seconds[name].append(time.perf_counter() - begin)
    ratios = [slow / fast for slow, fast in zip(seconds["independent"], seconds["shared"])]
    gains = [shared / fast for shared, fast in zip(seconds["shared"], seconds["in_place"])]
    return flops(model.config, arrays, answer_tokens) | {
        "max_abs_diff": max(float(np.abs(values[name] - values["independent"]).max()) for name in ("shared", "in_place")),
        "smallest_l": float(values["shared"].min()),
        "seconds": {name: compare.spread(times) for name, times in seconds.items()},
        "seconds_ratio": compare.spread(ratios),
        "shared_over_in_place": compare.spread(gains),
    }


def flops(config: qwen2.Qwen2Config, arrays: Arrays, answer_tokens: int) -> dict:
    """FLOPs of the compiled programs, and what they are over."""
    rows = whole_rows(arrays)
    found = {
        "shared": compiled_flops(shared, config, arrays, answer_tokens),
        "independent": compiled_flops(independent, config, rows, answer_tokens),
        "in_place": compiled_flops(in_place, config, arrays, answer_tokens),
    }
    U, C, T = arrays["continuation"].shape
    return {
        "turns": U,
        "documents": C,
        "history": arrays["history"].shape[1],
        "continuation": T,
        "row": rows["tokens"].shape[1],
        "flops": found,
        "flops_ratio": found["independent"] / found["shared"],
        "flops_shared_over_in_place": found["shared"] / found["in_place"],
    }


def compiled_flops(program, config: qwen2.Qwen2Config, arrays: Arrays, answer_tokens: int) -> float:
    """XLA's count for all layers (see the module's text)."""

    def compiled(layers: int):
        part = dataclasses.replace(config, num_layers=layers)
        call = functools.partial(program, qwen2.Qwen2(part), answer_tokens=answer_tokens, chunk=UNCHUNKED)
        variables = {"params": qwen2.abstract_params(part)}
        given = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), dict(arrays))
        if program is in_place:
            given = jax.eval_shape(functools.partial(behind_cache, qwen2.Qwen2(part)), variables, given)
        return jax.jit(call).lower(variables, given).compile()

    with mock.patch.object(logprobs, "LOGITS", UNCHUNKED**2):
        none, all_layers = compiled(0), compiled(config.num_layers)
    if f'"n":"{config.num_layers}"' not in all_layers.as_text():
        raise RuntimeError("the compiler took the loop over layers apart: its FLOPs are not those of one layer")
    none, one = (made.cost_analysis()["flops"] for made in (none, all_layers))
    return none + config.num_layers * (one - none)


def random_turn(config: qwen2.Qwen2Config, seed: int, history: int, document: int, answer: int, documents: int):
    """(arrays, answer_tokens) of one turn of random ids, nothing padded."""
    rng = np.random.default_rng(seed)
    T = document + answer
    mask = np.broadcast_to(np.arange(T) >= document, (1, documents, T))
    arrays = {
        "history": rng.integers(0, config.vocab_size, (1, history), np.int32),
        "history_valid": np.ones((1, history), bool),
        "continuation": rng.integers(0, config.vocab_size, (1, documents, T), np.int32),
        "continuation_valid": np.ones((1, documents, T), bool),
        "answer_mask": np.array(mask),
    }
    return arrays, answer


def mini(seed: int, turns: int):
    """(model, params, arrays, answer_tokens): the shipped policy's first searches for `turns` questions, random passages."""
    config = configuration.load(runs.HOME / "configs" / "mini.py")
    folder = hub.resolve(config.policy.model)
    model, params = qwen2.load(folder)
    tokenizer, corpus = qwen2.load_tokenizer(folder), open_corpus(config)
    scorer = Scorer(model, corpus, tokenizer, scoring_config(config))
    rng, C = np.random.default_rng(seed), config.rollout.candidates
    requests = []
    for question in load_questions(config.data.train[0], config.data.train_split)[:turns]:
        prompt = build_prompt(question, tokenizer, config.rollout.prompt)
        query = np.asarray(protocol.encode(tokenizer, f"<search> {question.question} </search>"), np.int32)
        found = rng.choice(len(corpus), C, replace=False).astype(np.int32)
        turn = Turn(question.question, len(query), found, np.zeros(C, np.float32), 0, (len(query), len(query)))
        nothing = np.zeros(len(query), np.float32)
        episode = Episode(question, 0, 0, prompt, query, np.ones(len(query), bool), nothing, [turn], "answered", "", [])
        requests.append(scorer.answer(episode, turn))
    return model, params, *scorer.pack(requests, turns)


if __name__ == "__main__":
    sys.exit(main())
