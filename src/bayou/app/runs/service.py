"""Predictions of a run folder as a function from JSON to JSON.

``bayou.app.runs.serve`` adds HTTP.
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
from numpy.typing import NDArray
from torch import Tensor

import bayou
from bayou.app.runs.folder import Run, RunError
from bayou.app.runs.predictions import (
    ROWS_PER_BATCH,
    network_dtype,
    prediction_columns,
    sample_count,
)
from bayou.core import rng
from bayou.core.files import StrPath
from bayou.core.progress import spell
from bayou.core.specs import nearest
from bayou.data.preprocess import (
    ImagePreprocessor,
    PreparedRows,
    Preprocessor,
    TablePreprocessor,
)
from bayou.likelihoods.predictive import check_level
from bayou.posteriors import Posterior

JSON = dict[str, Any]
BATCH_SECONDS = 0.05  # target time of one batch, for which a small request may have to wait
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
    """A request whose rows are computed in several batches.

    It holds its body until it is read, then its inputs and the predictions so far.

    Args:
        body: {"rows": [...], "level": 0.9} as JSON.
    """

    def __init__(self, body: bytes) -> None:
        self.body = body
        self.level = 0.0
        self.inputs: PreparedRows | None = None
        self.predictions: list[str] = []
        self.rows_done = 0
        self.error: Exception | None = None

    @property
    def rows_left(self) -> int | None:
        """Rows that are not predicted yet; 0 after an error, None before the body was read."""
        if self.error is not None:
            return 0
        if self.inputs is None:
            return None
        return len(self.inputs.x) - self.rows_done

    def response(self) -> bytes:
        """Return the predictions of all rows in their order and the notes about them, as JSON.

        Raises:
            Refused: the request is invalid.
        """
        if self.error is not None:
            raise self.error
        notes = [] if self.inputs is None else self.inputs.notes
        predictions = ", ".join(self.predictions)
        return f'{{"predictions": [{predictions}], "notes": {json.dumps(notes)}}}'.encode()


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
            sample_count(posterior, samples, run),
            level,
            max_rows,
            notes=notes,
        )
        x = rng.normal(TRIAL_ROWS, run.facts()["input_shape"], torch.empty(()), seed=0)
        if not service._rows_are_independent(x[:3]):
            return replace(service, together=False, batch_rows=ROWS_PER_BATCH)
        call_seconds = service._time(x[:1])
        row_seconds = max(service._time(x) - call_seconds, 1e-6) / (TRIAL_ROWS - 1)
        # Most of the time of a batch is for its rows, little for the call.
        batch_seconds = max(BATCH_SECONDS, 3 * call_seconds)
        batch_rows = max(int(batch_seconds / row_seconds), MIN_BATCH_ROWS)
        batch_rows = min(batch_rows, ROWS_PER_BATCH)
        seconds_per_row = row_seconds + call_seconds / batch_rows
        return replace(service, batch_rows=batch_rows, seconds_per_row=seconds_per_row)

    def _time(self, x: Tensor) -> float:
        """Return the shorter time of two predictions, in seconds."""
        times = []
        for _ in range(2):
            start = time.monotonic()
            self._predictions(x, self.level)
            times.append(time.monotonic() - start)
        return min(times)

    def _rows_are_independent(self, x: Tensor) -> bool:
        """Return whether the outputs of a row do not depend on the rest of its batch."""
        together = self._predict(x).outputs
        alone = torch.cat([self._predict(row).outputs for row in x.split(1)], 1)
        tolerance = 1e-4 * float(together.abs().max())
        return torch.allclose(together, alone, rtol=1e-3, atol=tolerance)

    def describe(self) -> JSON:
        """Return a description of requests and responses."""
        description: JSON = {
            "run": self.name,
            "bayou": bayou.__version__,
            "task": self.preprocessor.task,
            "samples": self.samples,
            "level": self.level,
            "max_rows": self.max_rows,
        }
        if isinstance(self.preprocessor, TablePreprocessor):
            description["columns"] = [column.name for column in self.preprocessor.columns]
            description["target"] = self.preprocessor.target
        if isinstance(self.preprocessor, ImagePreprocessor):
            description["shape"] = self.preprocessor.shape
            description["white"] = self.preprocessor.white
        if self.preprocessor.class_names:
            description["classes"] = self.preprocessor.class_names
        return description

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
        """Parse and validate the body of a request, which is then released.

        An error is kept in the request.

        Args:
            request: a new request.
        """
        try:
            request.level, request.inputs = self._read(_parse(request.body))
        except Exception as error:
            # Its traceback would keep the body until a garbage collection.
            request.error = error.with_traceback(None)
        request.body = b""

    def predict_next(self, requests: Sequence[Request]) -> None:
        """Predict the next rows of requests, at most ``batch_rows``, in one batch.

        Requests with another level than the first stay for a later batch. An error is kept in its
        request: if a batch fails, each request is computed alone.

        Args:
            requests: requests that were read.
        """
        batch = self._next_rows(requests)
        if not batch:
            return
        first = batch[0][0]
        try:
            predictions = self._predictions(torch.cat([x for _, x in batch]), first.level)
            for request, x in batch:
                self._append(request, predictions[: len(x)])
                predictions = predictions[len(x) :]
        except Exception as error:
            if len(batch) > 1:
                for request, _ in batch:
                    self.predict_next([request])
            elif isinstance(error, ValueError):
                first.error = Refused(HTTPStatus.UNPROCESSABLE_ENTITY, str(error))
            else:
                first.error = error

    def _next_rows(self, requests: Sequence[Request]) -> list[tuple[Request, Tensor]]:
        """Return the rows of the next batch with their requests, all with one level."""
        batch: list[tuple[Request, Tensor]] = []
        rows = 0
        for request in requests:
            if request.inputs is None or request.error is not None:
                continue
            if rows < self.batch_rows and (not batch or request.level == batch[0][0].level):
                x = request.inputs.x[request.rows_done :][: self.batch_rows - rows]
                batch.append((request, x))
                rows += len(x)
        return batch

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

    def _read(self, request: Any) -> tuple[float, PreparedRows]:
        """Return the level and the rows of a request."""
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
        # Not from the error, whose frames have the rows.
        raise Refused(HTTPStatus.UNPROCESSABLE_ENTITY, sentence)

    def _source(self, rows: list[Any]) -> NDArray[np.float64] | dict[str, list[Any]]:
        """Return rows of JSON as input of the preprocessor: columns by name, or an array."""
        table = self.preprocessor
        if not isinstance(table, TablePreprocessor) or all(isinstance(row, list) for row in rows):
            return self._array(rows)
        return self._columns_by_name(table, rows)

    def _array(self, rows: list[Any]) -> NDArray[np.float64]:
        """Return rows that are lists of numbers, or images, as an array."""
        try:
            array = np.array(rows, dtype=np.float64)
        except (TypeError, ValueError, OverflowError):
            raise ValueError(
                "rows that are lists must have numbers only, and as many in each"
            ) from None
        self._check_cells(array.size)
        accepts_null = isinstance(self.preprocessor, TablePreprocessor)
        if np.isinf(array).any() or (np.isnan(array).any() and not accepts_null):
            raise ValueError("rows that are lists must have finite numbers; a pixel cannot be null")
        return array

    def _columns_by_name(self, table: TablePreprocessor, rows: list[Any]) -> dict[str, list[Any]]:
        """Return rows that are objects as columns; a cell that is not there is missing."""
        inputs = {column.name for column in table.columns}
        known = inputs | {table.target, *table.dropped}
        if table.id:
            known.add(table.id)
        self._check_cells(len(rows) * len(known))
        names: dict[str, None] = {}
        for number, row in enumerate(rows, 1):
            if not isinstance(row, Mapping):
                raise ValueError(
                    f"row {number} is not an object; every row needs {self._describe_columns()} "
                    "by name"
                )
            for name, cell in row.items():
                if name not in known:
                    suggestion = nearest(name, sorted(inputs)) if len(name) < 80 else ""
                    raise ValueError(
                        f"row {number} has {name[:80]!r}, which is not a column of this run"
                        f"{suggestion}; a row has {self._describe_columns()}"
                    )
                _check_cell(cell, f"{name!r} of row {number}", is_input=name in inputs)
            names |= dict.fromkeys(row)
        if not names:
            raise ValueError(f"the rows are empty; each needs {self._describe_columns()} by name")
        return {name: [row.get(name) for row in rows] for name in names}

    def _check_cells(self, cells: int) -> None:
        """Refuse a request with too many cells."""
        if cells > MAX_CELLS:
            sentence = (
                f"rows × columns are {cells:,} cells, more than {MAX_CELLS:,}; send fewer rows at "
                "a time"
            )
            raise Refused(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, sentence)

    def _describe_columns(self) -> str:
        """Return the names of the first columns, for a message."""
        names = self.describe().get("columns", ())
        text = ", ".join(map(repr, names[:20]))
        if len(names) > 20:
            text += f" and {len(names) - 20} more (GET /)"
        return text

    def _predict(self, x: Tensor) -> bayou.Predictive:
        """Predict rows, always with the same networks."""
        x = x.to(network_dtype(self.posterior))
        return self.posterior.predict(x, samples=self.samples, seed=0)

    def _predictions(self, x: Tensor, level: float) -> list[JSON]:
        """Predict rows and return the response to each."""
        columns: dict[str, list[Any]] = {}
        for name, values in prediction_columns(self._predict(x), self.preprocessor, level).items():
            if isinstance(values, Tensor):
                columns[name] = [_finite(number) for number in values.tolist()]
            else:
                columns[name] = values
        if self.preprocessor.task == "classification":
            names = self.preprocessor.class_names
            probabilities = [columns.pop(f"p({name})") for name in names]
            columns["probabilities"] = [
                dict(zip(names, row, strict=True)) for row in zip(*probabilities, strict=True)
            ]
        else:
            low, high = (name for name in columns if name.endswith("%"))
            ends = zip(columns.pop(low), columns.pop(high), strict=True)
            columns["interval"] = [list(pair) for pair in ends]
        return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def _check_cell(cell: Any, position: str, *, is_input: bool) -> None:
    """Raise a ValueError for a cell that is neither a number, a string of moderate size nor null.

    Args:
        cell: a value of JSON.
        position: the column and the row, for the message.
        is_input: whether its column is an input of the network, so that a long string matters.
    """
    if isinstance(cell, list | Mapping):
        raise ValueError(f"{position} is neither a number nor a string: {_short(cell)}")
    if isinstance(cell, str) and len(cell) > MAX_CELL_LENGTH and is_input:
        length = f"{len(cell):,} characters, more than {MAX_CELL_LENGTH:,}"
        raise ValueError(f"{position} has {length}: {_short(cell)}")
    if isinstance(cell, int | float) and not abs(cell) <= sys.float_info.max:
        raise ValueError(f"{position} is too large for a number: {_short(cell)}")


def _parse(body: bytes) -> Any:
    """Parse the body of a request, or refuse it."""
    try:
        return json.loads(body, parse_constant=_no_number)
    except (ValueError, RecursionError) as error:
        sentence = f"the body is not valid JSON: {error}"
    # Not from the error, which has the whole body.
    raise Refused(HTTPStatus.BAD_REQUEST, sentence)


def _no_number(word: str) -> float:
    """Raise a ValueError for NaN and Infinity, which are not JSON."""
    raise ValueError(f"{word} is not a number in JSON; use null for a missing value")


def _short(value: Any) -> str:
    """Return a JSON value, shortened for an error message."""
    try:
        text = json.dumps(value)
    except (ValueError, RecursionError):  # more digits or brackets than Python writes
        text = "a value of thousands of digits or brackets"
    return text if len(text) <= 40 else f"{text[:40]}..."


def _finite(value: float) -> float | None:
    """Return the value, or None if JSON cannot hold it."""
    return value if np.isfinite(value) else None
