"""Predictions of a run folder as a function from JSON to JSON, and its description;
``bayou.runs.serve`` adds HTTP.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from http import HTTPStatus
from pathlib import Path
from typing import Any, final

import numpy as np
import torch
from torch import Tensor

import bayou
from bayou import rng
from bayou.data.preprocess import ImagePreprocessor, Preprocessor, Rows, TablePreprocessor
from bayou.files import StrPath
from bayou.posteriors import Posterior
from bayou.predictive import check_level
from bayou.progress import spell
from bayou.runs.folder import Run, RunError
from bayou.runs.use import ROWS, count, said
from bayou.specs import nearest

JSON = dict[str, Any]
BATCH_SECONDS = 0.05  # aim for the time of one batch, for which a small request may have to wait
MIN_BATCH_ROWS = 16
TRIAL_ROWS = 64  # predicted at the start, to measure their time
MAX_CELLS = 2**20  # rows × columns (or pixels) of one request
MAX_CELL_LENGTH = 1000  # characters of one cell


class Refused(Exception):
    """A rejected request: the HTTP status and the error message of its response."""

    def __init__(self, status: HTTPStatus, sentence: str, **headers: str) -> None:
        super().__init__(sentence)
        self.status = status
        self.headers = headers


@final
class Request:
    """A request whose rows are computed in parts: its body, then its inputs and the predictions so
    far.

    Args:
        body: {"rows": [...], "level": 0.9} as JSON.
    """

    def __init__(self, body: bytes) -> None:
        self.body = body
        self.level = 0.0
        self.inputs: Rows | None = None
        self.predictions: list[str] = []
        self.rows_done = 0
        self.error: Exception | None = None

    @property
    def rows_left(self) -> int | None:
        """Rows that are not predicted yet; 0 after an error, None before the body was read."""
        if self.error is not None:
            return 0
        return None if self.inputs is None else len(self.inputs.x) - self.rows_done

    def response(self) -> bytes:
        """The predictions of all rows in their order and the notes about them, as JSON."""
        if self.error is not None:
            raise self.error
        notes = [] if self.inputs is None else self.inputs.notes
        return f'{{"predictions": [{", ".join(self.predictions)}], "notes": {json.dumps(notes)}}}'.encode()


@final
@dataclass(frozen=True)
class Service:
    """Predictions from JSON to JSON.

    Args:
        posterior: makes the predictions.
        preprocessor: turns rows of JSON into inputs of the network.
        name: run and method, for the description.
        samples: number of averaged networks.
        level: probability of the intervals; a request can set another.
        max_rows: rows of one request.
        together: whether rows of several requests may be evaluated in one batch: an output depends
            on its own row only.
        batch_rows: rows that are predicted at a time.
        seconds_per_row: time of a prediction for one row of a batch.
        notes: about the run, to be shown at the start.
    """

    posterior: Posterior
    preprocessor: Preprocessor
    name: str
    samples: int
    level: float = 0.9
    max_rows: int = 10_000
    together: bool = True
    batch_rows: int = 256
    seconds_per_row: float = 1e-3
    notes: tuple[str, ...] = ()

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
        """Make the service of a run folder.

        Predictions of random rows are computed and timed, so that an unusable run is an error at
        the start.

        Args:
            folder: the run folder.
            method: which method of the run; by default the first.
            seed: which seed of the run; by default the first.
            samples: number of averaged networks; by default as in the run.
            level: probability of the intervals.
            max_rows: rows of one request.
        """
        check_level(level)
        if max_rows < 1:
            raise RunError(f"{spell('max_rows', '--max-rows')} must be at least 1, got {max_rows}")
        run = Run.open(folder)
        posterior, preprocessor, job = run.posterior(method, seed)
        name = f"{Path(folder).resolve().name}/{job.name}"
        notes = tuple(run.describe_interruption(job, posterior))
        service = cls(
            posterior,
            preprocessor,
            name,
            count(posterior, samples, run),
            level,
            max_rows,
            notes=notes,
        )
        x = rng.normal(TRIAL_ROWS, run.facts()["input_shape"], torch.empty(()), seed=0)
        if not service._rows_are_independent(x[:3]):
            return replace(service, together=False, batch_rows=ROWS)
        call_seconds = service._time(x[:1])
        row_seconds = max(service._time(x) - call_seconds, 1e-6) / (TRIAL_ROWS - 1)
        batch_seconds = max(
            BATCH_SECONDS, 3 * call_seconds
        )  # most of it for rows, little for the call
        batch_rows = min(max(int(batch_seconds / row_seconds), MIN_BATCH_ROWS), ROWS)
        seconds_per_row = row_seconds + call_seconds / batch_rows
        return replace(service, batch_rows=batch_rows, seconds_per_row=seconds_per_row)

    def _time(self, x: Tensor) -> float:
        """The shorter time of two predictions, in seconds."""
        times = []
        for _ in range(2):
            start = time.monotonic()
            self._predictions(x, self.level)
            times.append(time.monotonic() - start)
        return min(times)

    def _rows_are_independent(self, x: Tensor) -> bool:
        """Whether outputs do not depend on the other rows of a batch, as with dropout masks by
        row.
        """
        whole, *alone = (self._predict(part).outputs for part in (x, *x.split(1)))
        return torch.allclose(
            whole, torch.cat(alone, 1), rtol=1e-3, atol=1e-4 * float(whole.abs().max())
        )

    def describe(self) -> JSON:
        """A description of requests and responses."""
        found: JSON = {"run": self.name, "bayou": bayou.__version__, "task": self.preprocessor.task}
        found |= {"samples": self.samples, "level": self.level, "max_rows": self.max_rows}
        if isinstance(self.preprocessor, TablePreprocessor):
            found |= {"columns": [column.name for column in self.preprocessor.columns]}
            found |= {"target": self.preprocessor.target}
        if isinstance(self.preprocessor, ImagePreprocessor):
            found |= {"shape": self.preprocessor.shape, "white": self.preprocessor.white}
        return found | (
            {"classes": self.preprocessor.class_names} if self.preprocessor.class_names else {}
        )

    def answer(self, body: bytes) -> bytes:
        """Answer one request at once; raise ``Refused`` if it is invalid.

        {"rows": [...], "level": 0.9} to {"predictions": [...], "notes": [...]}, one for every row
        and in its order. A row is an object with the columns of the training data, a list of its
        numbers in their order, or an image.

        Args:
            body: the request, as JSON.
        """
        request = Request(body)
        self.read(request)
        while request.rows_left:
            self.predict_next([request])
        return request.response()

    def read(self, request: Request) -> None:
        """Parse and validate the body of a request, which is then released; its error is kept in
        the request.

        Args:
            request: a new request.
        """
        try:
            request.level, request.inputs = self._read(_parse(request.body))
        except Exception as error:
            request.error = error.with_traceback(
                None
            )  # which would keep the body until a garbage collection
        request.body = b""

    def predict_next(self, requests: Sequence[Request]) -> None:
        """Predict the next rows of requests, at most ``batch_rows``, in one batch.

        Requests with another level than the first stay for a later batch. An error is kept in its
        request: if a batch fails, each request is computed alone.

        Args:
            requests: requests that were read.
        """
        parts: list[tuple[Request, Tensor]] = []
        rows = 0
        for request in requests:
            if request.inputs is None or request.error is not None:
                continue
            if rows < self.batch_rows and (not parts or request.level == parts[0][0].level):
                x = request.inputs.x[request.rows_done :][: self.batch_rows - rows]
                parts.append((request, x))
                rows += len(x)
        if not parts:
            return
        first = parts[0][0]
        try:
            predictions = self._predictions(torch.cat([x for _, x in parts]), first.level)
            for request, x in parts:
                self._append(request, predictions[: len(x)])
                predictions = predictions[len(x) :]
        except Exception as error:
            if len(parts) == 1:
                is_invalid = isinstance(error, ValueError)
                first.error = (
                    Refused(HTTPStatus.UNPROCESSABLE_ENTITY, str(error)) if is_invalid else error
                )
            else:
                for request, _ in parts:
                    self.predict_next([request])

    def _append(self, request: Request, predictions: list[JSON]) -> None:
        """Add the predictions of the next rows of a request, with their distance and identifier."""
        inputs = request.inputs
        if inputs is None:
            raise ValueError("the request was not read")
        start = request.rows_done
        for row, prediction in enumerate(predictions, start):
            if inputs.distance is not None:
                prediction.setdefault("distance", _finite(float(inputs.distance[row])))
            if inputs.ids is not None:
                prediction.setdefault(str(self.preprocessor.id), inputs.ids[row])
        request.predictions.append(json.dumps(predictions, allow_nan=False)[1:-1])
        request.rows_done += len(predictions)

    def _read(self, request: Any) -> tuple[float, Rows]:
        """The level and the rows of a request."""
        if not isinstance(request, Mapping) or not isinstance(request.get("rows"), list):
            example = '{"rows": [{"column": 1.5}, ...]}'
            raise Refused(HTTPStatus.BAD_REQUEST, f"send an object with a list of rows, {example}")
        rows = request["rows"]
        level = request.get("level", self.level)
        unknown = [key for key in request if key not in ("rows", "level")]
        if unknown:
            raise Refused(
                HTTPStatus.BAD_REQUEST,
                f"a request has the keys rows and level, not {unknown[0][:80]!r}",
            )
        if isinstance(level, bool) or not isinstance(level, int | float) or not 0 < level < 1:
            raise Refused(
                HTTPStatus.BAD_REQUEST,
                f"level must be a number between 0 and 1, got {_short(level)}",
            )
        if len(rows) > self.max_rows:
            sentence = f"{len(rows):,} rows are more than {self.max_rows:,}; send fewer"
            raise Refused(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, sentence)
        try:
            if not rows:
                raise ValueError("there are no rows")
            return level, self.preprocessor.rows(self._source(rows))
        except ValueError as error:
            sentence = str(error)
        raise Refused(
            HTTPStatus.UNPROCESSABLE_ENTITY, sentence
        )  # not from the error, whose frames have the rows

    def _source(self, rows: list[Any]) -> Any:
        """Rows of JSON as input of the preprocessor: columns by name, or an array."""
        table = self.preprocessor
        if not isinstance(table, TablePreprocessor) or all(isinstance(row, list) for row in rows):
            try:
                array = np.array(rows, dtype=np.float64)
            except (TypeError, ValueError, OverflowError):
                raise ValueError(
                    "rows that are lists must have numbers only, and as many in each"
                ) from None
            self._check_cells(array.size)
            if np.isinf(array).any() or (
                np.isnan(array).any() and not isinstance(table, TablePreprocessor)
            ):
                raise ValueError(
                    "rows that are lists must have finite numbers; a pixel cannot be null"
                )
            return array
        needed = {column.name for column in table.columns}
        known, names = (
            needed | {table.target, *table.dropped} | ({table.id} if table.id else set()),
            dict[str, None](),
        )
        self._check_cells(len(rows) * len(known))
        for number, row in enumerate(rows, 1):
            if not isinstance(row, Mapping):
                raise ValueError(
                    f"row {number} is not an object; every row needs {self._columns()} by name"
                )
            for name, cell in row.items():
                if name not in known:
                    close = nearest(name, sorted(needed)) if len(name) < 80 else ""
                    raise ValueError(
                        f"row {number} has {name[:80]!r}, which is not a column of this run{close}; a row has "
                        f"{self._columns()}"
                    )
                if isinstance(cell, list | Mapping):
                    raise ValueError(
                        f"{name!r} of row {number} is neither a number nor a string: {_short(cell)}"
                    )
                if isinstance(cell, str) and len(cell) > MAX_CELL_LENGTH and name in needed:
                    length = f"{len(cell):,} characters, more than {MAX_CELL_LENGTH:,}"
                    raise ValueError(f"{name!r} of row {number} has {length}: {_short(cell)}")
                if isinstance(cell, int | float) and not abs(cell) <= sys.float_info.max:
                    raise ValueError(
                        f"{name!r} of row {number} is too large for a number: {_short(cell)}"
                    )
            names |= dict.fromkeys(row)
        if not names:
            raise ValueError(f"the rows are empty; each needs {self._columns()} by name")
        return {
            name: [row.get(name) for row in rows] for name in names
        }  # a cell that is not there is missing

    def _check_cells(self, cells: int) -> None:
        if cells > MAX_CELLS:
            sentence = f"rows × columns are {cells:,} cells, more than {MAX_CELLS:,}; send fewer rows at a time"
            raise Refused(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, sentence)

    def _columns(self) -> str:
        names = self.describe().get("columns", ())
        return ", ".join(map(repr, names[:20])) + (
            f" and {len(names) - 20} more (GET /)" if len(names) > 20 else ""
        )

    def _predict(self, x: Tensor) -> bayou.Predictive:
        dtype = next(iter(self.posterior.like().values())).dtype
        return self.posterior.predict(x.to(dtype), samples=self.samples, seed=0)

    def _predictions(self, x: Tensor, level: float) -> list[JSON]:
        found = said(self._predict(x), self.preprocessor, level)
        columns: dict[str, list[Any]] = {
            name: value
            if isinstance(value, list)
            else [_finite(number) for number in value.tolist()]
            for name, value in found.items()
        }
        if self.preprocessor.task == "classification":
            parts = {name: columns.pop(f"p({name})") for name in self.preprocessor.class_names}
            groups = [
                dict(zip(parts, row, strict=True)) for row in zip(*parts.values(), strict=True)
            ]
            columns["probabilities"] = groups
        else:
            low, high = (name for name in columns if name.endswith("%"))
            columns["interval"] = [
                list(ends) for ends in zip(columns.pop(low), columns.pop(high), strict=True)
            ]
        return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def _parse(body: bytes) -> Any:
    try:
        return json.loads(body, parse_constant=_no_number)
    except (ValueError, RecursionError) as error:
        sentence = f"the body is not valid JSON: {error}"
    raise Refused(HTTPStatus.BAD_REQUEST, sentence)  # not from the error, which has the whole body


def _no_number(word: str) -> float:
    raise ValueError(f"{word} is not a number in JSON; use null for a missing value")


def _short(value: Any) -> str:
    """A JSON value, shortened for an error message."""
    try:
        text = json.dumps(value)
    except (ValueError, RecursionError):  # more digits or brackets than Python writes
        text = "a value of thousands of digits or brackets"
    return text if len(text) <= 40 else f"{text[:40]}..."


def _finite(value: float) -> float | None:
    """The value, or None if JSON cannot hold it."""
    return value if np.isfinite(value) else None
