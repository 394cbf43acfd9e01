"""The client of a retrieval server: timeouts, bounded retries with jitter, several servers."""

from __future__ import annotations

import itertools
import logging
import random
import threading
import time
from collections.abc import Sequence

import numpy as np
import requests

from bridge_jax import bounded_http
from bridge_jax.addresses import checked_address
from bridge_jax.errors import UserError
from bridge_jax.retrieval import manifest as manifests
from bridge_jax.retrieval import wire
from bridge_jax.retrieval.retriever import RetrievalFault
from bridge_jax.retrieval.vectors import check_queries

log = logging.getLogger(__name__)

FIRST_WAIT, LONGEST_WAIT = 0.2, 10.0
ATTEMPTS = 14  # whose waits bridge 41 to 83 s, a minute in the mean
BRIEF = 6  # where waiting is in vain, or each attempt takes long by itself
SEARCHED, FETCHED = 256, 8192  # queries, rows a request
LARGEST = 1 << 28  # bytes of an answer: FETCHED vectors of 4,096 numbers are a quarter of it


class Client:
    """Asks one of several servers, in turns; another one when it fails.

    servers: addresses such as "http://10.0.0.5:8000"; they serve the same index. timeout: seconds for the whole answer (a tenth
    of it, and at least a second, to connect). attempts: tries in all before a request is given up; no more than BRIEF until a
    server has answered, and after a request that was given up until one answers again: an outage is waited out once, not by every
    search.
    """

    def __init__(self, servers: str | Sequence[str], timeout: float = 60.0, attempts: int = ATTEMPTS):
        names = servers.split(",") if isinstance(servers, str) else servers
        example = "http://127.0.0.1:8000"
        self.servers = [checked_address(name.strip(), "retrieval server", example) for name in names if name.strip()]
        if not self.servers:
            raise UserError(f"no retrieval server given; name one, such as {example}")
        self.timeout, self.attempts = timeout, attempts
        self._answered = False
        self._turn = itertools.count(random.randrange(len(self.servers)))  # many clients do not all begin with the first
        self._local = threading.local()

    def retrieve(self, queries: Sequence[str], topk: int) -> list[list[tuple[dict, float]]]:
        """Search-R1's /retrieve, of any server that speaks it -> for each query its (document, score), best first.

        Raises:
          RetrievalFault: every attempt failed. UserError: the server refuses the request.
        """
        body = {"queries": list(queries), "topk": topk, "return_scores": True}
        answer = self.ask("POST", "/retrieve", json=body)
        try:
            return [[(hit["document"], float(hit["score"])) for hit in hits] for hits in answer.json()["result"]]
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise RetrievalFault(f"{answer.url}: not an answer of /retrieve ({error!r})") from None

    def ask(self, method: str, path: str, **options) -> requests.Response:
        """A request with retries. Raises as `retrieve`."""
        attempts = self.attempts if self._answered else min(self.attempts, BRIEF)
        for attempt in itertools.count(1):
            server = self.servers[next(self._turn) % len(self.servers)]
            try:
                limits = {"timeout": (max(1.0, self.timeout / 10), self.timeout), "largest": LARGEST}
                answer = bounded_http.send(self._session(), method, server + path, **limits, **options)
                if answer.status_code < 400:
                    self._answered = True
                    return answer
                failure = f"{server}{path} answers {answer.status_code}: {_detail(answer)}"
                if answer.status_code < 500 and answer.status_code not in (408, 429):
                    raise UserError(failure)
            except requests.RequestException as error:
                failure = f"{server}{path}: {_cause(error)}"
                if isinstance(error, requests.ReadTimeout):
                    attempts = min(attempts, BRIEF)
            if attempt >= attempts:
                self._answered = False
                raise RetrievalFault(f"{failure} ({attempt} attempts)")
            # Half of the wait is chance: clients that failed together do not come back together.
            wait = min(LONGEST_WAIT, FIRST_WAIT * 2 ** (attempt - 1)) * random.uniform(0.5, 1.0)
            log.warning("%s; attempt %d of %d follows", failure, attempt + 1, attempts)
            time.sleep(wait)

    def _session(self) -> requests.Session:
        """One a thread: a session is not made to be shared."""
        if not hasattr(self._local, "session"):
            self._local.session = bounded_http.open_session()
            self._local.session.trust_env = False  # servers are neighbours: a proxy for the internet must not come between
        return self._local.session


