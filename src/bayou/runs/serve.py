"""A run folder behind HTTP: rows as JSON in, predictions as JSON out. The standard library serves."""

from __future__ import annotations

import json
import os
import sys
import threading
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar, Self, final

import numpy as np
import torch
from torch import Tensor

import bayou
from bayou.data.preprocess import ImagePreprocessor, Preprocessor, TablePreprocessor
from bayou.files import StrPath
from bayou.posteriors import Posterior
from bayou.runs.folder import Run, RunError
from bayou.runs.use import ROWS, check_level, count, said

JSON = dict[str, Any]
PATIENCE = 10.0  # seconds that a server which ends waits for answers on their way


class Refused(Exception):
    """A request that gets no answer: its status and a sentence."""

    def __init__(self, status: HTTPStatus, sentence: str, **headers: str) -> None:
        super().__init__(sentence)
        self.status, self.headers = status, headers


@final
@dataclass(frozen=True)
class Service:
    """What a request is answered with: JSON to JSON, in any number of threads."""

    posterior: Posterior
    preprocessor: Preprocessor
    name: str
    samples: int
    level: float = 0.9
    max_rows: int = 10_000

    @classmethod
    def of(
        cls,
        folder: StrPath,
        *,
        method: str | None = None,
        seed: int | None = None,
        samples: int | None = None,
        level: float = 0.9,
        max_rows: int = 10_000,
    ) -> Service:
        """The service of a run folder; its first prediction is made here, so that what cannot answer never listens."""
        check_level(level)
        if max_rows < 1:
            raise RunError(f"max_rows must be at least 1, got {max_rows}")
        run = Run.open(folder)
        posterior, preprocessor, job = run.posterior(method, seed)
        name = f"{Path(folder).resolve().name}/{job.name}"
        made = cls(posterior, preprocessor, name, count(posterior, samples, run), level, max_rows)
        made._said(torch.zeros(1, *run.facts()["input_shape"]), level)
        return made

    def describe(self) -> JSON:
        """What to send, and what comes back."""
        found: JSON = {"run": self.name, "bayou": bayou.__version__, "task": self.preprocessor.task}
        found |= {"samples": self.samples, "level": self.level, "max_rows": self.max_rows}
        if isinstance(self.preprocessor, TablePreprocessor):
            found |= {"columns": [column.name for column in self.preprocessor.columns]}
            found |= {"target": self.preprocessor.target}
        if isinstance(self.preprocessor, ImagePreprocessor):
            found |= {"shape": self.preprocessor.shape, "white": self.preprocessor.white}
        return found | ({"classes": self.preprocessor.class_names} if self.preprocessor.class_names else {})

    def predict(self, request: Any) -> JSON:
        """{"rows": [...], "level": 0.9} to {"predictions": [...], "notes": [...]}, one for every row and in its order.

        A row is an object with the columns of the training data, a list of its numbers in their order, or an image.
        """
        if not isinstance(request, Mapping) or not isinstance(request.get("rows"), list):
            raise Refused(
                HTTPStatus.BAD_REQUEST, 'send an object with a list of rows, {"rows": [{"column": 1.5}, ...]}'
            )
        rows, level = request["rows"], request.get("level", self.level)
        unknown = [key for key in request if key not in ("rows", "level")]
        if unknown:
            raise Refused(HTTPStatus.BAD_REQUEST, f"a request has rows and level, and not {unknown[0]!r}")
        if isinstance(level, bool) or not isinstance(level, int | float) or not 0 < level < 1:
            raise Refused(HTTPStatus.BAD_REQUEST, f"level must be a number between 0 and 1, got {level!r}")
        if len(rows) > self.max_rows:
            raise Refused(
                HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"{len(rows):,} rows are more than {self.max_rows:,}; send fewer"
            )
        try:
            if not rows:
                raise ValueError("there are no rows")
            read = self.preprocessor.rows(self._source(rows))
            parts = [self._said(read.x[n : n + ROWS], level) for n in range(0, len(read.x), ROWS)]
        except ValueError as error:
            raise Refused(HTTPStatus.UNPROCESSABLE_ENTITY, str(error)) from error
        made = [one for part in parts for one in part]
        for name, values in (("distance", read.distance), (self.preprocessor.id or "", read.ids)):
            for one, value in zip(made, [] if values is None else list(values), strict=False):
                one.setdefault(name, _finite(float(value)) if name == "distance" else value)
        return {"predictions": made, "notes": read.notes}

    def _source(self, rows: list[Any]) -> Any:
        """Rows of JSON as what the preprocessor reads: columns by name, or an array."""
        if not isinstance(self.preprocessor, TablePreprocessor) or all(isinstance(row, list) for row in rows):
            try:
                return np.array(rows, dtype=np.float64)
            except (TypeError, ValueError, OverflowError):
                raise ValueError("rows that are lists must have numbers only, and as many in each") from None
        odd = next((n for n, row in enumerate(rows) if not isinstance(row, Mapping)), None)
        if odd is not None:
            raise ValueError(f"row {odd + 1} is no object; every row needs {self._columns()} by name")
        for number, row in enumerate(rows):
            for name, cell in row.items():
                if isinstance(cell, list | Mapping):
                    raise ValueError(f"{name!r} of row {number + 1} is no number and no word: {json.dumps(cell)[:40]}")
        names = dict.fromkeys(name for row in rows for name in row)
        if not names:
            raise ValueError(f"the rows are empty; each needs {self._columns()} by name")
        return {name: [row.get(name) for row in rows] for name in names}  # a cell that is not there is missing

    def _columns(self) -> str:
        return ", ".join(repr(name) for name in self.describe().get("columns", ()))

    def _said(self, x: Tensor, level: float) -> list[JSON]:
        dtype = next(iter(self.posterior.like().values())).dtype
        p = self.posterior.predict(x.to(dtype), samples=self.samples, seed=0)
        found = said(p, self.preprocessor, level)
        columns: dict[str, list[Any]] = {
            name: value if isinstance(value, list) else [_finite(number) for number in value.tolist()]
            for name, value in found.items()
        }
        if self.preprocessor.task == "classification":
            parts = {name: columns.pop(f"p({name})") for name in self.preprocessor.class_names}
            groups = [dict(zip(parts, row, strict=True)) for row in zip(*parts.values(), strict=True)]
            columns["probabilities"] = groups
        else:
            low, high = (name for name in columns if name.endswith("%"))
            columns["interval"] = [list(ends) for ends in zip(columns.pop(low), columns.pop(high), strict=True)]
        return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def _finite(value: float) -> float | None:
    """JSON has no infinity."""
    return value if np.isfinite(value) else None


