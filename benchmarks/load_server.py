"""Clients of a retrieval server by the hundred, in one event loop: well-behaved ones, and ones that hang up or send rubbish."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import time
from collections import Counter
from collections.abc import Sequence

PATIENCE = 60.0  # seconds a client waits for an answer


class Clients:
    """`count` clients that ask, wait `think` seconds, and ask again, until `seconds` are over.

    hang_up, rubbish: so many of them close their connection in the middle of a request; send what is no request, or a wrong one.

    Attributes:
      latencies: seconds, of the answered requests of well-behaved clients. failures: what went wrong with theirs.
      hostile: what became of the others' requests. elapsed: `seconds`, or more where the last answer came after them.
    """

    def __init__(self, address: tuple[str, int], queries: Sequence[str], count: int, seconds: float, think: float = 0.0,
                 hang_up: int = 0, rubbish: int = 0, seed: int = 0):  # fmt: skip
        self.address, self.queries, self.count, self.seconds, self.think = address, queries, count, seconds, think
        self.kinds = ["hang up"] * hang_up + ["rubbish"] * rubbish
        self.kinds += ["asks"] * (count - len(self.kinds))
        self.seed = seed
        self._connections: dict[int, tuple[asyncio.StreamReader, asyncio.StreamWriter]] = {}
        self.latencies: list[float] = []
        self.elapsed = seconds
        self.failures: Counter = Counter()
        self.hostile: Counter = Counter()

    def run(self) -> None:
        asyncio.run(self._all())

    async def _all(self) -> None:
        self._began = time.monotonic()
        await asyncio.gather(*(self._client(n, kind) for n, kind in enumerate(self.kinds)))

    async def _client(self, number: int, kind: str) -> None:
        draw = random.Random(f"{self.seed} {number}")
        await asyncio.sleep(draw.random() * min(1.0, self.think or 0.1))
        act = {"asks": self._asks, "hang up": self._hangs_up, "rubbish": self._sends_rubbish}[kind]
        while time.monotonic() - self._began < self.seconds:
            await act(number, draw)
            await asyncio.sleep(self.think * (0.5 + draw.random()))
        self._close(number)

    def _request(self, draw: random.Random) -> bytes:
        body = json.dumps({"queries": [draw.choice(self.queries)], "topk": 3, "return_scores": True}).encode()
        return head(len(body)) + body

    async def _asks(self, number: int, draw: random.Random) -> None:
        began = time.monotonic()
        try:
            async with asyncio.timeout(PATIENCE):
                reader, writer = await self._connection(number)
                writer.write(self._request(draw))
                status, body = await answer(reader)
        except (TimeoutError, OSError, asyncio.IncompleteReadError, ValueError) as error:
            self.failures[type(error).__name__] += 1
            self._close(number)
            return
        if status != 200 or len(json.loads(body)["result"][0]) != 3:
            self.failures[str(status)] += 1
        else:
            now = time.monotonic()
            self.latencies.append(now - began)
            self.elapsed = max(self.elapsed, now - self._began)

    async def _hangs_up(self, number: int, draw: random.Random) -> None:
        request = self._request(draw)
        if draw.random() < 0.5:
            request = request[: draw.randrange(1, len(request))]
        with contextlib.suppress(OSError):
            _, writer = await asyncio.open_connection(*self.address)
            writer.write(request)
            await asyncio.sleep(draw.random() * 0.05)
            (writer.transport.abort if draw.random() < 0.5 else writer.close)()
            self.hostile["hung up"] += 1

    async def _sends_rubbish(self, number: int, draw: random.Random) -> None:
        status: object = "no answer"
        with contextlib.suppress(OSError, asyncio.IncompleteReadError, ValueError, TimeoutError):
            reader, writer = await asyncio.open_connection(*self.address)
            writer.write(draw.choice(RUBBISH)(draw))
            async with asyncio.timeout(5):
                status, _ = await answer(reader)
            writer.close()
        self.hostile[f"rubbish: {status}"] += 1

    async def _connection(self, number: int):
        """Its own, kept open between requests; another one once the server has closed it."""
        if number in self._connections and self._connections[number][0].at_eof():
            self._close(number)
        if number not in self._connections:
            self._connections[number] = await asyncio.open_connection(*self.address)
        return self._connections[number]

    def _close(self, number: int) -> None:
        if number in self._connections:
            self._connections.pop(number)[1].close()


def head(length: object, method: str = "POST", path: str = "/retrieve", more: str = "") -> bytes:
    return (
        f"{method} {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {length}\r\n{more}\r\n".encode()
    )


async def answer(reader: asyncio.StreamReader) -> tuple[int, bytes]:
    """-> (status, body). ValueError: no answer of HTTP."""
    lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
    status = int(lines[0].split(" ")[1])
    headers = {name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines[1:])}
    return status, await reader.readexactly(int(headers.get("content-length", 0)))


def wrong(body: bytes):
    return lambda draw: head(len(body)) + body


RUBBISH = [
    lambda draw: draw.randbytes(draw.randrange(1, 2000)) + b"\r\n\r\n",
    wrong(b"{"),
    wrong(b"[1]"),
    wrong(b"\xff\xfe"),
    wrong(b'{"queries": "a"}'),
    wrong(b'{"queries": ["a"], "topk": -1}'),
    wrong(b'{"queries": ["' + b"a" * 20_000 + b'"]}'),
    lambda draw: head(1 << 40),
    lambda draw: head("-1"),
    lambda draw: head(0, "DELETE"),
    lambda draw: head(0, "GET", "/" + "a" * 5000),
    lambda draw: head(0, "POST", "/adapter", "authorization: Bearer guess\r\n"),
    lambda draw: head(0, "GET", "/health", f"x: {'y' * 100_000}\r\n"),
    lambda draw: b"GET / HTTP/1.1\r\n" + b"a" * 1000,
]
