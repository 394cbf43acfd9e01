"""The host side of document scoring: turns of rollouts -> padded arrays -> l of every candidate.

Source: METHOD 3 and 12. A scored row is history, document and target; a continuation is all but the history:

    answer       <information>Doc 1(Title: ...) text</information>        <answer> | GOLD               l_d   (METHOD 3)
    next action  \\n\\n<information>Doc 1(Title: ...) text</information>\\n\\n       | SPAN               l'_d  (METHOD 12)
                 |---------------------- document ----------------------|- lead --|-- target --|

The document's tokens are those of an observation (same renderer, same tokeniser calls). What all documents of a turn begin with, at
least `<information>Doc 1(Title: `, is read once, as the end of the history: the same l for fewer tokens.
The gold answer is tokenised by itself and appended to the tokens of `<answer> `: the summed tokens are exactly y of METHOD 3. A
byte-level BPE that reads it as one text would glue the space to the answer (" Paris"). Measured on 48 HotpotQA questions with
SmolLM2-135M, 8 passages each, that form scores the gold passage about 4 nats higher and the others too: it was on top in 44
questions, here in 45.
A span is what a rollout sampled after an observation, id for id, and its document stands as in an observation of one passage.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Sequence

import jax
import numpy as np

from bridge_jax.mesh import batch_sharding, batch_ways
from bridge_jax.objectives.credit import document_log_likelihood
from bridge_jax.rollout import protocol

_score = jax.jit(document_log_likelihood, static_argnums=0, static_argnames=("answer_tokens", "chunk"))


@dataclasses.dataclass(frozen=True)
class ScoringConfig:
    """golds: gold answers scored per turn: 1 = the first listed; K > 1 = log of the mean likelihood of the first K.
    turns_per_batch: turns in one forward pass (times candidates times golds rows): bounds the memory.
    max_passage_tokens: beginning of each document that is scored; None = whole.
    max_observation_tokens: of a document in the form of an observation, tags included.
    chunk: tokens unembedded at once. cached: documents, and answers, whose tokens are kept between calls."""

    golds: int = 1
    turns_per_batch: int = 4
    max_passage_tokens: int | None = None
    max_observation_tokens: int = 1 << 30
    chunk: int = 1024
    cached: int = 1 << 16


@dataclasses.dataclass(frozen=True, eq=False)
class Request:
    """One history, C documents, K target texts: l of each document is the log of the targets' mean likelihood after it.

    history [P] int32: prompt and rollout up to and including `</search>`. rows [C] int32: corpus rows, -1 = none.
    observed: documents in the form of an observation. lead [.] int32: tokens before a target that are not scored themselves.
    targets: K arrays of token ids; an empty one cannot be scored.
    """

    history: np.ndarray
    rows: np.ndarray
    observed: bool
    lead: np.ndarray
    targets: tuple[np.ndarray, ...]

    @property
    def key(self) -> tuple:
        """Equal for requests that have the same scores."""
        parts = (self.history, self.rows, self.lead, *self.targets)
        return (self.observed, *(part.tobytes() for part in parts))


class Scorer:
    """Scores requests with a policy's weights. Holds token ids between calls, never weights."""

    def __init__(self, model, corpus, tokenizer, config: ScoringConfig):
        """corpus[row] -> passage."""
        self.model, self.config = model, config
        cached = functools.lru_cache(config.cached)
        self._alone = cached(lambda row: protocol.document_tokens(corpus[row], tokenizer, config.max_passage_tokens))
        self._observed = cached(
            lambda row: (
                protocol.render_observation(
                    [corpus[row]], tokenizer, config.max_observation_tokens, config.max_passage_tokens
                ).tokens
            )
        )
        self._answer = cached(lambda gold: _ids(protocol.encode_untrusted(tokenizer, gold.strip())))
        self._lead, self._no_lead = _ids(protocol.encode(tokenizer, f"{protocol.ANSWER_OPEN} ")), _ids([])

    def answer(self, episode, turn) -> Request:
        """The gold answers straight after each candidate (METHOD 3)."""
        golds = tuple(self._answer(gold) for gold in episode.question.golds[: self.config.golds])
        return Request(_history(episode, turn), turn.rows, False, self._lead, golds)

    def next_action(self, episode, turn, span: np.ndarray) -> Request:
        """A sampled span [S] int32 after each candidate (METHOD 12)."""
        return Request(_history(episode, turn), turn.rows, True, self._no_lead, (span,))

    def __call__(self, variables, requests: Sequence[Request]) -> list[np.ndarray]:
        """l of every request: [C] float32 arrays in their order; -inf for a corpus row of -1 and where no target can be scored.

        What batches share is said in `batches`.
        """
        pending = []
        for places, batch, targets in self.batches(requests):
            # Not waited for: the host packs the next batch meanwhile.
            likelihood = _score(self.model, variables, **batch, answer_tokens=targets, chunk=self.config.chunk)
            pending.append((places, np.asarray(batch["answer_mask"]).any(-1), likelihood))
        scores: list[np.ndarray] = [None] * len(requests)
        for places, exists, likelihood in pending:
            merged = _mean_over_targets(np.asarray(likelihood), exists, len(requests[places[0][0]].rows))
            for at, values in zip(places, merged):
                for i in at:
                    scores[i] = values
        return scores

    def batches(self, requests: Sequence[Request]) -> Iterator[tuple[list[list[int]], dict[str, jax.Array], int]]:
        """Yields (places, arrays, answer_tokens) until every request was in a batch: row u of the arrays stands for the equal
        requests number places[u]; `pack` says what the other two are.

        Equal requests (siblings that wrote the same query) share a row, requests of like length a batch. Batches have
        `turns_per_batch` turns, the last ones an eighth of it, so few programs are compiled and little padding is run. On a mesh
        (`model.mesh`) turns are split over its batch axes.
        """
        equal: dict[tuple, list[int]] = {}
        for i, request in enumerate(requests):
            equal.setdefault(request.key, []).append(i)
        # Large shapes first: the largest program is compiled, and runs out of memory, at once rather than at the end.
        places = sorted(equal.values(), key=lambda at: self._shape(requests[at[0]]), reverse=True)
        for first, last, size in self._cuts(len(places)):
            arrays, targets = self.pack([requests[at[0]] for at in places[first:last]], size)
            if self.model.mesh is not None:
                arrays = jax.device_put(arrays, batch_sharding(self.model.mesh))
            yield places[first:last], arrays, targets

    def pack(self, requests: Sequence[Request], size: int) -> tuple[dict[str, np.ndarray], int]:
        """Padded arrays for `document_log_likelihood` from at most `size` requests, all with C candidates.

        Returns (arrays, answer_tokens): history and history_valid [size, P], continuation, continuation_valid and answer_mask
        [size, C*K, T], K = the most targets of a request, the targets of a candidate side by side; rows that do not exist (fewer
        targets, a corpus row of -1, requests beyond the given ones) have no valid column. P, T and answer_tokens are rounded up
        to few values.
        """
        C, K = len(requests[0].rows), max(1, *(len(request.targets) for request in requests))
        # One entry a row of [size * C * K]: where it is, its document behind the common beginning, its lead and target.
        at, documents, targets, histories = [], [], [], []
        for u, request in enumerate(requests):
            read = self._documents(request)
            beginning = _common(read)
            histories.append(np.concatenate([request.history, *(document[:beginning] for document in read[:1])]))
            for c, document in zip(np.flatnonzero(request.rows >= 0).tolist(), read, strict=True):
                for k, target in enumerate(request.targets):
                    at.append((u * C + c) * K + k)
                    documents.append(document[beginning:])
                    targets.append((request.lead, target))
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
        return arrays, _width(int((ends - starts).max(initial=1)), 8, 1)

    def _shape(self, request: Request) -> tuple[int, int, int]:
        """What orders requests for batching: targets, length of the longest continuation, length of the history."""
        read = self._documents(request)
        beginning = _common(read)
        longest = max(map(len, read), default=beginning) - beginning
        target = max(map(len, request.targets), default=0)
        return len(request.targets), _width(longest + len(request.lead) + target, 4, 4), len(request.history) + beginning

    def _documents(self, request: Request) -> list[np.ndarray]:
        """Token ids of the documents that exist, in their order."""
        read = self._observed if request.observed else self._alone
        return [read(row) for row in request.rows.tolist() if row >= 0]

    def _cuts(self, count: int) -> Iterator[tuple[int, int, int]]:
        """(first, last, rows) of each batch of `count` requests."""
        ways = batch_ways(self.model.mesh)
        size = -(-self.config.turns_per_batch // ways) * ways
        few = size if size < 16 else -(-(size // 8) // ways) * ways
        full = count // size * size
        yield from ((first, first + size, size) for first in range(0, full, size))
        yield from ((first, min(first + few, count), few) for first in range(full, count, few))


def _history(episode, turn) -> np.ndarray:
    return np.concatenate([episode.prompt, episode.tokens[: turn.history]])


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
    """`length` rounded up to one of `parts` equal steps between powers of two, `least` (a power of two) being the smallest step."""
    power = least
    while power < length:
        power *= 2
    step = max(least, power // 2 // parts)
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
