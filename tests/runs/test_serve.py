"""A run over HTTP, by a real socket: what it answers is what ``bayou predict`` writes, and what it
refuses, and how.
"""

from __future__ import annotations

import asyncio
import csv
import gc
import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import tracemalloc
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import bayou
from bayou.app.runs import batches as batching, predictions, service as services
from bayou.app.runs.batches import Batches, Limits
from bayou.app.runs.config import Config
from bayou.app.runs.folder import Run, RunError
from bayou.app.runs.predictions import write_predictions
from bayou.app.runs.serve import Server
from bayou.app.runs.service import Refused, Request, Service
from bayou.data.preprocess import ImagePreprocessor

HEADER = ["name", "height", "color"]


def rows(count: int) -> list[dict[str, Any]]:
    x = torch.randn(count, 2, generator=torch.Generator().manual_seed(0)).tolist()
    return [
        {"name": f"n{i}", "height": round(a, 4), "color": "red" if b > 0 else "blue"}
        for i, (a, b) in enumerate(x)
    ]


def made(folder: Path, task: str) -> Path:
    """A run on a table."""
    target = {
        "classes": lambda row: "yes" if row["height"] > 0 else "no",
        "numbers": lambda row: 1e3 + row["height"],
    }
    with open(folder / "table.csv", "w", newline="") as stream:
        writer = csv.writer(stream)
        writer.writerow([*HEADER, "y"])
        writer.writerows([*row.values(), target[task](row)] for row in rows(60))
    config = Config(str(folder / "table.csv"), ("map",), target="y", id="name", steps=10, samples=4)
    Run.create(folder / "run", config).work()
    return folder / "run"


@pytest.fixture(scope="module")
def classes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made(tmp_path_factory.mktemp("classes"), "classes")


@pytest.fixture(scope="module")
def numbers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made(tmp_path_factory.mktemp("numbers"), "numbers")


@contextmanager
def serving(service: Service, **options: Any) -> Iterator[Server]:
    with Server(service, port=0, quiet=True, **options) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


LIMITS = Limits(max_bytes=10_000, read_timeout=0.4, timeout=5.0)


@pytest.fixture(scope="module")
def server(classes: Path) -> Iterator[Server]:
    with serving(Service.of(classes, max_rows=50), limits=LIMITS) as found:
        yield found


def ask(
    server: Server, method: str, path: str, body: Any = None, **headers: str
) -> tuple[int, Any, Any]:
    connection = http.client.HTTPConnection(*server.address, timeout=30)
    try:
        data = body if isinstance(body, bytes | None) else json.dumps(body).encode()
        connection.request(
            method, path, data, {name.replace("_", "-"): value for name, value in headers.items()}
        )
        answer = connection.getresponse()
        return answer.status, json.loads(answer.read() or b"null"), answer.headers
    finally:
        connection.close()


def send(server: Server, data: bytes) -> tuple[int, bytes]:
    """The status of the answer to these bytes, and all of it; -1 where the connection is closed
    without one.
    """
    with socket.create_connection(server.address, timeout=10) as connection:
        connection.sendall(data)
        found = b""
        while more := connection.recv(2**16):
            found += more
    return int(found.split()[1]) if found else -1, found


