"""The queue of a service: small requests first, large ones in parts, rows of several requests in
one batch.
"""

from __future__ import annotations

import asyncio
import math
import time
import traceback
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from http import HTTPStatus
from typing import Any, final

from bayou.runs.service import Refused, Request, Service
from bayou.runs.writing import RunError

GATHER_SECONDS = 0.002  # wait for requests to join a batch, if the last batch had several
STALL_SECONDS = 5.0  # time of one batch after which /healthz answers 503
BYTES_PER_ROW = 256  # estimate for a body that was not read yet


@final
@dataclass(frozen=True)
class Limits:
    """Limits of requests.

    Args:
        max_bytes: bytes of a body.
        max_waiting: rows that are computed before a new request, with its own; beyond it is
            answered 503.
        read_timeout: seconds for the head of a request, again for its body, and between requests of
            a connection.
        timeout: seconds from a complete body to its answer, else 504.
    """

    max_bytes: int = 2**23
    max_waiting: int = 100_000
    read_timeout: float = 15.0
    timeout: float = 30.0

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            least = 1 if isinstance(value, int) else 1e-3
            if not least <= value < math.inf:
                raise RunError(f"{name} must be a finite number, at least {least}; got {value}")


@final
class _Waiting:
    """A request in the queue, with its future answer."""

    def __init__(self, body: bytes) -> None:
        self.request = Request(body)
        self.answer: asyncio.Future[bytes | Refused] = asyncio.get_running_loop().create_future()
        self.arrival = time.monotonic()

    @property
    def rows(self) -> int:
        """Rows that are not computed yet."""
        rows_left = self.request.rows_left
        if rows_left is None:
            return max(1, len(self.request.body) // BYTES_PER_ROW)
        return rows_left


@final
class Batches:
    """The queue of a service, and the thread that computes its requests in batches of rows.

    Args:
        service: computes the predictions.
        limits: the limits of the queue.
    """

    def __init__(self, service: Service, limits: Limits) -> None:
        self.service = service
        self.limits = limits
        self.waiting: list[_Waiting] = []
        self._oldest_is_next = True
        self._batch_start = math.inf
        self._arrived = asyncio.Event()

    @property
    def rows(self) -> int:
        """Rows that wait."""
        return sum(one.rows for one in self.waiting)

    def health(self) -> dict[str, Any] | Refused:
        """Describe the queue; ``Refused`` if it is full or its thread has stalled."""
        now = time.monotonic()
        rows = self.rows
        if now - self._batch_start > STALL_SECONDS:
            return self._busy(rows, f"a computation has lasted more than {STALL_SECONDS:g} s")
        if rows and rows + self.service.max_rows > self.limits.max_waiting:
            return self._busy(rows, f"{rows:,} rows wait")
        oldest = min((one.arrival for one in self.waiting), default=now)
        waiting = {"requests": len(self.waiting), "rows": rows, "seconds": round(now - oldest, 3)}
        return {"status": "ok", "waiting": waiting}

    async def answer(self, body: bytes) -> bytes | Refused:
        """Return the response to a request, as JSON.

        Errors are returned and not raised: a traceback would keep the body until the next garbage
        collection.

        Args:
            body: the body of the request.
        """
        waiting = _Waiting(body)
        refusal = self._refuse_if_full(waiting)
        if refusal is not None:
            return refusal
        self.waiting.append(waiting)
        self._arrived.set()
        try:
            async with asyncio.timeout(self.limits.timeout):
                return await waiting.answer
        except TimeoutError:
            sentence = f"there was no answer within {self.limits.timeout:g} s; send fewer rows at a time, or try later"
            return Refused(HTTPStatus.GATEWAY_TIMEOUT, sentence)
        finally:
            if waiting in self.waiting:
                self.waiting.remove(waiting)

    def _refuse_if_full(self, new: _Waiting) -> Refused | None:
        """Refuse a new request if too many rows are to be computed before its own."""
        ahead = sum(one.rows for one in self.waiting if one is not new and one.rows <= new.rows)
        if ahead and ahead + new.rows > self.limits.max_waiting:
            return self._busy(ahead, f"{ahead:,} rows wait before these {new.rows:,}")
        return None

    def _busy(self, rows: int, reason: str) -> Refused:
        seconds = min(max(math.ceil(rows * self.service.seconds_per_row), 1), 60)
        sentence = (
            f"{reason}, the limit is {self.limits.max_waiting:,} rows; try again in {seconds} s"
        )
        return Refused(HTTPStatus.SERVICE_UNAVAILABLE, sentence, **{"Retry-After": str(seconds)})

    @asynccontextmanager
    async def running(self, _: Any = None) -> AsyncIterator[None]:
        """Compute the requests inside this block, in one thread."""
        with ThreadPoolExecutor(1, "bayou-serve") as thread:
            task = asyncio.create_task(self._run(thread))
            try:
                yield
            finally:
                task.cancel()

    async def _run(self, thread: ThreadPoolExecutor) -> None:
        run_in = asyncio.get_running_loop().run_in_executor
        batch: list[_Waiting] = []
        while True:
            while not self.waiting:
                self._arrived.clear()
                await self._arrived.wait()
            if len(batch) > 1:
                await asyncio.sleep(GATHER_SECONDS)
            batch = self._next_batch()
            self._batch_start = time.monotonic()
            for new in [one for one in batch if one.request.rows_left is None]:
                await run_in(thread, self.service.read, new.request)
                if new.request.error is None:  # the number of its rows is known only now
                    new.request.error = self._refuse_if_full(new)
            await run_in(thread, self.service.predict_next, [one.request for one in batch])
            self._batch_start = math.inf
            for one in batch:
                self._finish(one)

    def _next_batch(self) -> list[_Waiting]:
        """Select requests for the next batch, those with the fewest rows first.

        Every other batch begins with the oldest request, so that large ones progress however many
        small ones arrive.
        """
        order = sorted(self.waiting, key=lambda one: (one.rows, one.arrival))
        if self._oldest_is_next:
            order.insert(0, min(order, key=lambda one: one.arrival))
        self._oldest_is_next = not self._oldest_is_next
        batch: list[_Waiting] = []
        rows = 0
        for one in order:
            is_full = rows + one.rows > self.service.batch_rows or not self.service.together
            if batch and is_full:
                break
            if one not in batch:
                batch.append(one)
                rows += one.rows
        return batch

    def _finish(self, waiting: _Waiting) -> None:
        """Answer a request if it is complete or has failed."""
        if waiting.rows or waiting not in self.waiting:
            return  # it has more rows, or was answered 504
        self.waiting.remove(waiting)
        error = waiting.request.error
        if error is None:
            waiting.answer.set_result(waiting.request.response())
        elif isinstance(error, Refused):
            waiting.answer.set_result(error)
        else:
            traceback.print_exception(error)
            sentence = "the prediction failed; the log of the server has the reason"
            waiting.answer.set_result(Refused(HTTPStatus.INTERNAL_SERVER_ERROR, sentence))
