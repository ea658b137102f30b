"""The queue of a service: requests that wait are computed together, in one thread."""

from __future__ import annotations

import asyncio
import math
import time
import traceback
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from http import HTTPStatus
from typing import Any, final

from bayou.app.runs.json_files import RunError
from bayou.app.runs.predictions import ROWS_PER_BATCH
from bayou.app.runs.service import Query, Refused, Service
from bayou.app.runs.service_metrics import ServiceMetrics


@final
@dataclass(frozen=True)
class Limits:
    """Limits of requests.

    Args:
        max_bytes: bytes of a body.
        max_waiting: rows that wait or are computed; a request beyond it is answered 503.
        timeout: seconds from a complete body to its answer, else 503.
    """

    max_bytes: int = 2**23
    max_waiting: int = 100_000
    timeout: float = 30.0

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if not 0 < value < math.inf:
                raise RunError(f"{name} must be a positive, finite number; got {value}")


@final
@dataclass(frozen=True, eq=False)
class _Waiting:
    """A request in the queue, with its future response."""

    query: Query
    response: asyncio.Future[bytes]


@final
class Batches:
    """The queue of a service.

    Small requests come before large ones, but every other batch begins with the oldest request, so
    that many small ones cannot delay a large one for ever.

    Args:
        service: computes the predictions.
        limits: the limits of the queue.
    """

    def __init__(self, service: Service, limits: Limits) -> None:
        self.service = service
        self.limits = limits
        self.metrics = ServiceMetrics(service)
        self.waiting: list[_Waiting] = []
        self._oldest_is_next = True
        self._has_requests = asyncio.Event()

    @property
    def rows(self) -> int:
        """The number of rows that wait or are computed."""
        return sum(len(waiting.query) for waiting in self.waiting)

    def health(self) -> dict[str, Any]:
        """Describe the queue.

        Raises:
            Refused: a request of ``max_rows`` rows would be refused.
        """
        self._check_space(self.service.max_rows)
        return {"status": "ok", "waiting": {"requests": len(self.waiting), "rows": self.rows}}

    async def answer(self, body: bytes) -> bytes:
        """Return the response to a request, as JSON.

        Args:
            body: the body of the request.

        Raises:
            Refused: the request is invalid, too many rows wait, or there was no response in time.
        """
        start = time.perf_counter()
        query = await asyncio.to_thread(self.service.read, body)
        self._check_space(len(query))
        waiting = _Waiting(query, asyncio.get_running_loop().create_future())
        self.waiting.append(waiting)
        self._has_requests.set()
        try:
            async with asyncio.timeout(self.limits.timeout):
                response = await waiting.response
        except TimeoutError:
            raise Refused(
                HTTPStatus.SERVICE_UNAVAILABLE,
                f"there was no answer within {self.limits.timeout:g} s; send fewer rows at a time, "
                "or try later",
            ) from None
        finally:
            self._remove([waiting])
        seconds = time.perf_counter() - start
        self.metrics.record(HTTPStatus.OK, seconds, query.inputs.x)
        return response

    def _check_space(self, rows: int) -> None:
        """Refuse a request of ``rows`` rows if too many rows are computed before it."""
        sizes = [len(waiting.query) for waiting in self.waiting]
        rows_before = sum(size for size in sizes if size <= rows)
        if rows_before and rows_before + rows > self.limits.max_waiting:
            raise Refused(
                HTTPStatus.SERVICE_UNAVAILABLE,
                f"{rows_before:,} rows wait before these {rows:,}, the limit is "
                f"{self.limits.max_waiting:,} rows; try again later",
            )

    @asynccontextmanager
    async def running(self, app: object = None) -> AsyncIterator[None]:
        """Compute the requests inside this block.

        Args:
            app: the application, which the lifespan protocol of ASGI passes; not used.
        """
        task = asyncio.create_task(self._run())
        try:
            yield
        finally:
            task.cancel()

    async def _run(self) -> None:
        """Compute batches until the task is cancelled."""
        while True:
            while not self.waiting:
                self._has_requests.clear()
                await self._has_requests.wait()
            batch = self._next_batch()
            try:
                responses = await asyncio.to_thread(
                    self.service.predict, [waiting.query for waiting in batch]
                )
            except Exception as error:  # of the network: the next request may succeed
                traceback.print_exception(error)
                message = "the prediction failed; the log of the server has the reason"
                for waiting in batch:
                    if not waiting.response.done():
                        refused = Refused(HTTPStatus.INTERNAL_SERVER_ERROR, message)
                        waiting.response.set_exception(refused)
            else:
                for waiting, response in zip(batch, responses, strict=True):
                    if not waiting.response.done():  # it was not too late
                        waiting.response.set_result(response)
            self._remove(batch)

    def _next_batch(self) -> list[_Waiting]:
        """Return the oldest or the smallest request, in turn, and those computed with it."""
        by_size = sorted(self.waiting, key=lambda waiting: len(waiting.query))
        first = self.waiting[0] if self._oldest_is_next else by_size[0]
        self._oldest_is_next = not self._oldest_is_next
        batch = [first]
        rows = len(first.query)
        for waiting in by_size:
            is_full = rows + len(waiting.query) > ROWS_PER_BATCH
            if waiting is not first and waiting.query.level == first.query.level and not is_full:
                batch.append(waiting)
                rows += len(waiting.query)
        return batch

    def _remove(self, batch: list[_Waiting]) -> None:
        """Remove requests from the queue."""
        self.waiting = [waiting for waiting in self.waiting if waiting not in batch]