@pytest.mark.parametrize("task", ["classes", "numbers"])
def test_responses_equal_the_file_of_predict(
    task: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    folder = request.getfixturevalue(task)
    new = [*rows(5), {"name": "far", "height": 50.0, "color": None}]
    with open(tmp_path / "new.csv", "w", newline="") as stream:
        writer = csv.DictWriter(stream, HEADER)
        writer.writeheader()
        writer.writerows(new)
    write_predictions(folder, tmp_path / "new.csv", tmp_path / "out.csv", level=0.8)
    with open(tmp_path / "out.csv", newline="") as stream:
        written = list(csv.DictReader(stream))
    with serving(Service.of(folder)) as server:
        status, answer, headers = ask(server, "POST", "/predict", {"rows": new, "level": 0.8})
    assert status == 200
    assert headers["Content-Type"] == "application/json"
    assert len(answer["predictions"]) == len(new)
    for one, line in zip(answer["predictions"], written, strict=True):
        flat = {k: v for k, v in one.items() if k not in ("probabilities", "interval")}
        flat |= {f"p({name})": value for name, value in one.get("probabilities", {}).items()}
        flat |= dict(zip(("10%", "90%"), one.get("interval", ()), strict=False))
        assert {*flat} == {*line} - {"row"}
        for name, value in flat.items():
            if isinstance(value, str):
                assert value == line[name]
            else:
                assert value == pytest.approx(
                    float(line[name]), rel=1e-3 if name == "distance" else 1e-6, abs=1e-6
                )
    assert answer["predictions"][-1]["distance"] > 1


def predicted(service: Service, request: Any) -> Any:
    """The answer to one request."""
    return json.loads(service.answer(json.dumps(request).encode()))


def test_images_and_lists_of_numbers() -> None:
    x = [[float((i * k) % 17) for k in range(64)] for i in range(3)]
    net, classes = (
        torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10)),
        [str(k) for k in range(10)],
    )
    posterior = bayou.fit(
        net, (torch.tensor(x), torch.arange(3)), method=bayou.MAP(steps=2), progress=False
    )
    images = ImagePreprocessor.fit(np.array(x).reshape(3, 1, 8, 8), classes, white=16.0)
    service = Service(posterior, images, "digits", 1)
    answers = predicted(service, {"rows": x})["predictions"]
    assert len(answers) == 3
    assert {*answers[0]["probabilities"]} == set("0123456789")
    assert sum(answers[0]["probabilities"].values()) == pytest.approx(1, abs=1e-5)
    square = [[row[8 * k : 8 * k + 8] for k in range(8)] for row in x]
    assert predicted(service, {"rows": square})["predictions"] == answers
    assert service.describe()["shape"] == (1, 8, 8)


def test_health_and_description(server: Server) -> None:
    nothing_waits = {"requests": 0, "rows": 0, "seconds": 0}
    assert ask(server, "GET", "/healthz")[:2] == (200, {"status": "ok", "waiting": nothing_waits})
    status, found, _ = ask(server, "GET", "/")
    assert status == 200
    assert found["columns"] == ["height", "color"]
    assert found["classes"] == ["no", "yes"]
    assert (found["task"], found["target"], found["max_rows"]) == ("classification", "y", 50)
    status, found, headers = ask(server, "HEAD", "/healthz")
    assert (status, found, int(headers["Content-Length"]) > 15) == (200, None, True)


ROW = {"height": 1.0, "color": "red"}


