"""The host side of document scoring: turns of rollouts -> padded arrays -> l of every candidate.

Source: METHOD 3 and 12. A scored row is history, document and target; a continuation is all but the history:

    answer       <information>Doc 1(Title: ...) text</information>        <answer> | GOLD               l_d   (METHOD 3)
    next action  \\n\\n<information>Doc 1(Title: ...) text</information>\\n\\n       | SPAN               l'_d  (METHOD 12)
                 |---------------------- document ----------------------|- lead --|-- target --|

The document's tokens are those of an observation (same renderer, same tokeniser calls). What all documents of a turn begin with is
read once, as the end of the history: the same l for fewer tokens. It is `<information>Doc 1(Title:`, and more where titles begin
alike (in a byte-level BPE the space belongs to the title's first token).
The gold answer is tokenised by itself and appended to the tokens of `<answer> `: the summed tokens are exactly y of METHOD 3. A
byte-level BPE that reads it as one text would glue the space to the answer (" Paris"). Measured on 48 HotpotQA questions with
SmolLM2-135M, 8 passages each, that form scores the gold passage about 4 nats higher and the others too: it was on top in 44
questions, here in 45.
A span is what a rollout sampled after an observation, id for id, and its document stands as in an observation of one passage.

A batch has the shape of its longest history, document and target; what it holds at once is bounded inside its program
(`objectives.credit`), so an odd long text costs time in its batch, not memory, and no program of its own size.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence

import jax
import numpy as np
from jax.sharding import Mesh

from bridge_jax.mesh import batch_sharding, batch_ways, put
from bridge_jax.objectives.credit import document_log_likelihood
from bridge_jax.rollout import protocol

AHEAD = 2  # batches that the device may be behind the host

_score = jax.jit(document_log_likelihood, static_argnums=0, static_argnames=("answer_tokens", "chunk", "pairs"))


@dataclasses.dataclass(frozen=True)
class ScoringConfig:
    """golds: gold answers scored per turn: 1 = the first listed; K > 1 = log of the mean likelihood of the first K.
    turns_per_batch: turns in one program (times candidates times golds rows).
    pairs_at_once: bounds the memory (`pairs` of `credit.differentiable_log_likelihood`).
    max_answer_tokens: beginning of each gold answer that is scored.
    max_passage_tokens, max_observation_tokens: a document is what an observation of these limits shows of it; None = whole.
    chunk: tokens unembedded at once. cached: documents, and answers, whose tokens are kept between calls."""

    golds: int = 1
    turns_per_batch: int = 4
    pairs_at_once: int = 1 << 26
    max_answer_tokens: int = 1 << 30
    max_passage_tokens: int | None = None
    max_observation_tokens: int = 1 << 30
    chunk: int = 1024
    cached: int = 1 << 16


@dataclasses.dataclass(frozen=True, eq=False)
class Request:
    """One history, C documents, K target texts: l of each document is the log of the targets' mean likelihood after it.

    history [P] int32: prompt, rollout up to and including `</search>`, and what all documents begin with. rows [C] int32: corpus
    rows, -1 = none. documents: of the rows that exist, in their order, the tokens behind that beginning.
    lead [.] int32: tokens before a target that are not scored themselves. targets: K arrays of token ids; an empty one cannot be
    scored. cut: targets of which only the beginning is scored.
    """

    history: np.ndarray
    rows: np.ndarray
    documents: tuple[np.ndarray, ...]
    lead: np.ndarray
    targets: tuple[np.ndarray, ...]
    cut: int = 0

    @property
    def key(self) -> tuple:
        """Equal for requests that have the same scores. (A lead tells the two forms of a document apart.)"""
        return tuple(part.tobytes() for part in (self.history, self.rows, self.lead, *self.targets))

    @property
    def shape(self) -> tuple[int, int, int]:
        """What orders requests for batching: targets, about the length of the longest continuation, length of the history."""
        document, target = (max(map(len, parts), default=0) for parts in (self.documents, self.targets))
        return len(self.targets), _width(document + len(self.lead) + target, 4, 4), len(self.history)


class Scorer:
    """Scores requests with a policy's weights. Holds token ids between calls, never weights."""

    def __init__(self, model, corpus, tokenizer, config: ScoringConfig):
        """corpus[row] -> passage."""
        self.model, self.config = model, config
        cached = functools.lru_cache(config.cached)
        limits = {"max_tokens": config.max_observation_tokens, "max_passage_tokens": config.max_passage_tokens}
        self._alone = cached(lambda row: protocol.document_tokens(corpus[row], tokenizer, **limits))
        self._observed = cached(lambda row: protocol.render_observation([corpus[row]], tokenizer, **limits).tokens)
        self._answer = cached(lambda gold: _ids(protocol.encode_untrusted(tokenizer, gold.strip())))
        self._lead, self._no_lead = _ids(protocol.encode(tokenizer, f"{protocol.ANSWER_OPEN} ")), _ids([])

    def answer(self, episode, turn) -> Request:
        """The gold answers straight after each candidate (METHOD 3)."""
        golds, most = [self._answer(gold) for gold in episode.question.golds[: self.config.golds]], self.config.max_answer_tokens
        cut = sum(len(gold) > most for gold in golds)
        return self._request(episode, turn, self._alone, self._lead, tuple(gold[:most] for gold in golds), cut)

    def next_action(self, episode, turn, span: np.ndarray) -> Request:
        """A sampled span [S] int32 after each candidate (METHOD 12)."""
        return self._request(episode, turn, self._observed, self._no_lead, (span,))

    def _request(self, episode, turn, read: Callable[[int], np.ndarray], lead: np.ndarray, targets, cut: int = 0) -> Request:
        documents = [read(row) for row in turn.rows.tolist() if row >= 0]
        beginning = _common(documents)
        history = [episode.prompt, episode.tokens[: turn.history], *(document[:beginning] for document in documents[:1])]
        behind = tuple(document[beginning:] for document in documents)
        return Request(np.concatenate(history), turn.rows, behind, lead, targets, cut)

    def __call__(self, variables, requests: Sequence[Request], between: Callable[[], None] = lambda: None) -> list[np.ndarray]:
        """l of every request: [C] float32 arrays in their order; -inf for a corpus row of -1 and where no target can be scored.

        What batches share is said in `batches`. between: called before each batch; it may raise to break off.
        """
        pending = []
        for places, batch, targets in self.batches(requests, self.model.mesh):
            between()
            # Not waited for: the host packs the next batches meanwhile. But no more of them, lest breaking off take long.
            if len(pending) >= AHEAD:
                pending[-AHEAD][-1].block_until_ready()
            options = {"answer_tokens": targets, "chunk": self.config.chunk, "pairs": self.config.pairs_at_once}
            likelihood = _score(self.model, variables, **batch, **options)
            pending.append((places, np.asarray(batch["answer_mask"]).any(-1), likelihood))
        scores: list[np.ndarray] = [None] * len(requests)
        for places, exists, likelihood in pending:
            merged = _mean_over_targets(np.asarray(likelihood), exists, len(requests[places[0][0]].rows))
            for at, values in zip(places, merged):
                for i in at:
                    scores[i] = values
        return scores

    def batches(
        self, requests: Sequence[Request], mesh: Mesh | None = None
    ) -> Iterator[tuple[list[list[int]], dict[str, jax.Array], int]]:
        """Yields (places, arrays, answer_tokens) until every request was in a batch: row u of the arrays stands for the equal
        requests number places[u]; `pack` says what the other two are.

        Equal requests (siblings that wrote the same query) share a row, requests of like length a batch. Batches have
        `turns_per_batch` turns, the last ones an eighth of it (or one), so few programs are compiled and little padding is run.
        On a mesh turns are split over its batch axes, and their number is a multiple of its ways.
        """
        places = by_shape(requests)
        for first, last, size in self._cuts(len(places), batch_ways(mesh)):
            arrays, targets = self.pack([requests[at[0]] for at in places[first:last]], size)
            if mesh is not None:
                arrays = {name: put(array, batch_sharding(mesh)) for name, array in arrays.items()}
            yield places[first:last], arrays, targets

    def pack(self, requests: Sequence[Request], size: int) -> tuple[dict[str, np.ndarray], int]:
        """Padded arrays for `document_log_likelihood` from at most `size` requests, all with C candidates.

        Returns (arrays, answer_tokens): history and history_valid [size, P], continuation, continuation_valid and answer_mask
        [size, C*K, T], K = the most targets of a request, the targets of a candidate side by side; rows that do not exist (fewer
        targets, a corpus row of -1, requests beyond the given ones) have no valid column. P, T and answer_tokens are rounded up
        to few values.
        """
        C, K = len(requests[0].rows), max(1, *(len(request.targets) for request in requests))
        # One entry a row of [size * C * K]: where it is, its document, its lead and target.
        at, documents, targets = [], [], []
        for u, request in enumerate(requests):
            for c, document in zip(np.flatnonzero(request.rows >= 0).tolist(), request.documents, strict=True):
                for k, target in enumerate(request.targets):
                    at.append((u * C + c) * K + k)
                    documents.append(document)
                    targets.append((request.lead, target))
        histories = [request.history for request in requests]
        starts = np.fromiter(map(len, documents), int, len(at)) + [len(lead) for lead, _ in targets]
        ends = starts + [len(target) for _, target in targets]

        P, T = _width(max(map(len, histories)), 32, 2), _width(int(ends.max(initial=1)), 4, 4)
        pieces = [piece for document, target in zip(documents, targets) for piece in (document, *target)]
        column = np.arange(T)
        continuation, valid, mask = (np.zeros((size * C * K, T), dtype) for dtype in (np.int32, bool, bool))
        valid[at] = column < ends[:, None]
        mask[at] = valid[at] & (column >= starts[:, None])
        continuation[valid] = np.concatenate(pieces) if pieces else 0
        lengths = np.zeros((size, 1), int)
        lengths[: len(histories), 0] = [len(history) for history in histories]
        history_valid = np.arange(P) < lengths
        history = np.zeros((size, P), np.int32)
        history[history_valid] = np.concatenate(histories)
        rows = {"continuation": continuation, "continuation_valid": valid, "answer_mask": mask}
        arrays = {"history": history, "history_valid": history_valid} | {
            name: array.reshape(size, C * K, T) for name, array in rows.items()
        }
        answer_tokens = 8
        while answer_tokens < (ends - starts).max(initial=1):
            answer_tokens *= 4  # coarse: they cost the vocabulary's projection alone
        return arrays, answer_tokens

    def _cuts(self, count: int, ways: int = 1) -> Iterator[tuple[int, int, int]]:
        """(first, last, rows) of each batch of `count` requests."""
        size = -(-self.config.turns_per_batch // ways) * ways
        few = -(-size // (8 * ways)) * ways
        full = count // size * size
        yield from ((first, first + size, size) for first in range(0, full, size))
        yield from ((first, min(first + few, count), few) for first in range(full, count, few))


def by_shape(requests: Sequence[Request]) -> list[list[int]]:
    """The places of equal requests together, those of the largest shapes first.

    The largest program is then compiled, and runs out of memory, at once rather than at the end.
    """
    equal: dict[tuple, list[int]] = {}
    for i, request in enumerate(requests):
        equal.setdefault(request.key, []).append(i)
    return sorted(equal.values(), key=lambda at: requests[at[0]].shape, reverse=True)


def _ids(tokens: Sequence[int]) -> np.ndarray:
    return np.asarray(tokens, np.int32)


def _common(documents: Sequence[np.ndarray]) -> int:
    """How many tokens all of them begin with; the shortest keeps one, whose state predicts what follows."""
    shortest = min(map(len, documents), default=1) - 1
    if shortest < 1:
        return 0
    same = (np.stack([document[:shortest] for document in documents]) == documents[0][:shortest]).all(0)
    return shortest if same.all() else int(same.argmin())


def _width(length: int, least: int, parts: int) -> int:
    """`length` rounded up to one of `parts` equal steps between powers of two, `least` (a power of two) being the smallest step.

    Beyond 256 to one of half as many: there lengths vary most and programs take longest to compile.
    """
    power = least
    while power < length:
        power *= 2
    step = max(least, power // (2 * parts if power <= 256 else parts))
    return max(least, -(-length // step) * step)


def _mean_over_targets(likelihood: np.ndarray, exists: np.ndarray, candidates: int) -> np.ndarray:
    """[U, C*K] -> [U, C]: log of the mean likelihood over the targets that exist; -inf where none does."""
    shape = (likelihood.shape[0], candidates, -1)
    values = np.where(exists, likelihood, -np.inf).reshape(shape)
    count = exists.reshape(shape).sum(-1)
    top = values.max(-1, keepdims=True)
    top = np.where(np.isfinite(top), top, 0.0)
    with np.errstate(divide="ignore"):
        return (top[..., 0] + np.log(np.exp(values - top).sum(-1) / np.maximum(count, 1))).astype(np.float32)


def compilations() -> int:
    """Scoring programs compiled so far in this process."""
    return _score._cache_size()