class Server(ThreadingHTTPServer):
    """A thread for every connection, as many predictions at a time as there are cores.

    ``with Server(service, port=0) as server: server.serve_forever()``; at the end answers on their way are awaited.
    """

    daemon_threads = True  # an idle connection keeps no process alive
    request_queue_size = 128

    def __init__(
        self,
        service: Service,
        host: str = "127.0.0.1",
        port: int = 8000,
        *,
        max_bytes: int = 2**23,
        quiet: bool = False,
    ) -> None:
        if max_bytes < 1:
            raise RunError(f"max_bytes must be at least 1, got {max_bytes}")
        self.service, self.max_bytes, self.quiet = service, max_bytes, quiet
        self.gate, self.changed, self.busy = threading.Semaphore(os.cpu_count() or 1), threading.Condition(), 0
        try:
            super().__init__((host, port), _Handler)
        except (OSError, OverflowError) as error:
            raise RunError(f"cannot listen at {host}:{port}: {error}; choose another --host or --port") from error

    @property
    def url(self) -> str:
        host, port = self.server_address[:2]
        return f"http://{host!s}:{port}"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *args: Any) -> None:
        self.server_close()
        with self.changed:
            self.changed.wait_for(lambda: self.busy == 0, PATIENCE)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that has gone is no error."""
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)

    def count(self, by: int) -> None:
        """How many answers are on their way."""
        with self.changed:
            self.busy += by
            self.changed.notify_all()


class _Handler(BaseHTTPRequestHandler):
    server: Server
    protocol_version = "HTTP/1.1"
    server_version, sys_version = f"bayou/{bayou.__version__}", ""
    timeout = 30  # seconds for a client that says nothing
    wbufsize, disable_nagle_algorithm = -1, True  # head and body in one packet: the second would wait 40 ms
    ways: ClassVar[dict[str, tuple[str, ...]]] = {
        "/predict": ("POST",),
        "/healthz": ("GET", "HEAD"),
        "/": ("GET", "HEAD"),
    }

    def answer(self) -> None:
        """Any request: JSON and a status."""
        self.server.count(1)
        try:
            status, body, headers = HTTPStatus.OK, self._made(), dict[str, str]()
        except Refused as refused:
            status, body, headers = refused.status, {"error": str(refused)}, refused.headers
        except OSError:  # the client has gone, or says nothing
            self.close_connection = True
            self.server.count(-1)
            return
        except Exception:
            traceback.print_exc()
            sentence = "the prediction failed; the server's own output has the reason"
            status, body, headers = HTTPStatus.INTERNAL_SERVER_ERROR, {"error": sentence}, {}
        try:
            self._send(status, body, headers)
        finally:
            self.server.count(-1)

    do_GET = do_HEAD = do_POST = do_PUT = do_PATCH = do_DELETE = do_OPTIONS = answer

    def _made(self) -> JSON:
        path = self.path.partition("?")[0]
        body = self._body()  # read even where it is of no use: the next request of the connection follows it
        if path not in self.ways:
            raise Refused(HTTPStatus.NOT_FOUND, f"there is no {path}; there are {', '.join(self.ways)}")
        if self.command not in self.ways[path]:
            allowed = ", ".join(self.ways[path])
            raise Refused(HTTPStatus.METHOD_NOT_ALLOWED, f"{path} takes {allowed}, not {self.command}", Allow=allowed)
        if path == "/healthz":
            return {"status": "ok"}
        if path == "/":
            return self.server.service.describe()
        try:
            request = json.loads(body, parse_constant=_no_number)
        except (ValueError, RecursionError) as error:
            raise Refused(HTTPStatus.BAD_REQUEST, f"the body is no JSON: {error}") from error
        with self.server.gate:
            return self.server.service.predict(request)

    def _body(self) -> bytes:
        length = self.headers.get("Content-Length")
        if length is None and self.headers.get("Transfer-Encoding"):
            self.close_connection = True
            raise Refused(HTTPStatus.LENGTH_REQUIRED, "say the Content-Length of the body; it cannot come in chunks")
        if length is not None and not (length.isascii() and length.isdigit() and len(length) < 20):
            self.close_connection = True
            raise Refused(HTTPStatus.BAD_REQUEST, f"Content-Length must be a number of bytes, got {length!r}")
        size, most = int(length or 0), self.server.max_bytes
        if size > most:
            self.close_connection = True  # what was not read is no request
            raise Refused(
                HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"{size:,} bytes are more than {most:,}; send fewer rows at a time"
            )
        body = self.rfile.read(size)
        if len(body) < size:
            raise ConnectionError("the body ended early")
        return body

    def _send(self, status: HTTPStatus, body: JSON, headers: Mapping[str, str]) -> None:
        data = json.dumps(body, allow_nan=False).encode()
        self.send_response(status)
        for name, value in {"Content-Type": "application/json", "Content-Length": str(len(data)), **headers}.items():
            self.send_header(name, value)
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """What the standard library refuses by itself, as JSON too."""
        status, self.close_connection = HTTPStatus(code), True
        self.command = getattr(self, "command", None) or "GET"
        self._send(status, {"error": message or status.phrase}, {})

    def log_message(self, format: str, *args: Any) -> None:
        if not self.server.quiet:
            super().log_message(format, *args)


def _no_number(word: str) -> float:
    raise ValueError(f"{word} is no number of JSON; a missing value is null")
