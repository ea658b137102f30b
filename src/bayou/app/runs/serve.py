"""A run folder over HTTP: an ASGI application, and the server of ``bayou serve`` (uvicorn)."""

from __future__ import annotations

import asyncio
import os
import socket
from http import HTTPStatus
from typing import Any, Self, final

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

import bayou
from bayou.app.runs.batches import Batches, Limits
from bayou.app.runs.json_files import RunError
from bayou.app.runs.service import Refused, Service

MAX_CONNECTIONS = 1000  # a request on a further one is answered 503
MAX_HEAD_BYTES = 2**16  # of a request: its first line and its headers
MAX_PIPELINE = 16  # requests of a connection before the first answer
SHUTDOWN_SECONDS = 10  # for responses in progress at the end


def application(service: Service, limits: Limits | None = None) -> ASGIApp:
    """Make an ASGI application, for ``bayou serve`` or another ASGI server.

    Args:
        service: computes the responses.
        limits: those of ``Limits`` by default; connections and heads are limited by ``Server``
            only.
    """
    limits = limits or Limits()
    batches = Batches(service, limits)

    async def predict(request: Request) -> Response:
        content_type = request.headers.get("content-type", "application/json")
        media_type = content_type.partition(";")[0].strip().lower()
        if media_type != "application/json":
            sentence = (
                "the body must be JSON with Content-Type: application/json, "
                f"got {media_type[:80]!r}"
            )
            return _refuse(Refused(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, sentence))
        body = await _read_body(request, limits)
        if isinstance(body, Refused):
            return _refuse(body)
        answer = await batches.answer(body)
        if isinstance(answer, Refused):
            return _refuse(answer)
        return Response(answer, media_type=media_type)

    async def check_health(request: Request) -> Response:
        health = batches.health()
        return _refuse(health) if isinstance(health, Refused) else JSONResponse(health)

    async def refuse_route(request: Request, error: Exception) -> Response:
        if not isinstance(error, HTTPException):
            # The client has disconnected: nobody reads the answer.
            return Response(status_code=HTTPStatus.BAD_REQUEST)
        route = f"{request.method[:80]} {request.url.path[:80]}"
        sentence = f"there is no {route}; there are POST /predict, GET / and GET /healthz"
        return JSONResponse({"error": sentence}, error.status_code, error.headers)

    routes = [
        Route("/predict", predict, methods=["POST"]),
        Route("/", JSONResponse(service.describe()), methods=["GET"]),
        Route("/healthz", check_health, methods=["GET"]),
    ]
    handlers: dict[Any, Any] = {HTTPException: refuse_route, ClientDisconnect: refuse_route}
    app = Starlette(routes=routes, exception_handlers=handlers, lifespan=batches.running)
    app.router.redirect_slashes = False
    return app


def _refuse(error: Refused) -> Response:
    """Return the response to a request that is refused."""
    return JSONResponse({"error": str(error)}, error.status, error.headers)


async def _read_body(request: Request, limits: Limits) -> bytes | Refused:
    """Read the body of a request within the limits of its size and time."""
    body = bytearray()
    size = int(request.headers.get("content-length", 0))
    stream = request.stream()
    try:
        async with asyncio.timeout(limits.read_timeout):
            while size <= limits.max_bytes and (chunk := await anext(stream, b"")):
                body += chunk
                size = max(size, len(body))
    except TimeoutError:
        sentence = f"the body was not complete within {limits.read_timeout:g} s"
        return Refused(HTTPStatus.REQUEST_TIMEOUT, sentence, Connection="close")
    if size > limits.max_bytes:
        sentence = f"{size:,} bytes are more than {limits.max_bytes:,}; send fewer rows at a time"
        return Refused(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, sentence)
    return bytes(body)


