"""Batches of requests: a queue, and threads that compute requests together."""

from __future__ import annotations

import asyncio
import math
import os
import time
import traceback
from collections import deque
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from dataclasses import asdict, dataclass
from http import HTTPStatus
from typing import Any, NamedTuple, final

from bayou.runs.service import Refused, Service
from bayou.runs.writing import RunError

SMALL_BODY = 2**16  # bytes; a larger request is computed alone, so that small ones do not wait for it
MAX_BATCH = 256  # requests
MAX_WAIT = 0.002  # seconds that a request waits for others of its batch, if the last batch had several
OVERLAP = 0.2  # seconds after which the next computation may start beside the current one
STALLED = 1.0  # seconds after which a slot counts as occupied in /healthz


@final
@dataclass(frozen=True)
class Limits:
    """Limits of requests.

    Args:
        max_bytes: bytes of a body.
        max_waiting: pending requests; a further one is answered 503.
        slots: concurrent computations; None: one for each core, at least 2.
        read_timeout: seconds for the head of a request, again for its body, and between requests of a connection.
        timeout: seconds from a complete body to its answer, else 504.
    """

    max_bytes: int = 2**23
    max_waiting: int = 256
    slots: int | None = None
    read_timeout: float = 15.0
    timeout: float = 30.0

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            least = 1 if isinstance(value, int) else 1e-3
            if value is not None and not least <= value < math.inf:
                raise RunError(f"{name} must be a finite number, at least {least}; got {value}")


class _Waiting(NamedTuple):
    body: bytes
    answer: asyncio.Future[bytes | Refused]
    until: float


@final
class Batches:
    """Requests that arrive during a computation are computed together, as one batch of rows."""

    def __init__(self, service: Service, limits: Limits) -> None:
        self.service, self.limits = service, limits
        self.slots = limits.slots or max(2, os.cpu_count() or 1)
        self.waiting: deque[_Waiting] = deque()
        self.unanswered = self.stalled = 0
        self._wanted, self._last, self._enough, self._turn = 1, 1, asyncio.Event(), asyncio.Lock()

    @property
    def free(self) -> bool:
        """Whether a request would be accepted and computed soon."""
        return self.unanswered < self.limits.max_waiting and self.stalled < self.slots

    async def answer(self, body: bytes) -> bytes | Refused:
        """The answer to a request, as JSON."""
        if self.unanswered >= self.limits.max_waiting:
            return busy()
        answer: asyncio.Future[bytes | Refused] = asyncio.get_running_loop().create_future()
        self.waiting.append(_Waiting(body, answer, time.monotonic() + self.limits.timeout))
        self.unanswered += 1
        if len(self.waiting) >= self._wanted:
            self._enough.set()
        try:
            async with asyncio.timeout(self.limits.timeout):
                return await answer
        except TimeoutError:
            sentence = f"there was no answer within {self.limits.timeout:g} s; send fewer rows at a time, or try later"
            return Refused(HTTPStatus.GATEWAY_TIMEOUT, sentence)
        finally:
            self.unanswered -= 1

    @asynccontextmanager
    async def running(self, _: Any = None) -> AsyncIterator[None]:
        """Compute, in ``slots`` threads."""
        with ThreadPoolExecutor(self.slots, "bayou-serve") as threads:
            tasks = [asyncio.create_task(self._compute(threads)) for _ in range(self.slots)]
            try:
                yield
            finally:
                for task in tasks:
                    task.cancel()

    async def _compute(self, threads: ThreadPoolExecutor) -> None:
        """The work of one slot."""
        while True:
            async with self._turn:
                batch = await self._gather()
                until = max((one.until for one in batch), default=0.0)
                bodies = [one.body for one in batch]
                work = asyncio.get_running_loop().run_in_executor(threads, self.service.answers, bodies, until)
                await asyncio.wait([work], timeout=OVERLAP)
            if not work.done():
                await asyncio.wait([work], timeout=STALLED - OVERLAP)
            if not work.done():
                self.stalled += 1
                await asyncio.wait([work])
                self.stalled -= 1
            error = work.exception()
            for one, answer in zip(batch, work.result() if error is None else [error] * len(batch), strict=True):
                if one.answer.done() or isinstance(answer, TimeoutError):
                    continue  # it was answered 504, or will be
                if not isinstance(answer, bytes | Refused):
                    traceback.print_exception(answer)
                    sentence = "the prediction failed; the log of the server has the reason"
                    answer = Refused(HTTPStatus.INTERNAL_SERVER_ERROR, sentence)
                one.answer.set_result(answer)

    async def _gather(self) -> list[_Waiting]:
        """Requests to compute together: as many as the last time, if they arrive within ``MAX_WAIT``."""
        start = time.monotonic()
        await self._until(1)
        if self._last > 1 and time.monotonic() - start < MAX_WAIT:
            with suppress(TimeoutError):
                async with asyncio.timeout(MAX_WAIT):
                    await self._until(self._last)
        batch: list[_Waiting] = []
        while self.waiting and len(batch) < (MAX_BATCH if self.service.together else 1):
            if batch and len(self.waiting[0].body) > SMALL_BODY:
                break
            one = self.waiting.popleft()
            if not one.answer.done():
                batch.append(one)
            if len(one.body) > SMALL_BODY:
                break
        self._last = len(batch)
        return batch

    async def _until(self, count: int) -> None:
        """Wait for so many requests."""
        self._wanted = count
        while len(self.waiting) < count:
            self._enough.clear()
            await self._enough.wait()


def busy() -> Refused:
    """The answer to a request without a free slot."""
    return Refused(HTTPStatus.SERVICE_UNAVAILABLE, "no slot is free; try again later", **{"Retry-After": "1"})
