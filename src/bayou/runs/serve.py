"""A run folder over HTTP: an ASGI application around ``Service``, and the server of ``bayou serve`` (uvicorn)."""

from __future__ import annotations

import asyncio
import hmac
import os
import socket
from collections.abc import Callable, Sequence
from http import HTTPStatus
from pathlib import Path
from typing import Any, Self, final

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

import bayou
from bayou.files import StrPath
from bayou.runs.batches import Batches, Limits, busy
from bayou.runs.service import Refused, Service
from bayou.runs.writing import RunError

PATHS = {"/predict": "POST", "/": "GET", "/healthz": "GET"}
MAX_CONNECTIONS = 1000  # open; a request on a further one is answered 503
MAX_HEAD = 2**16  # bytes of the head of a request
MAX_PIPELINE = 16  # requests of a connection before the first answer
SHUTDOWN = 10  # seconds for responses in progress at the end


def application(
    service: Service, limits: Limits | None = None, *, allowed_hosts: Sequence[str] = ("*",), token: str | None = None
) -> ASGIApp:
    """An ASGI application, for ``bayou serve`` or another ASGI server.

    Args:
        service: computes the responses.
        limits: those of ``Limits`` by default; connections and heads are limited by ``Server`` only.
        allowed_hosts: allowed values of the Host header, ``*`` for any.
        token: required in ``Authorization: Bearer`` for all paths except ``/healthz``; None: no check.
    """
    limits = limits or Limits()
    batches = Batches(service, limits)

    async def predict(request: Request) -> Response:
        kind = request.headers.get("content-type", "application/json").partition(";")[0].strip().lower()
        if kind != "application/json":
            sentence = f"the body must be JSON with Content-Type: application/json, got {kind[:80]!r}"
            raise Refused(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, sentence)
        found = await batches.answer(await _body(request, limits))
        return await refuse(request, found) if isinstance(found, Refused) else Response(found, media_type=kind)

    async def health(request: Request) -> Response:
        return JSONResponse({"status": "ok"}) if batches.free else await refuse(request, busy())

    async def refuse(request: Request, error: Exception) -> Response:
        if isinstance(error, ClientDisconnect):
            return Response(status_code=HTTPStatus.BAD_REQUEST)  # nobody reads it
        if not isinstance(error, Refused):  # Starlette has no such path or method
            error = _no_route(request)
        return JSONResponse({"error": str(error)}, error.status, error.headers)

    endpoints: tuple[Callable[..., Any], ...] = (predict, JSONResponse(service.describe()), health)
    pairs = zip(PATHS.items(), endpoints, strict=True)
    routes = [Route(path, endpoint, methods=[method]) for (path, method), endpoint in pairs]
    handlers = {Refused: refuse, HTTPException: refuse, ClientDisconnect: refuse}
    app = Starlette(routes=routes, exception_handlers=handlers, lifespan=batches.running)
    app.router.redirect_slashes = False
    hosts, secret = {host.lower() for host in allowed_hosts}, None if token is None else f"Bearer {token}".encode()

    async def guarded(scope: Scope, receive: Receive, send: Send) -> None:
        error = _objection(scope, hosts, secret) if scope["type"] == "http" else None
        if error is None:
            await app(scope, receive, send)
        else:
            await (await refuse(Request(scope), error))(scope, receive, send)

    return guarded


def read_token(file: StrPath | None = None) -> str | None:
    """The token of a file, else of the environment variable BAYOU_TOKEN, else None."""
    token = os.environ.get("BAYOU_TOKEN") if file is None else Path(file).read_text().strip()
    if token is not None and not (token.isascii() and token.isprintable() and len(token) >= 8 and " " not in token):
        raise RunError(f"the token of {file or 'BAYOU_TOKEN'} must be 8 ASCII characters or more, without spaces")
    return token


def _no_route(request: Request) -> Refused:
    path, method = request.url.path, request.method
    if path not in PATHS:
        return Refused(HTTPStatus.NOT_FOUND, f"there is no {path[:80]}; there are {', '.join(PATHS)}")
    allowed = "GET, HEAD" if PATHS[path] == "GET" else PATHS[path]
    return Refused(HTTPStatus.METHOD_NOT_ALLOWED, f"{path} takes {allowed}, not {method[:80]}", Allow=allowed)


def _objection(scope: Scope, hosts: set[str], secret: bytes | None) -> Refused | None:
    """The error in the head of a request, if any."""
    found: dict[bytes, list[bytes]] = {}
    for name, value in scope["headers"]:
        found.setdefault(name, []).append(value)
    if b"content-length" in found and b"transfer-encoding" in found:  # one server may believe this, another that
        return Refused(HTTPStatus.BAD_REQUEST, "send Content-Length or Transfer-Encoding, not both", Connection="close")
    if len(found.get(b"host", ())) != 1:
        return Refused(HTTPStatus.BAD_REQUEST, "a request needs one Host header", Connection="close")
    host = found[b"host"][0].decode("latin-1").lower()
    name = host.rpartition(":")[0] if host.rpartition(":")[2].isdecimal() else host
    if "*" not in hosts and name.strip("[]") not in hosts:
        sentence = f"{name[:80]!r} is not an allowed host; start the server with --allowed-host {name[:80]}"
        return Refused(HTTPStatus.BAD_REQUEST, sentence)
    if secret is not None and scope["path"] != "/healthz":
        given = found.get(b"authorization", [b""])
        if len(given) != 1 or not hmac.compare_digest(given[0], secret):
            sentence = "send the token of this server as Authorization: Bearer TOKEN"
            return Refused(HTTPStatus.UNAUTHORIZED, sentence, **{"WWW-Authenticate": "Bearer"})
    return None