class _Connection(HttpToolsProtocol):
    """A connection with time and size limits: ``read_timeout`` seconds for the next complete head.

    uvicorn itself closes idle connections only: it accepts heads byte by byte and of any size, and
    unread responses.
    """

    _timer: asyncio.TimerHandle | None = None
    _head_bytes: int | None = None  # of a head that is not complete

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Limit the time of the first head."""
        super().connection_made(transport)
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """End the limit of time."""
        self._stop_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Parse data, and answer 400 to a head that is too large."""
        super().data_received(data)
        if self._head_bytes is not None:
            self._head_bytes += len(data)
            if self._head_bytes > MAX_HEAD_BYTES and not self.transport.is_closing():
                self.send_400_response(
                    f"The head of the request has more than {MAX_HEAD_BYTES} bytes."
                )

    def on_message_begin(self) -> None:
        """Count the bytes of a head."""
        self._head_bytes = 0
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        """Check the size of a complete head; uvicorn answers 400 to a ValueError."""
        self._head_bytes = None
        self._stop_timer()
        # A head that arrives complete in one read has not been counted by data_received.
        header_bytes = sum(len(name) + len(value) for name, value in self.headers)
        if len(self.url) + header_bytes > MAX_HEAD_BYTES:
            raise ValueError(f"the head of the request has more than {MAX_HEAD_BYTES} bytes")
        if len(self.pipeline) >= MAX_PIPELINE:
            raise ValueError("too many requests without waiting for answers")
        super().on_headers_complete()

    def on_response_complete(self) -> None:
        """Limit the time of the next head."""
        super().on_response_complete()
        if self.cycle.response_complete:  # else the next request is here already
            self._await_head()

    def _await_head(self) -> None:
        """Close the connection unless a head is complete in time."""
        self._stop_timer()
        self._timer = self.loop.call_later(self.config.timeout_keep_alive, self.transport.abort)

    def _stop_timer(self) -> None:
        """End the limit of time."""
        if self._timer is not None:
            self._timer.cancel()


@final
class Server:
    """An HTTP server: ``with Server(service, port=0) as server: server.serve_forever()``.

    SIGINT and SIGTERM end ``serve_forever`` after the responses in progress.

    Args:
        service: computes the responses.
        host: the address to listen on.
        port: 0 for any free port.
        limits: those of ``Limits`` by default.
        quiet: do not log requests.

    Raises:
        RunError: the address is not available.
    """

    def __init__(
        self,
        service: Service,
        host: str = "127.0.0.1",
        port: int = 8000,
        *,
        limits: Limits | None = None,
        quiet: bool = False,
    ) -> None:
        limits = limits or Limits()
        config = uvicorn.Config(
            application(service, limits),
            http=_Connection,
            ws="none",
            lifespan="on",
            log_config=None if quiet else uvicorn.config.LOGGING_CONFIG,
            log_level="error" if quiet else "info",
            access_log=not quiet,
            proxy_headers=False,
            server_header=False,
            headers=[
                ("server", f"bayou/{bayou.__version__}"),
                ("x-content-type-options", "nosniff"),
            ],
            limit_concurrency=MAX_CONNECTIONS,
            timeout_keep_alive=limits.read_timeout,  # type: ignore[arg-type]  # seconds, whole or not
            timeout_graceful_shutdown=SHUTDOWN_SECONDS,
        )
        self._uvicorn = uvicorn.Server(config)
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        # asyncio sends without delay if the protocol is TCP by name.
        self._socket = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        try:
            if os.name == "posix":  # elsewhere it would take the port of another program
                self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self._socket.bind((host, port))
            self._socket.listen(2048)
        except (OSError, OverflowError) as error:
            self._socket.close()
            raise RunError(
                f"cannot listen at {host}:{port}: {error}; choose another --host or --port"
            ) from error
        self.address: tuple[str, int] = self._socket.getsockname()[:2]

    @property
    def url(self) -> str:
        """The address of the server."""
        host, port = self.address
        return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._socket.close()

    def serve_forever(self) -> None:
        """Answer until a signal, or ``shutdown`` from another thread."""
        self._uvicorn.run([self._socket])

    def shutdown(self) -> None:
        """End ``serve_forever`` after the responses in progress."""
        self._uvicorn.should_exit = True
