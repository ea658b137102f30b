"""Predictions of a run folder as a function from JSON to JSON, and its description; ``bayou.runs.serve`` adds HTTP."""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from http import HTTPStatus
from itertools import islice
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
MAX_CELLS = 2**22  # rows × columns (or pixels) of one request


class Refused(Exception):
    """A rejected request: the HTTP status and the error message of its response."""

    def __init__(self, status: HTTPStatus, sentence: str, **headers: str) -> None:
        super().__init__(sentence)
        self.status, self.headers = status, headers


@final
@dataclass(frozen=True)
class Service:
    """Predictions from JSON to JSON; thread-safe.

    Args:
        posterior: makes the predictions.
        preprocessor: turns rows of JSON into inputs of the network.
        name: run and method, for the description.
        samples: number of averaged networks.
        level: probability of the intervals; a request can set another.
        max_rows: rows of one request.
        together: whether rows of several requests may be evaluated in one batch: an output depends on its own
            row only.
        notes: about the run, to be shown at the start.
    """

    posterior: Posterior
    preprocessor: Preprocessor
    name: str
    samples: int
    level: float = 0.9
    max_rows: int = 10_000
    together: bool = True
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
        """The service of a run folder. One prediction is computed, so that an unusable run is an error at the start."""
        check_level(level)
        if max_rows < 1:
            raise RunError(f"{spell('max_rows', '--max-rows')} must be at least 1, got {max_rows}")
        run = Run.open(folder)
        posterior, preprocessor, job = run.posterior(method, seed)
        name = f"{Path(folder).resolve().name}/{job.name}"
        service = cls(posterior, preprocessor, name, count(posterior, samples, run), level, max_rows)
        x = rng.normal(3, run.facts()["input_shape"], torch.empty(()), seed=0)
        service._said(x, level)
        notes = tuple(run.describe_interruption(job, posterior))
        return replace(service, together=service._rows_are_independent(x), notes=notes)

    def _rows_are_independent(self, x: Tensor) -> bool:
        """Whether outputs do not depend on the other rows of a batch, as with dropout masks by row."""
        whole, *alone = (self._predict(part).outputs for part in (x, *x.split(1)))
        return torch.allclose(whole, torch.cat(alone, 1), rtol=1e-3, atol=1e-4 * float(whole.abs().max()))

    def describe(self) -> JSON:
        """A description of requests and responses."""
        found: JSON = {"run": self.name, "bayou": bayou.__version__, "task": self.preprocessor.task}
        found |= {"samples": self.samples, "level": self.level, "max_rows": self.max_rows}
        if isinstance(self.preprocessor, TablePreprocessor):
            found |= {"columns": [column.name for column in self.preprocessor.columns]}
            found |= {"target": self.preprocessor.target}
        if isinstance(self.preprocessor, ImagePreprocessor):
            found |= {"shape": self.preprocessor.shape, "white": self.preprocessor.white}
        return found | ({"classes": self.preprocessor.class_names} if self.preprocessor.class_names else {})

    def answers(self, bodies: Sequence[bytes], until: float = math.inf) -> list[bytes | Exception]:
        """Responses to several requests, whose rows are evaluated in one batch: JSON, or an error for each.

        {"rows": [...], "level": 0.9} to {"predictions": [...], "notes": [...]}, one for every row and in its order.
        A row is an object with the columns of the training data, a list of its numbers in their order, or an image.

        Args:
            bodies: the requests, as JSON.
            until: the deadline, by ``time.monotonic``.
        """
        found: list[JSON | Exception | tuple[float, Rows]] = []
        for body in bodies:
            try:
                found.append(self._read(_parsed(body)))
            except Refused as error:
                found.append(error.with_traceback(None))  # which would keep the body, and itself, until a collection
            except Exception as error:
                found.append(error)
        read = [n for n, one in enumerate(found) if isinstance(one, tuple)]
        for group in [read, *([n] for n in read)]:  # one by one only where a batch fails, by the fault of one of them
            left = {n: one for n in group if isinstance(one := found[n], tuple)}
            try:
                for n, answer in zip(left, self._answers(list(left.values()), until), strict=True):
                    found[n] = answer
            except Exception as error:
                if len(group) == 1 or isinstance(error, TimeoutError):
                    for n in left:
                        found[n] = error
        return [one if isinstance(one, Exception) else json.dumps(one, allow_nan=False).encode() for one in found]

    def _answers(self, requests: Sequence[tuple[float, Rows]], until: float) -> list[JSON]:
        """The responses to parsed requests."""
        made: dict[int, list[JSON]] = {}
        for level in {level for level, _ in requests}:
            same = [n for n, request in enumerate(requests) if request[0] == level]
            x = torch.cat([requests[n][1].x for n in same])
            rows: list[JSON] = []
            for start in range(0, len(x), ROWS):
                if time.monotonic() > until:
                    raise TimeoutError
                try:
                    rows += self._said(x[start : start + ROWS], level)
                except ValueError as error:
                    raise Refused(HTTPStatus.UNPROCESSABLE_ENTITY, str(error)) from error
            left = iter(rows)
            made |= {n: list(islice(left, len(requests[n][1].x))) for n in same}
        for n, (_, read) in enumerate(requests):
            for name, values in (("distance", read.distance), (self.preprocessor.id or "", read.ids)):
                for one, value in zip(made[n], [] if values is None else list(values), strict=False):
                    one.setdefault(name, _finite(float(value)) if name == "distance" else value)
        return [{"predictions": made[n], "notes": read.notes} for n, (_, read) in enumerate(requests)]

    def _read(self, request: Any) -> tuple[float, Rows]:
        """The level and the rows of a request."""
        if not isinstance(request, Mapping) or not isinstance(request.get("rows"), list):
            raise Refused(
                HTTPStatus.BAD_REQUEST, 'send an object with a list of rows, {"rows": [{"column": 1.5}, ...]}'
            )
        rows, level = request["rows"], request.get("level", self.level)
        unknown = [key for key in request if key not in ("rows", "level")]
        if unknown:
            raise Refused(HTTPStatus.BAD_REQUEST, f"a request has the keys rows and level, not {unknown[0][:80]!r}")
        if isinstance(level, bool) or not isinstance(level, int | float) or not 0 < level < 1:
            raise Refused(HTTPStatus.BAD_REQUEST, f"level must be a number between 0 and 1, got {_short(level)}")
        if len(rows) > self.max_rows:
            raise Refused(
                HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"{len(rows):,} rows are more than {self.max_rows:,}; send fewer"
            )
        try:
            if not rows:
                raise ValueError("there are no rows")
            return level, self.preprocessor.rows(self._source(rows))
        except ValueError as error:
            sentence = str(error)
        raise Refused(HTTPStatus.UNPROCESSABLE_ENTITY, sentence)  # not from the error, whose frames have the rows

    def _source(self, rows: list[Any]) -> Any:
        """Rows of JSON as input of the preprocessor: columns by name, or an array."""
        table = self.preprocessor
        if not isinstance(table, TablePreprocessor) or all(isinstance(row, list) for row in rows):
            try:
                array = np.array(rows, dtype=np.float64)
            except (TypeError, ValueError, OverflowError):
                raise ValueError("rows that are lists must have numbers only, and as many in each") from None
            self._check_cells(array.size)
            if np.isinf(array).any() or (np.isnan(array).any() and not isinstance(table, TablePreprocessor)):
                raise ValueError("rows that are lists must have finite numbers; a pixel cannot be null")
            return array
        needed = {column.name for column in table.columns}
        known, names = needed | {table.target, *table.dropped} | ({table.id} if table.id else set()), dict[str, None]()
        self._check_cells(len(rows) * len(known))
        for number, row in enumerate(rows, 1):
            if not isinstance(row, Mapping):
                raise ValueError(f"row {number} is not an object; every row needs {self._columns()} by name")
            for name, cell in row.items():
                if name not in known:
                    close = nearest(name, sorted(needed)) if len(name) < 80 else ""
                    raise ValueError(
                        f"row {number} has {name[:80]!r}, which is not a column of this run{close}; a row has "
                        f"{self._columns()}"
                    )
                if isinstance(cell, list | Mapping):
                    raise ValueError(f"{name!r} of row {number} is neither a number nor a string: {_short(cell)}")
                if isinstance(cell, int | float) and not abs(cell) <= sys.float_info.max:
                    raise ValueError(f"{name!r} of row {number} is too large for a number: {_short(cell)}")
            names |= dict.fromkeys(row)
        if not names:
            raise ValueError(f"the rows are empty; each needs {self._columns()} by name")
        return {name: [row.get(name) for row in rows] for name in names}  # a cell that is not there is missing

    def _check_cells(self, cells: int) -> None:
        if cells > MAX_CELLS:
            sentence = f"rows × columns are {cells:,} cells, more than {MAX_CELLS:,}; send fewer rows at a time"
            raise Refused(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, sentence)

    def _columns(self) -> str:
        names = self.describe().get("columns", ())
        return ", ".join(map(repr, names[:20])) + (f" and {len(names) - 20} more (GET /)" if len(names) > 20 else "")

    def _predict(self, x: Tensor) -> bayou.Predictive:
        dtype = next(iter(self.posterior.like().values())).dtype
        return self.posterior.predict(x.to(dtype), samples=self.samples, seed=0)

    def _said(self, x: Tensor, level: float) -> list[JSON]:
        found = said(self._predict(x), self.preprocessor, level)
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


def _parsed(body: bytes) -> Any:
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
