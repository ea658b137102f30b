"""A run folder over HTTP: an ASGI application, and the server of ``bayou serve`` (uvicorn).

HTTPS, access tokens, host names and slow clients are the task of a proxy before it.
"""

from __future__ import annotations

import asyncio
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

from bayou.app.runs.batches import Batches, Limits
from bayou.app.runs.json_files import RunError
from bayou.app.runs.service import Refused, Service
from bayou.app.runs.service_metrics import MEDIA_TYPE

MAX_CONNECTIONS = 1000  # a request on a further one is answered 503
SHUTDOWN_SECONDS = 10  # for responses in progress at the end


def application(service: Service, limits: Limits | None = None) -> ASGIApp:
    """Make an ASGI application, for ``bayou serve`` or another ASGI server.

    Args:
        service: computes the responses.
        limits: those of ``Limits`` by default; connections are limited by ``Server`` only.
    """
    limits = limits or Limits()
    batches = Batches(service, limits)

    async def predict(request: Request) -> Response:
        content_type = request.headers.get("content-type", "application/json")
        media_type = content_type.partition(";")[0].strip().lower()
        if media_type != "application/json":
            raise Refused(
                HTTPStatus.UNSUPPORTED_MEDIA_TYPE,
                "the body must be JSON with Content-Type: application/json, "
                f"got {media_type[:80]!r}",
            )
        body = await _read_body(request, limits.max_bytes)
        return Response(await batches.answer(body), media_type=media_type)

    async def check_health(request: Request) -> Response:
        return JSONResponse(batches.health())

    async def show_metrics(request: Request) -> Response:
        text = await asyncio.to_thread(batches.metrics.render)
        return Response(text, media_type=MEDIA_TYPE)

    async def answer_error(request: Request, error: Exception) -> Response:
        if isinstance(error, Refused):
            batches.metrics.record(error.status, 0.0)
            return JSONResponse({"error": str(error)}, error.status)
        if isinstance(error, HTTPException):
            route = f"{request.method[:80]} {request.url.path[:80]}"
            message = f"there is no {route}; there are POST /predict, GET /, GET /healthz "
            message += "and GET /metrics"
            return JSONResponse({"error": message}, error.status_code, error.headers)
        # The client has disconnected: nobody reads the response.
        return Response(status_code=HTTPStatus.BAD_REQUEST)

    routes = [
        Route("/predict", predict, methods=["POST"]),
        Route("/", JSONResponse(service.describe()), methods=["GET"]),
        Route("/healthz", check_health, methods=["GET"]),
        Route("/metrics", show_metrics, methods=["GET"]),
    ]
    handlers: dict[Any, Any] = dict.fromkeys(
        (Refused, HTTPException, ClientDisconnect), answer_error
    )
    app = Starlette(routes=routes, exception_handlers=handlers, lifespan=batches.running)
    app.router.redirect_slashes = False
    return app


async def _read_body(request: Request, max_bytes: int) -> bytes:
    """Read the body of a request, or refuse one that is too large."""
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > max_bytes:
            raise Refused(
                HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
                f"the body has more than {max_bytes:,} bytes; send fewer rows at a time",
            )
    return bytes(body)


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
        config = uvicorn.Config(
            application(service, limits),
            ws="none",
            lifespan="on",
            log_config=None if quiet else uvicorn.config.LOGGING_CONFIG,
            log_level="error" if quiet else "info",
            access_log=not quiet,
            limit_concurrency=MAX_CONNECTIONS,
            timeout_graceful_shutdown=SHUTDOWN_SECONDS,
        )
        self._uvicorn = uvicorn.Server(config)
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            self._socket = socket.create_server((host, port), family=family, backlog=2048)
        except OSError as error:
            raise RunError(
                f"cannot listen at {host}:{port}: {error}; choose another --host or --port"
            ) from error
        # Connections inherit it: a response is sent without delay.
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
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
