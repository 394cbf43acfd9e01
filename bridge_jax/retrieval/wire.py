"""What a retrieval server and its clients send each other.

POST /retrieve is Search-R1's: {"queries": [str], "topk": int or null, "return_scores": bool} ->
{"result": [[document, ...], ...]}, or with scores {"result": [[{"document": document, "score": float}, ...], ...]}, where a
document is the corpus's {"id", "contents"}. Fields that are not known are left alone, as Search-R1's server does.

The other two are this project's, for a run whose index is elsewhere. Raw little-endian numbers, row by row:

    POST /search?k=K     float32 [B, D] query vectors  ->  int32 [B, K] rows, then float32 [B, K] scores
    POST /vectors        int64 [n] rows                ->  bfloat16 [n, D]

Their answers carry the index's fingerprint (`manifest.fingerprint`) in the header INDEX.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from bridge_jax.retrieval.vectors import BFLOAT16

INDEX = "x-index-fingerprint"


@dataclass(frozen=True)
class Limits:
    """What one request may ask for."""

    body: int = 16 << 20  # bytes
    queries: int = 2048
    query_length: int = 8192  # characters
    topk: int = 200
    rows: int = 8192  # whose vectors are asked for


class BadRequest(Exception):
    """A request is refused: HTTP status, and the field and what is wrong with it, as `{"detail": [...]}` of Search-R1's server."""

    def __init__(self, status: int, field: Sequence[str | int], message: str):
        message = message.encode("utf-8", "replace").decode()  # it may quote half a surrogate pair
        super().__init__(message)
        self.status = status
        self.detail = {"detail": [{"type": "value_error", "loc": list(field), "msg": message}]}


@dataclass(frozen=True)
class Ask:
    """A checked body of /retrieve."""

    queries: list[str]
    topk: int
    return_scores: bool


def read_ask(body: bytes, limits: Limits, default_topk: int, rows: int) -> Ask:
    """The body of /retrieve. `rows`: passages of the corpus; `default_topk` where the request names none.

    Raises:
      BadRequest: 422, naming the field.
    """
    try:
        values = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise BadRequest(422, ["body"], f"body is not JSON: {str(error)[:100]}") from None
    if not isinstance(values, dict):
        raise BadRequest(422, ["body"], "body must be a JSON object with the field 'queries'")
    if "queries" not in values:
        raise BadRequest(422, ["body", "queries"], "queries is missing: give a list of strings")
    queries = values["queries"]
    if not isinstance(queries, list):
        raise BadRequest(422, ["body", "queries"], "queries must be a list of strings")
    if len(queries) > limits.queries:
        raise BadRequest(422, ["body", "queries"], f"queries holds {len(queries)}: at most {limits.queries} are taken at once")
    for i, query in enumerate(queries):
        field = ["body", "queries", i]
        if not isinstance(query, str):
            raise BadRequest(422, field, f"queries[{i}] must be a string")
        if len(query) > limits.query_length:
            raise BadRequest(422, field, f"queries[{i}] has {len(query)} characters: at most {limits.query_length} are taken")
        if not query.isascii():
            try:
                query.encode()
            except UnicodeEncodeError:
                raise BadRequest(422, field, f"queries[{i}] holds half a surrogate pair") from None
    return_scores = values.get("return_scores", False)
    if not isinstance(return_scores, bool):
        raise BadRequest(422, ["body", "return_scores"], "return_scores must be true or false")
    topk = values.get("topk")
    topk = min(default_topk, rows) if topk is None else check_topk(topk, limits, rows, ["body", "topk"], "topk")
    return Ask(queries, topk, return_scores)


def read_k(text: str | None, limits: Limits, rows: int) -> int:
    """The k of /search's query string. BadRequest as `check_topk`."""
    written = text is not None and text.isascii() and text.isdigit() and len(text) <= 9  # int() refuses thousands of digits
    return check_topk(int(text) if written else None, limits, rows, ["query", "k"], "k")