REFUSED: list[tuple[int, str, str, Any, str]] = [
    (400, "POST", "/predict", b"{", "the body is not valid JSON"),
    (400, "POST", "/predict", b"", "the body is not valid JSON"),
    (400, "POST", "/predict", b"[" * 5000, "the body is not valid JSON"),
    (400, "POST", "/predict", b'{"rows": [{"height": NaN}]}', "use null for a missing value"),
    (400, "POST", "/predict", b'{"rows": [{"height": -Infinity}]}', "use null for a missing value"),
    (
        400,
        "POST",
        "/predict",
        b'{"rows": [{"height": ' + b"1" * 5000 + b"}]}",
        "the body is not valid JSON",
    ),
    (400, "POST", "/predict", b'{"rows": ' + b'[{"a":' * 1500, "the body is not valid JSON"),
    (400, "POST", "/predict", b"\xff\xfe\x00", "the body is not valid JSON"),
    (400, "POST", "/predict", [ROW], "send an object with a list of rows"),
    (400, "POST", "/predict", {"rows": [ROW], "samples": 3}, "not 'samples'"),
    (
        400,
        "POST",
        "/predict",
        {"rows": [ROW], "level": 2},
        "level must be a number between 0 and 1, got 2",
    ),
    (404, "GET", "/nothing", None, "there is no GET /nothing; there are POST /predict"),
    (405, "GET", "/predict", None, "there is no GET /predict; there are POST /predict"),
    (405, "DELETE", "/", None, "there is no DELETE /; there are POST /predict, GET /"),
    (413, "POST", "/predict", {"rows": [ROW] * 51}, "51 rows are more than 50"),
    (413, "POST", "/predict", b" " * 10_001, "10,001 bytes are more than 10,000"),
    (422, "POST", "/predict", {"rows": []}, "there are no rows"),
    (422, "POST", "/predict", {"rows": [{}]}, "each needs 'height', 'color' by name"),
    (422, "POST", "/predict", {"rows": [ROW, 3]}, "row 2 is not an object"),
    (
        422,
        "POST",
        "/predict",
        {"rows": [{"heigth": 1, "color": "red"}]},
        "row 1 has 'heigth', which is not a column of this run .did you mean 'height'",
    ),
    (
        422,
        "POST",
        "/predict",
        {"rows": [{"height": [1], "color": "red"}]},
        "'height' of row 1 is neither a number",
    ),
    (422, "POST", "/predict", {"rows": [{"color": "red"}]}, "no column 'height'"),
    (
        422,
        "POST",
        "/predict",
        b'{"rows": [{"height": 1e999, "color": "red"}]}',
        "too large for a number: Infinity",
    ),
    (
        422,
        "POST",
        "/predict",
        b'{"rows": [{"height": 1%s}]}' % (b"0" * 400),
        "too large for a number: 1000",
    ),
    (
        422,
        "POST",
        "/predict",
        b'{"rows": [{"height": %s}]}' % (b"[" * 400 + b"]" * 400),
        "is neither a number nor a string",
    ),
    (422, "POST", "/predict", {"rows": [[1, "red"]]}, "numbers only, and as many in each"),
    (422, "POST", "/predict", b'{"rows": [[1e999, 1]]}', "finite numbers"),
    (422, "POST", "/predict", b'{"rows": [[%s, 1]]}' % (b"9" * 400), "numbers only"),
]


def test_an_invalid_request_has_a_status_and_an_error_message(server: Server) -> None:
    for status, method, path, body, words in REFUSED:
        got, found, headers = ask(server, method, path, body)
        assert (got, [*found]) == (status, ["error"]), words
        assert re.search(words, found["error"]), found
        assert ("Allow" in headers) == (status == 405)
    for kind in (
        "text/plain",
        "application/x-www-form-urlencoded",
        "multipart/form-data; boundary=x",
    ):
        status, found, _ = ask(server, "POST", "/predict", {"rows": [ROW]}, Content_Type=kind)
        assert (status, "Content-Type: application/json" in found["error"]) == (415, True)
    assert (
        ask(
            server,
            "POST",
            "/predict",
            {"rows": [ROW]},
            Content_Type="application/json; charset=utf-8",
        )[0]
        == 200
    )
    assert ask(server, "GET", "/healthz")[0] == 200


HEAD = b"POST /predict HTTP/1.1\r\nHost: localhost\r\n"
BODY = json.dumps({"rows": [ROW]}).encode()
LENGTH = b"Content-Length: %d\r\n" % len(BODY)
CLOSE = b"Connection: close\r\n\r\n"

SMUGGLED = {
    "two lengths": HEAD + LENGTH + b"Content-Length: 5\r\n" + CLOSE + BODY,
    "the same length twice": HEAD + LENGTH + LENGTH + CLOSE + BODY,
    "a list of lengths": HEAD + b"Content-Length: 5, 5\r\n" + CLOSE + BODY,
    "a length and chunks": HEAD + LENGTH + b"Transfer-Encoding: chunked\r\n" + CLOSE + b"0\r\n\r\n",
    "another coding": HEAD + b"Transfer-Encoding: xchunked\r\n" + CLOSE + b"0\r\n\r\n",
    "a space before the colon": HEAD + LENGTH.replace(b":", b" :") + CLOSE + BODY,
    "a signed length": HEAD + LENGTH.replace(b": ", b": +") + CLOSE + BODY,
    "a folded line": HEAD + b"X: a\r\n b\r\n" + LENGTH + CLOSE + BODY,
    "a head without end": HEAD + b"X: " + b"a" * 2**20,
    "100 KB of headers at once": HEAD + b"X: %b\r\n" % (b"a" * 1000) * 100 + LENGTH + CLOSE + BODY,
}


