"""Predictions of a run folder as a function from JSON to JSON.

``bayou.app.runs.serve`` adds HTTP.
"""

from __future__ import annotations

import json
import reprlib
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

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
    requested_samples,
)
from bayou.core.files import StrPath
from bayou.core.progress import spell
from bayou.core.specs import nearest
from bayou.data.preprocess import (
    PreparedRows,
    Preprocessor,
    TablePreprocessor,
)
from bayou.data.reading import quote_names
from bayou.likelihoods.predictive import check_level
from bayou.posteriors import Posterior

if TYPE_CHECKING:
    from bayou.diagnostics import ReferenceRows

JSON = dict[str, Any]


class Refused(Exception):
    """A rejected request: the HTTP status and the error message of its response.

    Args:
        status: of the response.
        message: what was expected.
    """

    def __init__(self, status: HTTPStatus, message: str) -> None:
        super().__init__(message)
        self.status = status


@final
@dataclass(frozen=True)
class Query:
    """A valid request.

    Args:
        level: probability of the intervals.
        inputs: its rows, as inputs of the network.
    """

    level: float
    inputs: PreparedRows

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(self.inputs.x)


@final
@dataclass(frozen=True)
class Service:
    """Predictions from JSON to JSON.

    Args:
        posterior: makes the predictions.
        preprocessor: turns rows of JSON into inputs of the network.
        name: run and method, for the description.
        samples: number of averaged networks; None for a closed form.
        level: probability of the intervals; a request can set another.
        max_rows: rows of one request.
        notes: about the run, to be shown at the start.
        reference: rows with which the metrics compare those of requests; None without any.
    """

    posterior: Posterior
    preprocessor: Preprocessor
    name: str
    samples: int | None
    level: float = 0.9
    max_rows: int = 10_000
    notes: tuple[str, ...] = ()
    reference: ReferenceRows | None = None

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
        return cls(
            posterior,
            preprocessor,
            f"{Path(folder).resolve().name}/{job.name}",
            posterior.draws_to_average(requested_samples(samples, run)),
            level,
            max_rows,
            notes=tuple(run.describe_interruption(job, posterior)),
            reference=run.saved_reference(),
        )

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
        description |= self.preprocessor.describe()
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
        (response,) = self.predict([self.read(body)])
        return response

    def read(self, body: bytes) -> Query:
        """Parse and validate the body of a request.

        Args:
            body: {"rows": [...], "level": 0.9} as JSON.

        Raises:
            Refused: the body is no valid request.
        """
        request = _parse(body)
        if not isinstance(request, dict) or not isinstance(request.get("rows"), list):
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
                f"level must be a number between 0 and 1, got {reprlib.repr(level)}",
            )
        if len(rows) > self.max_rows:
            message = f"{len(rows):,} rows are more than {self.max_rows:,}; send fewer"
            raise Refused(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, message)
        try:
            if not rows:
                raise ValueError("there are no rows")
            return Query(level, self.preprocessor.rows(self._source(rows)))
        except ValueError as error:
            raise Refused(HTTPStatus.UNPROCESSABLE_ENTITY, str(error)) from None

    def predict(self, queries: Sequence[Query]) -> list[bytes]:
        """Predict the rows of several requests together and return the response to each.

        Args:
            queries: requests of one level.
        """
        predictions: list[JSON] = []
        for batch in torch.cat([query.inputs.x for query in queries]).split(ROWS_PER_BATCH):
            predictions += self._predictions(batch, queries[0].level)
        responses = []
        start = 0
        for query in queries:
            end = start + len(query)
            responses.append(self._response(query.inputs, predictions[start:end]))
            start = end
        return responses

    def _response(self, inputs: PreparedRows, predictions: list[JSON]) -> bytes:
        """Return the response with the distance and the identifier of every row."""
        for row, prediction in enumerate(predictions):
            if inputs.distance is not None:
                prediction.setdefault("distance", _finite(float(inputs.distance[row])))
            if inputs.ids is not None:
                prediction.setdefault(str(self.preprocessor.id), inputs.ids[row])
        response = {"predictions": predictions, "notes": inputs.notes}
        return json.dumps(response, allow_nan=False).encode()

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
            message = "rows that are lists must have numbers only, and as many in each"
            if isinstance(self.preprocessor, TablePreprocessor):
                message += '; send rows with text as objects, {"column": "text"}'
            raise ValueError(message) from None
        accepts_null = isinstance(self.preprocessor, TablePreprocessor)
        if np.isinf(array).any() or (np.isnan(array).any() and not accepts_null):
            raise ValueError("rows that are lists must have finite numbers; a pixel cannot be null")
        return array

    def _columns_by_name(self, table: TablePreprocessor, rows: list[Any]) -> dict[str, list[Any]]:
        """Return rows that are objects as columns; a cell that is not there is missing."""
        inputs = [column.name for column in table.columns]
        known = {*inputs, table.target, *table.dropped, table.id, table.observed}
        expected = f"the columns {quote_names(inputs)}"
        names: dict[str, None] = {}
        for number, row in enumerate(rows, 1):
            if not isinstance(row, dict):
                raise ValueError(f"row {number} is not an object; every row needs {expected}")
            for name, cell in row.items():
                if name not in known:
                    suggestion = nearest(name, sorted(inputs)) if len(name) < 80 else ""
                    raise ValueError(
                        f"row {number} has {name[:80]!r}, which is not a column of this run"
                        f"{suggestion}; a row has {expected}"
                    )
                _check_cell(cell, f"{name!r} of row {number}")
            names |= dict.fromkeys(row)
        if not names:
            raise ValueError(f"the rows are empty; each needs {expected}")
        missing = [name for name in inputs if name not in names]
        if missing:
            raise ValueError(
                f"no row has {quote_names(missing)}; a row has {expected}, where null is a missing "
                "value"
            )
        return {name: [row.get(name) for row in rows] for name in names}

    def _predictions(self, x: Tensor, level: float) -> list[JSON]:
        """Predict rows, always with the same networks, and return the response to each."""
        x = x.to(network_dtype(self.posterior))
        predictive = self.posterior.predict(x, samples=self.samples, seed=0)
        columns: dict[str, list[Any]] = {}
        for name, values in prediction_columns(predictive, self.preprocessor, level).items():
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


def _check_cell(cell: object, position: str) -> None:
    """Raise a ValueError for a cell that is neither a number, a string nor null.

    Args:
        cell: a value of JSON.
        position: the column and the row, for the message.
    """
    if isinstance(cell, list | dict):
        raise ValueError(f"{position} is neither a number nor a string: {reprlib.repr(cell)}")
    if isinstance(cell, int | float) and not abs(cell) <= sys.float_info.max:
        raise ValueError(f"{position} is too large for a number: {reprlib.repr(cell)}")


def _parse(body: bytes) -> object:
    """Parse the body of a request, or refuse it."""
    try:
        return json.loads(body, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise Refused(HTTPStatus.BAD_REQUEST, f"the body is not valid JSON: {error}") from None


def _refuse_constant(word: str) -> float:
    """Raise a ValueError for NaN and Infinity, which are not JSON."""
    raise ValueError(f"{word} is not a number in JSON; use null for a missing value")


def _finite(value: float) -> float | None:
    """Return the value, or None if JSON cannot hold it."""
    return value if np.isfinite(value) else None