def check_topk(topk, limits: Limits, rows: int, where: list, name: str) -> int:
    """BadRequest unless it is a whole number from 1 to what the limits and the corpus allow."""
    most = min(limits.topk, rows)
    if isinstance(topk, float) and math.isfinite(topk) and topk == int(topk):
        topk = int(topk)
    if not isinstance(topk, int) or isinstance(topk, bool) or not 1 <= topk <= most:
        raise BadRequest(422, where, f"{name} must be a whole number from 1 to {most}")
    return topk


def write_result(corpus, scores: np.ndarray, rows: np.ndarray, return_scores: bool) -> bytes:
    """The answer of /retrieve for scores and rows [B, k], as Search-R1's server renders it."""
    result = []
    for line, values in zip(rows.tolist(), scores.tolist()):
        documents = [corpus.document(row) for row in line]
        if return_scores:
            documents = [{"document": document, "score": score} for document, score in zip(documents, values)]
        result.append(documents)
    return json.dumps({"result": result}, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()


def read_queries(body: bytes, dim: int, limits: Limits) -> np.ndarray:
    """The body of /search -> [B, dim] float32. BadRequest when it is not that."""
    if len(body) % (4 * dim) or not body:
        raise BadRequest(
            422, ["body"], f"body holds {len(body)} bytes: give float32 vectors of {dim} dimensions ({4 * dim} bytes each)"
        )
    queries = np.frombuffer(body, "<f4").reshape(-1, dim)
    if len(queries) > limits.queries:
        raise BadRequest(422, ["body"], f"body holds {len(queries)} vectors: at most {limits.queries} are taken at once")
    if not np.isfinite(queries).all():
        raise BadRequest(422, ["body"], f"vector {int(np.argmin(np.isfinite(queries).all(-1)))} is not finite")
    return queries


def write_hits(scores: np.ndarray, rows: np.ndarray) -> bytes:
    return rows.astype("<i4").tobytes() + scores.astype("<f4").tobytes()


def read_hits(body: bytes, count: int, k: int, passages: int) -> tuple[np.ndarray, np.ndarray]:
    """The answer of /search for `count` queries -> scores [count, k] float32, rows [count, k] int32.

    Raises:
      ValueError: another size, a row that is none of `passages`, a row twice for a query, or a score that is not finite.
    """
    if len(body) != 8 * count * k:
        raise ValueError(f"{len(body)} bytes instead of {8 * count * k}")
    rows = np.frombuffer(body, "<i4", count * k).reshape(count, k)
    scores = np.frombuffer(body, "<f4", count * k, 4 * count * k).reshape(count, k)
    if ((rows < 0) | (rows >= passages)).any():
        raise ValueError(f"a row that is not in the index of {passages} passages")
    if (np.diff(np.sort(rows, -1), axis=-1) == 0).any():
        raise ValueError("a passage twice for one query")
    if not np.isfinite(scores).all():
        raise ValueError("a score that is not finite")
    return scores, rows


def read_rows(body: bytes, limits: Limits, rows: int) -> np.ndarray:
    """The body of /vectors -> [n] int64. BadRequest when it is not that, or a row is none of the corpus's `rows`."""
    if len(body) % 8:
        raise BadRequest(422, ["body"], f"body holds {len(body)} bytes: give int64 rows (8 bytes each)")
    asked = np.frombuffer(body, "<i8")
    if len(asked) > limits.rows:
        raise BadRequest(422, ["body"], f"body holds {len(asked)} rows: at most {limits.rows} are taken at once")
    bad = (asked < 0) | (asked >= rows)
    if bad.any():
        raise BadRequest(422, ["body"], f"row {int(asked[np.argmax(bad)])} is not in the index of {rows} passages")
    return asked


def write_vectors(vectors: np.ndarray) -> bytes:
    return vectors.astype(BFLOAT16).tobytes()


def read_vectors(body: bytes, count: int, dim: int) -> np.ndarray:
    """-> [count, dim] float32. ValueError for another size, or a value that is not finite."""
    if len(body) != 2 * count * dim:
        raise ValueError(f"{len(body)} bytes instead of {2 * count * dim}")
    vectors = np.frombuffer(body, BFLOAT16).reshape(count, dim).astype(np.float32)
    if not np.isfinite(vectors).all():
        raise ValueError("a vector that is not finite")
    return vectors