def test_a_minimal_http_request_is_answered(server: Server) -> None:
    assert send(server, HEAD + LENGTH + CLOSE + BODY)[0] == 200
    chunks = (
        b"Transfer-Encoding: chunked\r\n" + CLOSE + b"%x\r\n%b\r\n0\r\n\r\n" % (len(BODY), BODY)
    )
    assert send(server, HEAD + chunks)[0] == 200


@pytest.mark.parametrize("name", SMUGGLED)
def test_ambiguous_heads_are_refused(name: str, server: Server) -> None:
    start = time.perf_counter()
    with socket.create_connection(server.address, timeout=10) as connection:
        with suppress(OSError):  # refused before all was sent
            connection.sendall(SMUGGLED[name])
        assert connection.recv(2**16).startswith(b"HTTP/1.1 400 ")
    assert time.perf_counter() - start < 1


def test_rows_with_keys_of_their_own_cost_no_more_than_their_bytes(classes: Path) -> None:
    """2,000 rows of 20 distinct keys would be 80 million cells."""
    rows = [{f"k{n}_{k}": 1 for k in range(20)} for n in range(2000)]
    with serving(Service.of(classes)) as server:
        start = time.perf_counter()
        status, found, _ = ask(server, "POST", "/predict", {"rows": rows})
        assert (status, time.perf_counter() - start < 1) == (422, True)
    assert (
        "row 1 has 'k0_0', which is not a column of this run; a row has 'height', 'color'"
        in found["error"]
    )


