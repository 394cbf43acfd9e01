"""Requests that come at the same time are searched together: while one batch runs, the next one gathers."""

from __future__ import annotations

import asyncio
import collections
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor


class Full(Exception):
    """More is waiting than may wait."""


class Batcher:
    """Calls `run(jobs) -> results` in a thread of its own, with all that waits, up to `most` queries.

    run: takes jobs and gives one result for each; an exception is everybody's in the batch.
    size: queries (or rows) of a job. most: of a batch (a job larger than that is a batch of its own). waiting: how many may wait.
    """

    def __init__(self, run: Callable[[Sequence], Sequence], size: Callable[[object], int], most: int = 256, waiting: int = 65_536):
        self._run, self._size, self._most, self._limit = run, size, most, waiting
        self._queue: collections.deque = collections.deque()
        self._wake = asyncio.Event()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="search")
        self.waiting = 0

    async def submit(self, job):
        """The result of a job.

        Raises:
          Full: too many wait.
        """
        if self.waiting + self._size(job) > self._limit and self.waiting:
            raise Full
        future = asyncio.get_running_loop().create_future()
        self._queue.append((job, future))
        self.waiting += self._size(job)
        self._wake.set()
        return await future

    async def loop(self) -> None:
        """Runs batches until it is cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            await self._wake.wait()
            self._wake.clear()
            while self._queue:
                batch = self._take()
                if not batch:
                    continue
                try:
                    results = await loop.run_in_executor(self._thread, self._run, [job for job, _ in batch])
                except Exception as error:
                    for _, future in batch:
                        if not future.done():
                            future.set_exception(error)
                    continue
                for (_, future), result in zip(batch, results, strict=True):
                    if not future.done():  # its client may have gone
                        future.set_result(result)

    def _take(self) -> list:
        batch, total = [], 0
        while self._queue and (not batch or total + self._size(self._queue[0][0]) <= self._most):
            job, future = self._queue.popleft()
            self.waiting -= self._size(job)
            if not future.done():
                batch.append((job, future))
                total += self._size(job)
        return batch
