"""The queue of a service.

Small requests come first, large ones are computed in several batches, and rows of several requests
share a batch.
"""

from __future__ import annotations

import asyncio
import math
import time
import traceback
from collections.abc import AsyncIterator, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from http import HTTPStatus
from typing import Any, final

from bayou.app.runs.json_files import RunError
from bayou.app.runs.service import Refused, Request, Service

GATHER_SECONDS = 0.002  # wait for requests to join a batch, if the last batch had several
STALL_SECONDS = 5.0  # time of one batch after which /healthz answers 503
BYTES_PER_ROW = 256  # estimated, for a body that was not read yet


@final
@dataclass(frozen=True)
class Limits:
    """Limits of requests.

    Args:
        max_bytes: bytes of a body.
        max_waiting: rows that are computed before a new request, with its own; beyond it is
            answered 503, as it is if these rows need longer than ``timeout``.
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
            minimum = 1 if isinstance(value, int) else 1e-3
            if not minimum <= value < math.inf:
                raise RunError(f"{name} must be a finite number, at least {minimum}; got {value}")


@final
class _WaitingRequest:
    """A request in the queue, with its future answer."""

    def __init__(self, body: bytes) -> None:
        self.request = Request(body)
        self.answer: asyncio.Future[bytes | Refused] = asyncio.get_running_loop().create_future()
        self.arrival = time.monotonic()

    @property
    def rows(self) -> int:
        """The number of rows that are not computed yet, estimated before the body is read."""
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
        self.waiting: list[_WaitingRequest] = []
        self.seconds_per_row = service.seconds_per_row
        self._refused_rows = 0  # of the last request that was refused
        self._oldest_is_next = True
        self._batch_start = math.inf
        self._arrived = asyncio.Event()

    @property
    def rows(self) -> int:
        """The number of rows that wait."""
        return _count_rows(self.waiting)

    def health(self) -> dict[str, Any] | Refused:
        """Describe the queue.

        Returns:
            A status and what waits, or ``Refused`` if the queue is full or its thread has stalled.
        """
        now = time.monotonic()
        rows = self.rows
        if now - self._batch_start > STALL_SECONDS:
            return self._busy(rows, f"a computation has lasted more than {STALL_SECONDS:g} s")
        if rows and rows + self.service.max_rows > self.limits.max_waiting:
            return self._busy(rows, f"{rows:,} rows wait")
        if self._refused_rows and self._is_late(rows, self._refused_rows):
            return self._busy(
                rows,
                f"{rows:,} rows wait, and {self._refused_rows:,} more would have no answer in time",
            )
        self._refused_rows = 0  # they would be accepted now
        oldest = min((waiting.arrival for waiting in self.waiting), default=now)
        summary = {"requests": len(self.waiting), "rows": rows, "seconds": round(now - oldest, 3)}
        return {"status": "ok", "waiting": summary}

    async def answer(self, body: bytes) -> bytes | Refused:
        """Return the response to a request, as JSON.

        Errors are returned and not raised: a traceback would keep the body until the next garbage
        collection.

        Args:
            body: the body of the request.
        """
        waiting = _WaitingRequest(body)
        refusal = self._refuse_if_full(waiting)
        if refusal is not None:
            return refusal
        self.waiting.append(waiting)
        self._arrived.set()
        try:
            async with asyncio.timeout(self.limits.timeout):
                return await waiting.answer
        except TimeoutError:
            sentence = (
                f"there was no answer within {self.limits.timeout:g} s; send fewer rows at a time, "
                "or try later"
            )
            return Refused(HTTPStatus.GATEWAY_TIMEOUT, sentence)
        finally:
            if waiting in self.waiting:
                self.waiting.remove(waiting)

    def _refuse_if_full(self, new: _WaitingRequest) -> Refused | None:
        """Refuse a new request if too many rows are to be computed before its own."""
        before = [
            waiting for waiting in self.waiting if waiting is not new and waiting.rows <= new.rows
        ]
        rows_before = _count_rows(before)
        reason = f"{rows_before:,} rows wait before these {new.rows:,}"
        if rows_before and rows_before + new.rows > self.limits.max_waiting:
            self._refused_rows = new.rows
            return self._busy(rows_before, reason)
        # An estimate of its rows is not enough to say that it is late.
        is_read = new.request.rows_left is not None
        if is_read and self._is_late(rows_before, new.rows):
            self._refused_rows = new.rows
            seconds = f"{self.limits.timeout:g} s"
            reason = f"{reason}, which would be computed after the {seconds} of a request"
            return self._busy(rows_before, reason)
        return None

    def _is_late(self, rows_before: int, rows: int) -> bool:
        """Return whether a request of ``rows`` gets no answer in time because of rows before it."""
        seconds = (rows_before + rows) * self.seconds_per_row
        return rows_before > 0 and seconds > self.limits.timeout

    def _busy(self, rows: int, reason: str) -> Refused:
        """Return the answer 503, with the time after which these rows are computed."""
        seconds = min(max(math.ceil(rows * self.seconds_per_row), 1), 60)
        sentence = (
            f"{reason}, the limit is {self.limits.max_waiting:,} rows; try again in {seconds} s"
        )
        return Refused(HTTPStatus.SERVICE_UNAVAILABLE, sentence, **{"Retry-After": str(seconds)})

    @asynccontextmanager
    async def running(self, app: object = None) -> AsyncIterator[None]:
        """Compute the requests inside this block, in one thread.

        Args:
            app: the application, which the lifespan protocol of ASGI passes; not used.
        """
        with ThreadPoolExecutor(1, "bayou-serve") as thread:
            task = asyncio.create_task(self._run(thread))
            try:
                yield
            finally:
                task.cancel()

    async def _run(self, thread: ThreadPoolExecutor) -> None:
        """Compute batches until the task is cancelled."""
        run_in = asyncio.get_running_loop().run_in_executor
        batch: list[_WaitingRequest] = []
        while True:
            while not self.waiting:
                self._arrived.clear()
                await self._arrived.wait()
            if len(batch) > 1:
                await asyncio.sleep(GATHER_SECONDS)
            batch = self._next_batch()
            self._batch_start = time.monotonic()
            for new in [waiting for waiting in batch if waiting.request.rows_left is None]:
                await run_in(thread, self.service.read, new.request)
                if new.request.error is None:  # the number of its rows is known only now
                    new.request.error = self._refuse_if_full(new)
            rows = _count_rows(batch)
            start = time.monotonic()
            await run_in(thread, self.service.predict_next, [waiting.request for waiting in batch])
            self._measure(rows - _count_rows(batch), time.monotonic() - start)
            self._batch_start = math.inf
            for waiting in batch:
                self._finish(waiting)

    def _measure(self, rows: int, seconds: float) -> None:
        """Update the time of a row by that of a batch.

        The limit by time would be that of an idle machine otherwise. A batch that is not half full
        is left out: most of its time is for the call and not for rows.
        """
        if rows >= self.service.batch_rows / 2:
            self.seconds_per_row += (seconds / rows - self.seconds_per_row) / 4

    def _next_batch(self) -> list[_WaitingRequest]:
        """Select requests for the next batch, those with the fewest rows first.

        Every other batch begins with the oldest request, so that large ones progress however many
        small ones arrive.
        """
        order = sorted(self.waiting, key=lambda waiting: (waiting.rows, waiting.arrival))
        if self._oldest_is_next:
            order.insert(0, min(order, key=lambda waiting: waiting.arrival))
        self._oldest_is_next = not self._oldest_is_next
        batch: list[_WaitingRequest] = []
        rows = 0
        for waiting in order:
            is_full = rows + waiting.rows > self.service.batch_rows or not self.service.together
            if batch and is_full:
                break
            if waiting not in batch:
                batch.append(waiting)
                rows += waiting.rows
        return batch

    def _finish(self, waiting: _WaitingRequest) -> None:
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


def _count_rows(requests: Iterable[_WaitingRequest]) -> int:
    """Count the rows of requests that are not computed yet."""
    return sum(waiting.rows for waiting in requests)
