"""Metrics of a service in the text format of Prometheus: requests, latencies, and shifts."""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import final

import torch
from torch import Tensor

from bayou.app.runs.predictions import network_dtype
from bayou.app.runs.service import Service
from bayou.data.preprocess import TablePreprocessor
from bayou.data.watched import training_columns
from bayou.diagnostics import ShiftReport, watch
from bayou.diagnostics.row_comparison import MIN_ROWS

WINDOW_ROWS = 1000  # the latest rows, which are compared with training rows
REFRESH_ROWS = 100  # new rows after which they are compared again
BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)  # seconds
MEDIA_TYPE = "text/plain; version=0.0.4; charset=utf-8"
Labels = Mapping[str, str]
Sample = tuple[str, Labels, float]  # the ending of the name, labels, value


@dataclass
class _Latencies:
    """A histogram of seconds."""

    counts: list[int] = field(default_factory=lambda: [0] * (len(BUCKETS) + 1))
    total: float = 0.0

    def add(self, seconds: float) -> None:
        """Count a response."""
        index = sum(seconds > bound for bound in BUCKETS)
        self.counts[index] += 1
        self.total += seconds

    def samples(self) -> list[Sample]:
        """Return the cumulative buckets, the sum and the count."""
        samples: list[Sample] = []
        count = 0
        for bound, bucket_count in zip((*BUCKETS, None), self.counts, strict=True):
            count += bucket_count
            samples.append(("_bucket", {"le": "+Inf" if bound is None else f"{bound:g}"}, count))
        return [*samples, ("_sum", {}, self.total), ("_count", {}, count)]


@final
class ServiceMetrics:
    """Counts of a service, and the comparison of its latest rows with the training rows.

    The comparison is computed when it is read, if 100 or more rows were predicted since the last
    time. A service without reference rows (a built-in data set, or ``--keep-rows 0``) has counts
    and latencies only. May be called from several threads.

    Args:
        service: has the posterior and the reference rows.
    """

    def __init__(self, service: Service) -> None:
        self.service = service
        self._lock = threading.Lock()
        self._refresh_lock = threading.Lock()
        self._statuses: Counter[int] = Counter()
        self._latencies = _Latencies()
        self._rows = 0
        self._window: deque[Tensor] = deque(maxlen=WINDOW_ROWS)
        self._compared_rows = 0
        self._shift: list[str] = []

    def record(self, status: int, seconds: float, x: Tensor | None = None) -> None:
        """Count a response.

        Args:
            status: of HTTP.
            seconds: from the request to its response.
            x: the predicted inputs; None for an error.
        """
        with self._lock:
            self._statuses[status] += 1
            if x is not None:
                self._latencies.add(seconds)
                self._rows += len(x)
                self._window.extend(x[-WINDOW_ROWS:])

    def render(self) -> str:
        """Return all metrics as text."""
        with self._lock:
            statuses = dict(self._statuses)
            latency_samples = self._latencies.samples()
            rows = self._rows
            window = list(self._window)
        lines = _metric(
            "bayou_requests_total",
            "counter",
            "Responses by HTTP status.",
            [("", {"status": str(status)}, count) for status, count in sorted(statuses.items())],
        )
        lines += _metric(
            "bayou_rows_total", "counter", "Rows that were predicted.", [("", {}, rows)]
        )
        lines += _metric(
            "bayou_request_seconds",
            "histogram",
            "Seconds from a request to its predictions.",
            latency_samples,
        )
        with self._refresh_lock:
            if rows - self._compared_rows >= REFRESH_ROWS or (not self._shift and window):
                self._compared_rows = rows
                self._shift = self._compare(window)
            return "\n".join([*lines, *self._shift]) + "\n"

    def _compare(self, window: list[Tensor]) -> list[str]:
        """Return the metrics of the latest rows."""
        reference = self.service.reference
        if reference is None or len(window) < MIN_ROWS:
            return []
        posterior = self.service.posterior
        dtype = network_dtype(posterior)
        x = torch.stack(window).to(dtype)
        preprocessor = self.service.preprocessor
        columns = None
        if isinstance(preprocessor, TablePreprocessor):
            columns = training_columns(preprocessor.columns, x)
        report = watch(posterior, reference, x, columns=columns, samples=self.service.samples)
        samples: list[Sample] = []
        for name, rows in (("window", x), ("reference", reference.held_x)):
            if rows is not None:
                predictive = posterior.predict(rows.to(dtype), self.service.samples, seed=0)
                entropy = float(predictive.entropy.double().mean())
                samples.append(("", {"rows": name}, entropy))
        return [
            *_shift_metrics(report),
            *_metric(
                "bayou_prediction_entropy", "gauge", "Mean entropy of predictions, nats.", samples
            ),
            *_metric(
                "bayou_input_shift",
                "gauge",
                "Mean of the latest rows minus that of training rows, in standard deviations.",
                self._input_samples(x),
            ),
        ]

    def _input_samples(self, x: Tensor) -> Iterable[Sample]:
        """Return the standardized difference of each input of a table."""
        names = self.service.preprocessor.feature_names
        reference = self.service.reference
        if reference is None or len(names) != x[0].numel():
            return []
        train = reference.x.double()
        std = train.std(0, correction=0).clamp_min(1e-12)
        shift = (x.double().mean(0) - train.mean(0)) / std
        return [("", {"input": name}, v) for name, v in zip(names, shift.tolist(), strict=True)]


def _shift_metrics(report: ShiftReport) -> list[str]:
    """Return the result of ``watch`` as metrics."""
    samples: list[Sample] = [
        ("", {"family": test.family, "subject": test.subject, "test": test.name}, test.adjusted_p)
        for test in report.tests
    ]
    return [
        *_metric(
            "bayou_watch_rows", "gauge", "Latest rows that were compared.", [("", {}, report.rows)]
        ),
        *_metric(
            "bayou_watch_shifted",
            "gauge",
            "1 if the inputs of the latest rows have shifted, else 0.",
            [("", {}, float(report.inputs == "shifted"))],
        ),
        *_metric(
            "bayou_watch_p_value",
            "gauge",
            "P-values of the latest rows against training rows, adjusted by Holm.",
            samples,
        ),
    ]


def _metric(name: str, metric_type: str, text: str, samples: Iterable[Sample]) -> list[str]:
    """Return the lines of a metric."""
    lines = [f"# HELP {name} {text}", f"# TYPE {name} {metric_type}"]
    for ending, labels, value in samples:
        pairs = ",".join(f'{key}="{_escape(label)}"' for key, label in labels.items())
        selector = f"{{{pairs}}}" if pairs else ""
        lines.append(f"{name}{ending}{selector} {value:.10g}")
    return lines


def _escape(label: str) -> str:
    """Return a label with the escapes of the format."""
    return label.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
