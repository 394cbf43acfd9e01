"""The retrieval server as an ASGI application (Starlette): Search-R1's /retrieve, and what a run needs whose index is elsewhere.

POST /retrieve   passages for texts (wire.py)             POST /search, /vectors   rows and vectors, for retrieval/client.py
GET  /health     {"status": "ok", ...}                    GET  /index              the manifest
GET  /metrics    Prometheus' text format                  POST /adapter            another query LoRA, with the token only
GET  /openapi.json  openapi.json beside this file: all of these
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import hmac
import json
import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from bridge_jax.errors import UserError
from bridge_jax.models import e5
from bridge_jax.models.lora import load_peft
from bridge_jax.retrieval import manifest as manifests
from bridge_jax.retrieval import wire
from bridge_jax.retrieval.batching import Batcher, Full
from bridge_jax.retrieval.mapped import FileChanged
from bridge_jax.retrieval.serving import with_adapter
from bridge_jax.retrieval.wire import BadRequest, Limits

log = logging.getLogger(__name__)

DESCRIPTION = Path(__file__).with_name("openapi.json")
BODY_SECONDS = 30.0  # a request's body must arrive within
BUCKETS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10)


class Tower(NamedTuple):
    """The query tower that serves: an encoder and its adapter (None: the base), and where that comes from."""

    encoder: e5.Encoder
    lora: dict | None
    source: str | None


class Job(NamedTuple):
    """Texts or vectors [B, D] to search; `answer` makes the response's body of scores and rows [B, k]."""

    queries: Sequence[str] | np.ndarray
    k: int
    answer: object


class Service:
    """The parts of a server: what is searched and with what. Its tower can be replaced while it serves."""

    def __init__(self, encoder: e5.Encoder, index, corpus, manifest: manifests.Manifest, adapter: str | None = None):
        self.index, self.corpus, self.manifest = index, corpus, manifest
        self._base = encoder
        self.tower = Tower(encoder, None, None)
        self.use_adapter(adapter)

    def use_adapter(self, folder: str | None) -> None:
        """Serve with the LoRA in a PEFT folder, None: the base tower. The one that serves stays when that fails.

        Raises:
          UserError: no such adapter, or one of another model.
        """
        tower = Tower(self._base, None, None)
        if folder is not None:
            tower = Tower(*with_adapter(self._base, load_peft(folder)), str(folder))
        self._warm_up(tower)  # also refuses an adapter that does not fit
        self.tower = tower

    def _warm_up(self, tower: Tower) -> None:
        """Compiles what queries need: a new length or batch must not make a client wait."""
        for words in (1, 24):
            for count in (1, 64):
                self._encode(tower, ["word " * words] * count)

    def _encode(self, tower: Tower, texts: Sequence[str]) -> np.ndarray:
        return e5.embed(tower.encoder, texts, kind="query", lora=tower.lora)

    def run(self, jobs: Sequence[Job]) -> list[bytes]:
        """One batch: all texts are encoded together, all vectors searched together."""
        texts = [text for job in jobs if not isinstance(job.queries, np.ndarray) for text in job.queries]
        encoded = self._encode(self.tower, texts) if texts else np.zeros((0, self.index.dim), np.float32)
        parts, at = [], 0
        for job in jobs:
            if isinstance(job.queries, np.ndarray):
                parts.append(job.queries)
            else:
                parts.append(encoded[at : at + len(job.queries)])
                at += len(job.queries)
        scores, rows = self.index.search(np.concatenate(parts), max(job.k for job in jobs))
        answers, at = [], 0
        for job, part in zip(jobs, parts):
            own = slice(at, at + len(part))
            answers.append(job.answer(scores[own, : job.k], rows[own, : job.k]))
            at += len(part)
        return answers


class Metrics:
    """What /metrics shows."""

    def __init__(self):
        self.registry = CollectorRegistry()
        self.requests = Counter("retrieval_requests", "Requests by path and status", ["path", "status"], registry=self.registry)
        self.seconds = Histogram(
            "retrieval_request_seconds", "Time of a request", ["path"], registry=self.registry, buckets=BUCKETS
        )
        self.queries = Counter("retrieval_queries", "Queries searched", registry=self.registry)
        self.batch = Histogram(
            "retrieval_batch_queries", "Queries searched together", registry=self.registry, buckets=[2**i for i in range(10)]
        )
        self.waiting = Gauge("retrieval_waiting_queries", "Queries that wait", registry=self.registry)
        self.swaps = Counter("retrieval_adapter_swaps", "Adapters taken into use", registry=self.registry)


