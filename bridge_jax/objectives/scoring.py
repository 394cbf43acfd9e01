"""The host side of document scoring: turns of rollouts -> padded arrays -> l of every candidate.

Source: METHOD 3. A continuation is

    <information>Doc 1(Title: ...) text</information><answer> GOLD
    |------------ protocol.document_tokens --------||----- answer -----|

The document's tokens are those of an observation (same renderer, same tokeniser calls). The gold answer is tokenised by itself and
appended to the tokens of `<answer> `: the summed tokens are exactly y of METHOD 3. A byte-level BPE that reads it as one text would
glue the space to the answer (" Paris"). Measured on 48 HotpotQA questions with SmolLM2-135M, 8 passages each, that form scores
the gold passage about 4 nats higher and the others too: it was on top in 44 questions, here in 45.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax
import numpy as np

from bridge_jax.mesh import batch_sharding
from bridge_jax.objectives.credit import document_log_likelihood
from bridge_jax.rollout import protocol

_scorer = jax.jit(document_log_likelihood, static_argnums=0, static_argnames=("answer_tokens", "chunk"))


@dataclasses.dataclass(frozen=True)
class ScoringConfig:
    """golds: gold answers scored per turn: 1 = the first listed; K > 1 = log of the mean likelihood of the first K.
    turns_per_batch: turns in one forward pass (times candidates times golds rows): bounds the memory.
    max_passage_tokens: beginning of each document that is scored, as in an observation; None = whole.
    chunk: tokens unembedded at once."""

    golds: int = 1
    turns_per_batch: int = 4
    max_passage_tokens: int | None = None
    chunk: int = 1024


def answer_tokens(gold: str, tokenizer) -> tuple[list[int], int]:
    """(tokens of `<answer> ` and the gold answer, how many of them come before the answer)."""
    prefix = protocol.encode(tokenizer, f"{protocol.ANSWER_OPEN} ")
    return prefix + protocol.encode_untrusted(tokenizer, gold.strip()), len(prefix)


def build_scoring_batch(
    turns: Sequence[tuple], corpus, tokenizer, config: ScoringConfig, size: int, documents: dict[int, np.ndarray] | None = None
) -> tuple[dict[str, np.ndarray], int]:
    """Padded arrays for `document_log_likelihood` from at most `size` (episode, turn) pairs, all with C candidates.

    corpus[row] -> passage. documents: tokens by corpus row, filled here. Returns (arrays, answer_tokens): history and history_valid
    [size, P], continuation, continuation_valid and answer_mask [size, C*K, T], K = config.golds; rows that do not exist (fewer
    golds, a corpus row of -1, turns beyond the given ones) have no valid column. P and T are rounded up to few values.
    """
    documents = {} if documents is None else documents
    K = config.golds
    C = len(turns[0][1].rows)
    histories = [np.concatenate([episode.prompt, episode.tokens[: turn.history]]) for episode, turn in turns]
    rows: dict[tuple[int, int], tuple[np.ndarray, int, int]] = {}
    for u, (episode, turn) in enumerate(turns):
        answers = [answer_tokens(gold, tokenizer) for gold in episode.question.golds[:K]]
        for c, row in enumerate(int(r) for r in turn.rows):
            if row < 0:
                continue
            if row not in documents:
                documents[row] = protocol.document_tokens(corpus[row], tokenizer, config.max_passage_tokens)
            for k, (answer, start) in enumerate(answers):
                document = documents[row]
                rows[u, c * K + k] = np.concatenate([document, answer]), len(document) + start, len(document) + len(answer)

    P = _round_up(max(map(len, histories)), 128, doubling=True)
    T = _round_up(max(len(tokens) for tokens, _, _ in rows.values()), 64)
    A = _round_up(max(end - start for _, start, end in rows.values()), 8, doubling=True)
    batch = {
        "history": np.zeros((size, P), np.int32),
        "history_valid": np.zeros((size, P), bool),
        "continuation": np.zeros((size, C * K, T), np.int32),
        "continuation_valid": np.zeros((size, C * K, T), bool),
        "answer_mask": np.zeros((size, C * K, T), bool),
    }
    for u, tokens in enumerate(histories):
        batch["history"][u, : len(tokens)] = tokens
        batch["history_valid"][u, : len(tokens)] = True
    for at, (tokens, start, end) in rows.items():
        batch["continuation"][at][: len(tokens)] = tokens
        batch["continuation_valid"][at][: len(tokens)] = True
        batch["answer_mask"][at][start:end] = True
    return batch, A


def _round_up(length: int, step: int, doubling: bool = False) -> int:
    if not doubling:
        return -(-length // step) * step
    while step < length:
        step *= 2
    return step


def score_turns(model, variables, turns: Sequence[tuple], corpus, tokenizer, config: ScoringConfig) -> list[np.ndarray]:
    """l of every turn: a list of [C] float32 arrays, in the order of `turns` (pairs (episode, turn)).

    Turns of like history length share a batch; every batch has the same number of turns, so only (P, T, answer length) make new
    programs. A candidate whose corpus row is -1 gets -inf: pass `turn.rows >= 0` on as the document mask. On a mesh (`model.mesh`)
    turns are split over its batch axes.
    """
    size = config.turns_per_batch
    if model.mesh is not None:
        ways = model.mesh.shape["data"] * model.mesh.shape["fsdp"]
        size = _round_up(size, ways)
    # Long histories first: the largest program is compiled, and runs out of memory, at once rather than at the end.
    order = sorted(range(len(turns)), key=lambda i: -(len(turns[i][0].prompt) + turns[i][1].history))
    scores: list[np.ndarray] = [None] * len(turns)
    documents: dict[int, np.ndarray] = {}
    for at in range(0, len(order), size):
        chosen = order[at : at + size]
        batch, answers = build_scoring_batch([turns[i] for i in chosen], corpus, tokenizer, config, size, documents)
        exists = batch["answer_mask"].any(-1)
        if model.mesh is not None:
            batch = jax.device_put(batch, batch_sharding(model.mesh))
        likelihood = np.asarray(_scorer(model, variables, **batch, answer_tokens=answers, chunk=config.chunk))
        merged = _mean_over_golds(likelihood, exists, config.golds)
        for u, i in enumerate(chosen):
            scores[i] = merged[u]
    return scores


def _mean_over_golds(likelihood: np.ndarray, exists: np.ndarray, golds: int) -> np.ndarray:
    """[U, C*K] -> [U, C]: log of the mean likelihood over the gold answers that exist; -inf where none does."""
    shape = (likelihood.shape[0], -1, golds)
    values = np.where(exists, likelihood, -np.inf).reshape(shape)
    count = exists.reshape(shape).sum(-1)
    top = values.max(-1, keepdims=True)
    top = np.where(np.isfinite(top), top, 0.0)
    with np.errstate(divide="ignore"):
        return (top[..., 0] + np.log(np.exp(values - top).sum(-1) / np.maximum(count, 1))).astype(np.float32)


def compilations() -> int:
    """Scoring programs compiled so far in this process."""
    return _scorer._cache_size()