def test_rows_times_columns_are_limited(classes: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(services, "MAX_CELLS", 100)
    service = Service.of(classes)
    with pytest.raises(Refused, match="cells, more than 100") as found:
        predicted(service, {"rows": [{}] * 50})
    assert found.value.status == 413


def test_nesting_of_any_depth_is_refused(classes: Path) -> None:
    """Also near the limit of Python, where what can be read cannot be written."""
    service = Service.of(classes)
    for depth in (*range(900, 1010), 20_000):
        with pytest.raises(Refused):
            service.answer(b'{"rows": [{"height": ' + b"[" * depth + b"]" * depth + b"}]}")


def test_slow_clients_are_disconnected_while_others_are_answered(server: Server) -> None:
    """Heads and bodies that come byte by byte, connections without a byte, bodies that end
    early.
    """
    starts = (HEAD, b"", HEAD + LENGTH + b"\r\n{", b"POST")
    with ExitStack() as stack:
        slow = [
            stack.enter_context(socket.create_connection(server.address, timeout=10))
            for _ in range(300)
        ]
        start = time.perf_counter()
        for n, one in enumerate(slow):
            one.sendall(starts[n % 4])
        status, _, _ = ask(server, "POST", "/predict", {"rows": [ROW]})
        assert (status, time.perf_counter() - start < 1) == (200, True)
        time.sleep(0.2)
        for n, one in enumerate(slow):
            with suppress(OSError):
                one.sendall(b"XPX "[n % 4 : n % 4 + 1])
        time.sleep(0.2)
        found = set()
        for n, one in enumerate(slow):
            try:
                found.add((n % 4, one.recv(2**12)[:12]))
            except ConnectionError:
                found.add((n % 4, b""))
        assert found == {(0, b""), (1, b""), (2, b"HTTP/1.1 408"), (3, b"")}
        assert time.perf_counter() - start < 4


def test_a_response_that_is_not_read_closes_the_connection(classes: Path) -> None:
    rows = json.dumps({"rows": [ROW] * 10_000}).encode()
    with (
        serving(Service.of(classes), limits=Limits(read_timeout=0.2)) as server,
        socket.socket() as connection,
    ):
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect(server.address)
        connection.sendall(HEAD + b"Content-Length: %d\r\n\r\n" % len(rows) + rows)
        connections = server._uvicorn.server_state.connections
        deadline = time.perf_counter() + 20
        while len(connections) == 0 or any(one.cycle is None for one in connections):
            assert time.perf_counter() < deadline
            time.sleep(0.01)
        while connections:
            assert time.perf_counter() < deadline
            time.sleep(0.01)


@contextmanager
def blocked(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Computations that last until the event is set."""
    go, whole = threading.Event(), Service._predictions
    monkeypatch.setattr(Service, "_predictions", lambda *given: go.wait(20) and whole(*given))
    try:
        yield go
    finally:
        go.set()


def test_504_after_the_timeout_and_503_of_the_health_check(
    classes: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batching, "STALL_SECONDS", 0.1)
    service = Service.of(classes)
    with serving(service, limits=Limits(timeout=0.4)) as server, blocked(monkeypatch) as go:
        status, found, _ = ask(server, "POST", "/predict", {"rows": [ROW]})
        assert (status, "no answer within 0.4 s" in found["error"]) == (504, True)
        status, found, headers = ask(
            server, "GET", "/healthz"
        )  # nobody waits, but the thread still computes
        assert (status, headers["Retry-After"]) == (503, "1")
        assert "a computation has lasted more than 0.1 s" in found["error"]
        go.set()
        while ask(server, "GET", "/healthz")[0] == 503:
            pass
        assert ask(server, "POST", "/predict", {"rows": [ROW]})[0] == 200


def body_of(count: int) -> bytes:
    return json.dumps({"rows": [ROW] * count}).encode()


def test_rows_that_wait_are_limited_and_health_says_so(
    classes: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        service = replace(Service.of(classes, max_rows=60), batch_rows=16)
        batches = Batches(service, Limits(max_waiting=80))
        with blocked(monkeypatch) as go:
            async with batches.running():
                large = asyncio.create_task(batches.answer(body_of(60)))
                while batches.rows < 60:  # until it was read
                    await asyncio.sleep(0.001)
                health = batches.health()
                assert isinstance(health, Refused)
                assert (health.status, health.headers) == (503, {"Retry-After": "1"})
                assert str(health) == "60 rows wait, the limit is 80 rows; try again in 1 s"
                late = asyncio.create_task(batches.answer(body_of(60)))
                small = asyncio.create_task(batches.answer(BODY))
                go.set()
                refused = await late
                assert isinstance(refused, Refused)
                assert (refused.status, refused.headers) == (503, {"Retry-After": "1"})
                assert str(refused).startswith("45 rows wait before these 60, the limit is 80 rows")
                assert isinstance(
                    await small, bytes
                )  # it does not wait for those of the large request
                assert len(json.loads(await large)["predictions"]) == 60
                assert batches.health()["status"] == "ok"

    asyncio.run(main())


def test_rows_that_would_be_late_are_refused_and_health_says_so(
    classes: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a slow machine, rows far below ``max_waiting`` need more than the timeout."""

    async def main() -> None:
        service = replace(Service.of(classes, max_rows=60), batch_rows=16, seconds_per_row=0.2)
        batches = Batches(service, Limits(timeout=20.0))
        with blocked(monkeypatch) as go:
            async with batches.running():
                large = asyncio.create_task(batches.answer(body_of(60)))
                while batches.rows < 60:  # until it was read
                    await asyncio.sleep(0.001)
                assert isinstance(batches.health(), dict)  # nothing was refused
                monkeypatch.setattr(batches, "_measure", lambda rows, seconds: None, raising=False)
                late = asyncio.create_task(batches.answer(body_of(60)))
                small = asyncio.create_task(batches.answer(BODY))
                await asyncio.sleep(0)
                go.set()
                refused = await late
                assert isinstance(refused, Refused)
                assert (refused.status, refused.headers) == (503, {"Retry-After": "9"})
                assert (
                    "45 rows wait before these 60, which would be computed after the 20 s"
                    in str(refused)
                )
                health = batches.health()
                assert isinstance(health, Refused)
                assert "60 more would have no answer in time" in str(health)
                assert isinstance(await small, bytes)
                assert len(json.loads(await large)["predictions"]) == 60
                assert batches.health()["status"] == "ok"

    asyncio.run(main())


def test_the_time_of_a_row_is_that_of_full_batches(classes: Path) -> None:
    batches = Batches(replace(Service.of(classes), batch_rows=16, seconds_per_row=0.1), Limits())
    batches._measure(1, 60.0)  # most of it for the call
    assert batches.seconds_per_row == 0.1
    batches._measure(16, 16 * 0.5)
    assert batches.seconds_per_row == pytest.approx(0.2)


def test_a_small_request_is_answered_before_large_ones_that_came_first(
    classes: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    finished: list[str] = []

    async def main() -> None:
        batches = Batches(replace(Service.of(classes), batch_rows=16), Limits())

        async def ask_for(name: str, count: int) -> Any:
            answer = await batches.answer(body_of(count))
            finished.append(name)
            return json.loads(answer)["predictions"]

        with blocked(monkeypatch) as go:
            async with batches.running():
                large = [asyncio.create_task(ask_for("large", 400)) for _ in range(5)]
                while batches.rows < 400:
                    await asyncio.sleep(0.001)
                waiting = batches.health()["waiting"]
                assert (waiting["requests"], waiting["rows"] >= 400) == (5, True)
                small = asyncio.create_task(ask_for("small", 1))
                await asyncio.sleep(0)
                go.set()
                alone = await small
                rows = [await one for one in large]
                assert [len(one) for one in rows] == [400] * 5
                assert rows[0][-1]["probability"] == pytest.approx(
                    alone[0]["probability"], rel=1e-5
                )

    asyncio.run(main())
    assert finished[0] == "small"


def test_small_requests_do_not_starve_a_large_one(
    classes: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The stream of small requests never ends, and fills every batch."""

    async def main() -> None:
        batches = Batches(replace(Service.of(classes), batch_rows=8), Limits(timeout=10.0))

        async def ask_forever() -> None:
            while True:
                await batches.answer(BODY)

        async with batches.running():
            stream = [asyncio.create_task(ask_forever()) for _ in range(24)]
            answer = await batches.answer(body_of(40))
            assert isinstance(answer, bytes), answer
            for one in stream:
                one.cancel()

    asyncio.run(main())


def test_a_batch_has_fewer_rows_if_each_takes_longer(
    classes: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fast = Service.of(classes)
    assert 16 <= fast.batch_rows <= predictions.ROWS_PER_BATCH
    whole = Service._predictions

    def slow(self: Service, x: torch.Tensor, level: float) -> Any:
        time.sleep(0.002 * len(x))
        return whole(self, x, level)

    monkeypatch.setattr(Service, "_predictions", slow)
    found = Service.of(classes)
    assert found.batch_rows < fast.batch_rows
    assert found.seconds_per_row > 0.002


@pytest.mark.parametrize("task", ["classes", "numbers"])
def test_requests_that_wait_are_computed_together_with_the_answers_of_each_alone(
    task: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    service = Service.of(request.getfixturevalue(task))
    levels = (0.5, 0.9)
    requests = [{"rows": [row], "level": levels[n % 2]} for n, row in enumerate(rows(12))]
    requests[3] = {"rows": [{"height": 1.0, "color": "mauve"}]}  # with a note of its own
    bodies = [json.dumps(one).encode() for one in requests]
    sizes: list[int] = []
    predict_next = Service.predict_next

    def counted(self: Service, requests: list[Request]) -> None:
        sizes.append(len(requests))
        predict_next(self, requests)

    monkeypatch.setattr(Service, "predict_next", counted)

    async def main() -> list[bytes | Refused]:
        batches = Batches(service, Limits())
        async with batches.running():
            return await asyncio.gather(*map(batches.answer, [*bodies, b"{"]))

    *found, bad = asyncio.run(main())
    assert max(sizes) >= len(bodies)
    assert isinstance(bad, Refused)
    for one, body in zip(found, requests, strict=True):
        assert isinstance(one, bytes)
        alone, together = predicted(service, body), json.loads(one)
        assert together["notes"] == alone["notes"]
        for a, b in zip(together["predictions"], alone["predictions"], strict=True):
            assert {*a} == {*b}
            for name in a:
                assert a[name] == (
                    b[name]
                    if isinstance(b[name], str)
                    else pytest.approx(b[name], rel=1e-4, abs=1e-5)
                )
    assert "mauve" in json.loads(found[3])["notes"][0]


def test_a_single_request_does_not_wait(classes: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batching, "GATHER_SECONDS", 0.5)

    async def main() -> float:
        batches = Batches(Service.of(classes), Limits())
        async with batches.running():
            await asyncio.gather(
                *(batches.answer(BODY) for _ in range(4))
            )  # a batch, after which one may wait
            await batches.answer(BODY)
            await asyncio.sleep(0.6)
            start = time.perf_counter()
            await batches.answer(BODY)
            return time.perf_counter() - start

    assert asyncio.run(main()) < 0.4


def test_an_invalid_request_does_not_fail_its_batch(
    classes: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    service, whole = Service.of(classes), Service._predictions

    def fails_beyond_one(self: Service, x: torch.Tensor, level: float) -> Any:
        if len(x) > 1:
            raise RuntimeError("too many rows")
        return whole(self, x, level)

    monkeypatch.setattr(Service, "_predictions", fails_beyond_one)
    requests = [Request(BODY), Request(body_of(3)), Request(BODY)]
    for request in requests:
        service.read(request)
    service.predict_next(requests)
    one, many, other = requests
    assert isinstance(many.error, RuntimeError)
    assert one.response() == other.response()
    assert json.loads(one.response())["predictions"]


def test_dependent_rows_are_computed_separately(
    classes: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert Service.of(classes).together
    whole = Service._predict

    def mixed(self: Service, x: torch.Tensor) -> Any:
        found = whole(self, x)
        return bayou.Predictive(
            found.likelihood, found.outputs - found.outputs.mean(1, keepdim=True)
        )

    monkeypatch.setattr(Service, "_predict", mixed)
    assert not Service.of(classes).together


def test_a_missing_extra_says_how_to_install_it(
    classes: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from typer.testing import CliRunner

    from bayou.app.cli.app import app

    monkeypatch.setitem(sys.modules, "uvicorn", None)
    monkeypatch.delitem(sys.modules, "bayou.app.runs.serve")
    found = CliRunner().invoke(app, ["serve", str(classes)])
    assert found.exit_code == 2
    assert (
        "bayou serve needs uvicorn, which is not installed: pip install 'bayou[serve]'"
        in found.output
    )


BAD = (
    b"[" * 9000,
    b"1" * 9000,
    b'{"rows": [%s' % (b" " * 9000),
    b'{"rows": [{"other": "%s"}]}' % (b"a" * 9000),
)


@contextmanager
def traced() -> Iterator[None]:
    tracemalloc.start()
    try:
        yield
    finally:
        tracemalloc.stop()


def test_memory_is_constant_over_invalid_requests(server: Server) -> None:
    """10,000 of them are in experiments/results."""
    bad = [HEAD + b"Content-Length: %d\r\n" % len(body) + CLOSE + body for body in BAD] + [
        *SMUGGLED.values()
    ][:4]

    def several(count: int) -> int:
        for n in range(count):
            assert 400 <= send(server, bad[n % len(bad)])[0] < 500
        gc.collect()
        return tracemalloc.get_traced_memory()[0]

    with traced():
        several(24)
        before = several(24)
        assert several(80) - before < 80 * 500


def test_errors_keep_no_bodies(classes: Path) -> None:
    """Not even until the next collection of cycles, which may be long after."""
    service = Service.of(classes)
    gc.collect()
    gc.disable()
    try:
        with traced():
            for _ in range(100):
                for body in BAD:
                    request = Request(body)
                    service.read(request)
                    assert isinstance(request.error, Refused)
            assert tracemalloc.get_traced_memory()[0] < 100 * 1000
    finally:
        gc.enable()


def test_an_internal_error_is_a_500_and_the_server_continues(
    server: Server, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(Service, "_predictions", lambda *given: 1 / 0)
        status, found, _ = ask(server, "POST", "/predict", {"rows": [ROW]})
    assert status == 500
    assert "ZeroDivisionError" not in found["error"]
    assert "ZeroDivisionError" in capsys.readouterr().err
    assert ask(server, "POST", "/predict", {"rows": [ROW]})[0] == 200


def test_one_connection_many_requests_and_many_connections(server: Server) -> None:
    """Threads get what one alone gets; a refusal leaves the connection as it was."""
    host, port = server.address
    connection, found = http.client.HTTPConnection(host, port, timeout=30), []
    for method, path, body in (("POST", "/predict", {"rows": [ROW]}), ("PUT", "/", ROW)) * 2:
        connection.request(method, path, json.dumps(body))
        answer = connection.getresponse()
        found.append((answer.status, json.loads(answer.read())))
    connection.close()
    assert [status for status, _ in found] == [200, 405, 200, 405]
    assert found[0] == found[2]
    with ThreadPoolExecutor(8) as pool:
        several = list(
            pool.map(lambda _: ask(server, "POST", "/predict", {"rows": [ROW]})[1], range(16))
        )
    assert all(one == found[0][1] for one in several)


def test_invalid_options_of_the_server_are_errors(classes: Path, server: Server) -> None:
    for options, words in (
        ({"level": 1.0}, "level"),
        ({"samples": 0}, "samples"),
        ({"max_rows": 0}, "max_rows"),
        ({"method": "mnf"}, "mnf"),
    ):
        with pytest.raises(ValueError, match=words):
            Service.of(classes, **options)
    for name, value in (
        ("max_waiting", 0),
        ("timeout", 0.0),
        ("max_bytes", 0),
        ("read_timeout", float("nan")),
    ):
        with pytest.raises(RunError, match=f"{name} must be a finite number"):
            Limits(**{name: value})
    port = server.address[1]
    for other in (port, 99_999):
        with pytest.raises(
            RunError, match=rf"cannot listen at 127\.0\.0\.1:{other}.*another --host or --port"
        ):
            Server(Service.of(classes), port=other, quiet=True)


@pytest.mark.parametrize("name", ["SIGINT", pytest.param("SIGTERM", marks=pytest.mark.slow)])
def test_the_command_serves_until_a_signal(name: str, classes: Path) -> None:
    command = [sys.executable, "-m", "bayou", "serve", str(classes), "--port", "0"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ
    ) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            found = re.search(r"serving run/map-0 at http://127\.0\.0\.1:(\d+)", line)
            assert found, line
            connection = http.client.HTTPConnection("127.0.0.1", int(found[1]), timeout=30)
            connection.request("POST", "/predict", json.dumps({"rows": [ROW]}))
            (one,) = json.loads(connection.getresponse().read())["predictions"]
            assert one["class"] in ("yes", "no")
            process.send_signal(getattr(signal, name))  # with the connection still open
            assert process.wait(60) == 0
            assert process.stderr is not None
            assert process.stderr.read().splitlines()[-1] == "stopped"
            connection.close()
        finally:
            process.kill()