async def _body(request: Request, limits: Limits) -> bytes:
    body, size, most = bytearray(), int(request.headers.get("content-length", 0)), limits.max_bytes
    try:
        async with asyncio.timeout(limits.read_timeout):
            stream = request.stream()
            while size <= most and (chunk := await anext(stream, b"")):
                body += chunk
                size = max(size, len(body))
    except TimeoutError:
        sentence = f"the body was not complete within {limits.read_timeout:g} s"
        raise Refused(HTTPStatus.REQUEST_TIMEOUT, sentence, Connection="close") from None
    if size > most:
        sentence = f"{size:,} bytes are more than {most:,}; send fewer rows at a time"
        raise Refused(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, sentence)
    return bytes(body)


class _Connection(HttpToolsProtocol):
    """A connection with time and size limits: ``read_timeout`` seconds for the next complete head.

    uvicorn itself closes idle connections only: it accepts heads byte by byte and of any size, and unread responses.
    """

    _timer: asyncio.TimerHandle | None = None
    _head: int | None = None  # bytes of a head that is not complete

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._head is not None:
            self._head += len(data)
            if self._head > MAX_HEAD and not self.transport.is_closing():
                self.send_400_response(f"The head of the request has more than {MAX_HEAD} bytes.")

    def on_message_begin(self) -> None:
        self._head = 0
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._head = None
        self._stop_timer()
        if len(self.pipeline) >= MAX_PIPELINE:
            raise ValueError("too many requests without waiting for answers")  # answered 400 by uvicorn
        super().on_headers_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.cycle.response_complete:  # else the next request is here already
            self._await_head()

    def _await_head(self) -> None:
        self._stop_timer()
        self._timer = self.loop.call_later(self.config.timeout_keep_alive, self.transport.abort)

    def _stop_timer(self) -> None:
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
        allowed_hosts: allowed values of the Host header, ``*`` for any; by default ``host`` and the names of a
            loopback address, and any where ``host`` is every address of the machine.
        token: required in ``Authorization: Bearer``; None: no check.
        ssl_certfile: a certificate (PEM), for HTTPS.
        ssl_keyfile: its key, if in another file.
        quiet: do not log requests.

    Raises:
        RunError: the address is not available, or the certificate cannot be read.
    """

    def __init__(
        self,
        service: Service,
        host: str = "127.0.0.1",
        port: int = 8000,
        *,
        limits: Limits | None = None,
        allowed_hosts: Sequence[str] = (),
        token: str | None = None,
        ssl_certfile: StrPath | None = None,
        ssl_keyfile: StrPath | None = None,
        quiet: bool = False,
    ) -> None:
        limits = limits or Limits()
        everywhere = host in ("0.0.0.0", "::", "")
        hosts = allowed_hosts or (("*",) if everywhere else (host, "localhost", "127.0.0.1", "::1"))
        app = application(service, limits, allowed_hosts=hosts, token=token)
        self.config = uvicorn.Config(
            app,
            http=_Connection,
            ws="none",
            lifespan="on",
            log_config=None if quiet else uvicorn.config.LOGGING_CONFIG,
            log_level="error" if quiet else "info",
            access_log=not quiet,
            proxy_headers=False,
            server_header=False,
            headers=[("server", f"bayou/{bayou.__version__}"), ("x-content-type-options", "nosniff")],
            limit_concurrency=MAX_CONNECTIONS,
            timeout_keep_alive=limits.read_timeout,  # type: ignore[arg-type]  # seconds, whole or not
            timeout_graceful_shutdown=SHUTDOWN,
            ssl_certfile=ssl_certfile,
            ssl_keyfile=ssl_keyfile,
        )
        try:
            self.config.load()
        except OSError as error:
            raise RunError(f"cannot read the certificate {ssl_certfile} with its key {ssl_keyfile}: {error}") from error
        self._uvicorn = uvicorn.Server(self.config)
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._socket = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)  # asyncio: no delay if TCP is said
        try:
            if os.name == "posix":  # elsewhere it would take the port of another program
                self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self._socket.bind((host, port))
            self._socket.listen(2048)
        except (OSError, OverflowError) as error:
            self._socket.close()
            raise RunError(f"cannot listen at {host}:{port}: {error}; choose another --host or --port") from error
        self.address: tuple[str, int] = self._socket.getsockname()[:2]

    @property
    def url(self) -> str:
        host, port = self.address
        return f"http{'s' if self.config.is_ssl else ''}://{f'[{host}]' if ':' in host else host}:{port}"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *args: Any) -> None:
        self._socket.close()

    def serve_forever(self) -> None:
        """Answer until a signal, or ``shutdown`` from another thread."""
        self._uvicorn.run([self._socket])

    def shutdown(self) -> None:
        """End ``serve_forever`` after the responses in progress."""
        self._uvicorn.should_exit = True