def _cause(error: requests.RequestException) -> str:
    """The innermost reason: `requests` wraps the pool's error, which wraps the connection's, with the address in each."""
    if isinstance(error, requests.Timeout):
        return "no answer in time"
    return str(error).rsplit(": ", 1)[-1].strip(")'\"") or type(error).__name__


def _detail(answer: requests.Response) -> str:
    try:
        detail = answer.json()["detail"]
        return bounded_http.whole(detail if isinstance(detail, str) else "; ".join(str(part["msg"]) for part in detail))
    except (ValueError, KeyError, TypeError, RecursionError):
        return answer.text[:200] or answer.reason


class RemoteIndex:
    """`search`, `vectors`, `dim` and `len` of an EmbeddingIndex that a server holds.

    The run encodes its queries itself, with its own adapter, and reads the passages from its own corpus file; rows, scores and the
    candidates' vectors for the retriever's update come from the server (in bfloat16).
    """

    kind = "server"

    def __init__(self, client: Client, encoder=None, corpus=None):
        """Raises UserError when the server's index was built with another encoder, or from another corpus."""
        self._client = client
        try:
            answer = client.ask("GET", "/index")
        except RetrievalFault as error:
            raise UserError(f"no retrieval server: {error}; start one with python -m bridge_jax.serve --index FOLDER") from None
        server = answer.url.removesuffix("/index")
        try:
            values = answer.json()
        except (ValueError, RecursionError):
            raise UserError(
                f"{server} is no retrieval server of this project: /index answers {answer.text[:60]!r}; give the address of "
                "python -m bridge_jax.serve"
            ) from None
        self.manifest = manifests.from_json(values, server)
        manifests.refuse_other(server, self.manifest, encoder, corpus)
        self._fingerprint = manifests.fingerprint(self.manifest)
        self.dim = self.manifest.dim

    def __len__(self) -> int:
        return self.manifest.rows

    def search(self, queries: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
        """As `EmbeddingIndex.search`.

        Raises:
          RetrievalFault: no server answers, or one answers something else than rows of the index and their scores.
          UserError: a server has another index than the run began with.
        """
        queries = check_queries(queries, self.dim, k, len(self))
        found = [(np.zeros((0, k), np.float32), np.zeros((0, k), np.int32))]
        for at in range(0, len(queries), SEARCHED):
            part = queries[at : at + SEARCHED]
            found.append(self._raw(f"/search?k={k}", part.astype("<f4"), wire.read_hits, len(part), k, len(self)))
        return np.concatenate([scores for scores, _ in found]), np.concatenate([rows for _, rows in found])

    def vectors(self, rows: np.ndarray) -> np.ndarray:
        """The stored vectors of `rows` [...] as float32 [..., D]. Each row is asked for once."""
        distinct, places = np.unique(np.asarray(rows), return_inverse=True)
        parts = [np.zeros((0, self.dim), np.float32)]
        for at in range(0, len(distinct), FETCHED):
            part = distinct[at : at + FETCHED]
            parts.append(self._raw("/vectors", part.astype("<i8"), wire.read_vectors, len(part), self.dim))
        return np.concatenate(parts)[places.reshape(np.shape(rows))]

    def _raw(self, path: str, values: np.ndarray, read, *sizes: int):
        """What `read` makes of the answer of one of the servers."""
        headers = {"content-type": "application/octet-stream"}
        answer = self._client.ask("POST", path, data=np.ascontiguousarray(values).tobytes(), headers=headers)
        if answer.headers.get(wire.INDEX, self._fingerprint) != self._fingerprint:
            raise UserError(
                f"{answer.url}: this server has another index now than the run began with (other passages or another encoder): "
                "serve the old one there, and run the same command again to go on"
            )
        try:
            return read(answer.content, *sizes)
        except ValueError as error:
            raise RetrievalFault(f"{answer.url}: not an answer of {path.partition('?')[0]} ({error})") from None