def make_app(
    service: Service,
    limits: Limits | None = None,
    topk: int = 3,
    token: str | None = None,
    batch: int = 256,
    waiting: int = 65_536,
    waiting_rows: int = 1 << 19,
    changed: Callable[[FileChanged], None] = lambda error: None,
) -> Starlette:
    """The application.

    Args:
      topk: passages a query where a request names no number.
      token: what /adapter asks for; None: there is no /adapter.
      batch: queries searched together. waiting: queries that may wait; more are answered with 503. waiting_rows: likewise, rows
        whose vectors are asked for.
      changed: told when a file of the index or the corpus has changed: no answer of this server is to be trusted any more.
    """
    limits, metrics = limits or Limits(), Metrics()
    identity = {wire.INDEX: manifests.fingerprint(service.manifest)}

    def numbers(body: bytes) -> Response:
        return Response(body, headers=identity, media_type="application/octet-stream")

    def run(jobs: Sequence[Job]) -> list[bytes]:
        count = sum(len(job.queries) for job in jobs)
        metrics.batch.observe(count)
        metrics.queries.inc(count)
        return service.run(jobs)

    def fetch(asked: Sequence[np.ndarray]) -> list[bytes]:
        return [wire.write_vectors(service.index.vectors(rows)) for rows in asked]

    batcher = Batcher(run, lambda job: max(1, len(job.queries)), batch, waiting)
    # A thread of its own: searches do not wait for it, and one request's vectors at a time are in memory as float32.
    fetcher = Batcher(fetch, lambda rows: max(1, len(rows)), 1, waiting_rows)
    metrics.waiting.set_function(lambda: batcher.waiting)

    @contextlib.asynccontextmanager
    async def lifespan(app):
        tasks = [asyncio.create_task(each.loop()) for each in (batcher, fetcher)]
        yield
        for task in tasks:
            task.cancel()

    async def retrieve(request: Request) -> Response:
        ask = wire.read_ask(await _body(request, limits), limits, topk, len(service.corpus))
        if not ask.queries:
            return Response(b'{"result":[]}', media_type="application/json")

        def answer(scores, rows):
            return wire.write_result(service.corpus, scores, rows, ask.return_scores)

        return Response(await batcher.submit(Job(ask.queries, ask.topk, answer)), media_type="application/json")

    async def search(request: Request) -> Response:
        k = wire.read_k(request.query_params.get("k"), limits, len(service.corpus))
        queries = wire.read_queries(await _body(request, limits), service.index.dim, limits)
        return numbers(await batcher.submit(Job(queries, k, wire.write_hits)))

    async def vectors(request: Request) -> Response:
        rows = wire.read_rows(await _body(request, limits), limits, len(service.corpus))
        return numbers(await fetcher.submit(rows))

    async def adapter(request: Request) -> Response:
        given = request.headers.get("authorization", "")
        if not hmac.compare_digest(given.encode(), f"Bearer {token}".encode()):
            raise BadRequest(401, ["header", "authorization"], "authorization: the bearer token is missing or wrong")
        try:
            folder = json.loads(await _body(request, limits))["folder"]
        except (ValueError, RecursionError, KeyError, TypeError):
            folder = 0
        if folder is not None and not isinstance(folder, str):
            raise BadRequest(
                422, ["body", "folder"], "folder must be a LoRA's folder on this machine, or null for the base encoder"
            )
        try:
            await asyncio.to_thread(service.use_adapter, folder)
        except UserError as error:
            raise BadRequest(422, ["body", "folder"], f"folder: {error}") from None
        metrics.swaps.inc()
        log.info("adapter: %s", folder)
        return JSONResponse({"adapter": folder})

    async def health(request: Request) -> Response:
        m = service.manifest
        about = {"status": "ok", "passages": len(service.corpus), "encoder": m.encoder_name, "kind": service.index.kind}
        return JSONResponse(about | {"adapter": service.tower.source})

    async def index(request: Request) -> Response:
        return JSONResponse(dataclasses.asdict(service.manifest))

    async def describe(request: Request) -> Response:
        return Response(DESCRIPTION.read_bytes(), media_type="application/json")

    async def show_metrics(request: Request) -> Response:
        return Response(generate_latest(metrics.registry), headers={"content-type": CONTENT_TYPE_LATEST})

    def counted(handler):
        async def wrapped(request: Request) -> Response:
            began, path = time.perf_counter(), request.scope["path"]  # `request.url` decodes the query, which may be any bytes
            try:
                response = await handler(request)
            except BadRequest as error:
                response = JSONResponse(error.detail, error.status)
            except Full:
                message = "too many wait: try again, or start more servers"
                response = JSONResponse({"detail": message}, 503, {"retry-after": "1"})
            except FileChanged as error:
                changed(error)
                response = JSONResponse({"detail": str(error)}, 500)
            except ClientDisconnect:
                response = Response(status_code=499)
            except Exception as error:
                log.exception("%s failed", path)
                response = JSONResponse({"detail": f"{type(error).__name__}: {str(error)[:200]}"}, 500)
            metrics.requests.labels(path, response.status_code).inc()
            metrics.seconds.labels(path).observe(time.perf_counter() - began)
            return response

        return wrapped

    posts = {"/retrieve": retrieve, "/search": search, "/vectors": vectors} | ({"/adapter": adapter} if token else {})
    gets = {"/health": health, "/index": index, "/metrics": show_metrics, "/openapi.json": describe}
    routes = [Route(path, counted(handler), methods=["POST"]) for path, handler in posts.items()]
    routes += [Route(path, counted(handler), methods=["GET"]) for path, handler in gets.items()]
    return Starlette(routes=routes, lifespan=lifespan)


async def _body(request: Request, limits: Limits) -> bytes:
    """The body, read no further than its limit."""
    too_long = BadRequest(413, ["body"], f"body is longer than {limits.body} bytes: send fewer queries at once")
    declared = request.headers.get("content-length", "0")
    if declared.isascii() and declared.isdigit() and (len(declared) > 18 or int(declared) > limits.body):
        raise too_long
    parts, size = [], 0
    try:
        async with asyncio.timeout(BODY_SECONDS):
            async for part in request.stream():
                size += len(part)
                if size > limits.body:
                    raise too_long
                parts.append(part)
    except TimeoutError:
        raise BadRequest(408, ["body"], f"body did not arrive within {BODY_SECONDS:.0f} seconds") from None
    return b"".join(parts)
