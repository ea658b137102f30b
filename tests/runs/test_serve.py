"""A run over HTTP, by a real socket: what it answers is what ``bayou predict`` writes, and what it refuses, and how."""

from __future__ import annotations

import asyncio
import csv
import gc
import http.client
import json
import math
import os
import re
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
import tracemalloc
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import bayou
from bayou.data.preprocess import ImagePreprocessor
from bayou.runs import batches as batching, service as services, use
from bayou.runs.batches import Batches, Limits
from bayou.runs.config import Config
from bayou.runs.folder import Run, RunError
from bayou.runs.serve import Server, read_token
from bayou.runs.service import Refused, Service

# Of localhost, self-signed for these tests: openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1
# -nodes -days 36500 -subj /CN=localhost -addext subjectAltName=DNS:localhost,IP:127.0.0.1
KEY = """-----BEGIN PRIVATE KEY-----
MIGHAgEAMBMGByqGSM49AgEGCCqGSM49AwEHBG0wawIBAQQgRr8oyM4V1hL61Mi9
GlWqb85cye4MfbN9e3op41z3faKhRANCAATUTGSdHHfnN7HQkEXZamMvQkqkurif
jt1KJP8jG7ma3hE8m/Wz/iXAgNEqjdz8zR6XuxVSU1v8smCmee4pexnJ
-----END PRIVATE KEY-----
"""
CERTIFICATE = """-----BEGIN CERTIFICATE-----
MIIBmzCCAUGgAwIBAgIUQm77VBWZanVa4gECRe1KG/UpqTswCgYIKoZIzj0EAwIw
FDESMBAGA1UEAwwJbG9jYWxob3N0MCAXDTI2MTExNjIxNTg0NVoYDzIxMjYxMDIz
MjE1ODQ1WjAUMRIwEAYDVQQDDAlsb2NhbGhvc3QwWTATBgcqhkjOPQIBBggqhkjO
PQMBBwNCAATUTGSdHHfnN7HQkEXZamMvQkqkurifjt1KJP8jG7ma3hE8m/Wz/iXA
gNEqjdz8zR6XuxVSU1v8smCmee4pexnJo28wbTAdBgNVHQ4EFgQUoSAjsShXr46W
ZTIeQUbng3+lP4MwHwYDVR0jBBgwFoAUoSAjsShXr46WZTIeQUbng3+lP4MwDwYD
VR0TAQH/BAUwAwEB/zAaBgNVHREEEzARgglsb2NhbGhvc3SHBH8AAAEwCgYIKoZI
zj0EAwIDSAAwRQIhAM+UwX33a1aaBjd02V4nFhMcwGudCnsXbHVxp9+Ke/dYAiAj
G/fo8kxMIk51Ij/A3tkfqNM3iBvlDgKmC4qIRMfHfg==
-----END CERTIFICATE-----
"""

HEADER = ["name", "height", "color"]


def rows(count: int) -> list[dict[str, Any]]:
    x = torch.randn(count, 2, generator=torch.Generator().manual_seed(0)).tolist()
    return [{"name": f"n{i}", "height": round(a, 4), "color": "red" if b > 0 else "blue"} for i, (a, b) in enumerate(x)]


def made(folder: Path, task: str) -> Path:
    """A run on a table."""
    target = {"classes": lambda row: "yes" if row["height"] > 0 else "no", "numbers": lambda row: 1e3 + row["height"]}
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


LIMITS = Limits(max_bytes=10_000, read_timeout=0.4, timeout=5.0, slots=2)


@pytest.fixture(scope="module")
def server(classes: Path) -> Iterator[Server]:
    with serving(Service.of(classes, max_rows=50), limits=LIMITS) as found:
        yield found


def ask(server: Server, method: str, path: str, body: Any = None, **headers: str) -> tuple[int, Any, Any]:
    connection = http.client.HTTPConnection(*server.address, timeout=30)
    try:
        data = body if isinstance(body, bytes | None) else json.dumps(body).encode()
        connection.request(method, path, data, {name.replace("_", "-"): value for name, value in headers.items()})
        answer = connection.getresponse()
        return answer.status, json.loads(answer.read() or b"null"), answer.headers
    finally:
        connection.close()


def send(server: Server, data: bytes) -> tuple[int, bytes]:
    """The status of the answer to these bytes, and all of it; -1 where the connection is closed without one."""
    with socket.create_connection(server.address, timeout=10) as connection:
        connection.sendall(data)
        found = b""
        while more := connection.recv(2**16):
            found += more
    return int(found.split()[1]) if found else -1, found


@pytest.mark.parametrize("task", ["classes", "numbers"])
def test_responses_equal_the_file_of_predict(task: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    folder = request.getfixturevalue(task)
    new = [*rows(5), {"name": "far", "height": 50.0, "color": None}]
    with open(tmp_path / "new.csv", "w", newline="") as stream:
        writer = csv.DictWriter(stream, HEADER)
        writer.writeheader()
        writer.writerows(new)
    use.predict(folder, tmp_path / "new.csv", tmp_path / "out.csv", level=0.8)
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
                assert value == pytest.approx(float(line[name]), rel=1e-3 if name == "distance" else 1e-6, abs=1e-6)
    assert answer["predictions"][-1]["distance"] > 1


def predicted(service: Service, request: Any) -> Any:
    """The answer to one request."""
    (found,) = service.answers([json.dumps(request).encode()])
    assert isinstance(found, bytes)
    return json.loads(found)


def test_images_and_lists_of_numbers() -> None:
    x = [[float((i * k) % 17) for k in range(64)] for i in range(3)]
    net, classes = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10)), [str(k) for k in range(10)]
    posterior = bayou.fit(net, (torch.tensor(x), torch.arange(3)), method=bayou.MAP(steps=2), progress=False)
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
    assert ask(server, "GET", "/healthz")[:2] == (200, {"status": "ok"})
    status, found, _ = ask(server, "GET", "/")
    assert status == 200
    assert found["columns"] == ["height", "color"]
    assert found["classes"] == ["no", "yes"]
    assert (found["task"], found["target"], found["max_rows"]) == ("classification", "y", 50)
    status, found, headers = ask(server, "HEAD", "/healthz")
    assert (status, found, headers["Content-Length"]) == (200, None, "15")


ROW = {"height": 1.0, "color": "red"}


REFUSED: list[tuple[int, str, str, Any, str]] = [
    (400, "POST", "/predict", b"{", "the body is not valid JSON"),
    (400, "POST", "/predict", b"", "the body is not valid JSON"),
    (400, "POST", "/predict", b"[" * 5000, "the body is not valid JSON"),
    (400, "POST", "/predict", b'{"rows": [{"height": NaN}]}', "use null for a missing value"),
    (400, "POST", "/predict", b'{"rows": [{"height": -Infinity}]}', "use null for a missing value"),
    (400, "POST", "/predict", b'{"rows": [{"height": ' + b"1" * 5000 + b"}]}", "the body is not valid JSON"),
    (400, "POST", "/predict", b'{"rows": ' + b'[{"a":' * 1500, "the body is not valid JSON"),
    (400, "POST", "/predict", b"\xff\xfe\x00", "the body is not valid JSON"),
    (400, "POST", "/predict", [ROW], "send an object with a list of rows"),
    (400, "POST", "/predict", {"rows": [ROW], "samples": 3}, "not 'samples'"),
    (400, "POST", "/predict", {"rows": [ROW], "level": 2}, "level must be a number between 0 and 1, got 2"),
    (404, "GET", "/nothing", None, "there is no /nothing; there are /predict"),
    (405, "GET", "/predict", None, "/predict takes POST, not GET"),
    (405, "DELETE", "/", None, "/ takes GET, HEAD, not DELETE"),
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
    (422, "POST", "/predict", {"rows": [{"height": [1], "color": "red"}]}, "'height' of row 1 is neither a number"),
    (422, "POST", "/predict", {"rows": [{"color": "red"}]}, "no column 'height'"),
    (422, "POST", "/predict", b'{"rows": [{"height": 1e999, "color": "red"}]}', "too large for a number: Infinity"),
    (422, "POST", "/predict", b'{"rows": [{"height": 1%s}]}' % (b"0" * 400), "too large for a number: 1000"),
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
    for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x"):
        status, found, _ = ask(server, "POST", "/predict", {"rows": [ROW]}, Content_Type=kind)
        assert (status, "Content-Type: application/json" in found["error"]) == (415, True)
    assert ask(server, "POST", "/predict", {"rows": [ROW]}, Content_Type="application/json; charset=utf-8")[0] == 200
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
    "no host": HEAD.replace(b"Host: localhost\r\n", b"") + LENGTH + CLOSE + BODY,
    "two hosts": HEAD + b"Host: localhost\r\n" + LENGTH + CLOSE + BODY,
    "another host": HEAD.replace(b"localhost", b"example.org") + LENGTH + CLOSE + BODY,
    "a head without end": HEAD + b"X: " + b"a" * 2**20,
}


def test_a_minimal_http_request_is_answered(server: Server) -> None:
    assert send(server, HEAD + LENGTH + CLOSE + BODY)[0] == 200
    chunks = b"Transfer-Encoding: chunked\r\n" + CLOSE + b"%x\r\n%b\r\n0\r\n\r\n" % (len(BODY), BODY)
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
    assert "row 1 has 'k0_0', which is not a column of this run; a row has 'height', 'color'" in found["error"]


def test_rows_times_columns_are_limited(classes: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(services, "MAX_CELLS", 100)
    service = Service.of(classes)
    (found,) = service.answers([json.dumps({"rows": [{}] * 50}).encode()])
    assert isinstance(found, Refused)
    assert found.status == 413
    assert "cells, more than 100" in str(found)


def test_nesting_of_any_depth_is_refused(classes: Path) -> None:
    """Also near the limit of Python, where what can be read cannot be written."""
    service = Service.of(classes)
    for depth in (*range(900, 1010), 20_000):
        (found,) = service.answers([b'{"rows": [{"height": ' + b"[" * depth + b"]" * depth + b"}]}"])
        assert isinstance(found, Refused), depth


def test_slow_clients_are_disconnected_while_others_are_answered(server: Server) -> None:
    """Heads and bodies that come byte by byte, connections without a byte, bodies that end early."""
    starts = (HEAD, b"", HEAD + LENGTH + b"\r\n{", b"POST")
    with ExitStack() as stack:
        slow = [stack.enter_context(socket.create_connection(server.address, timeout=10)) for _ in range(300)]
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
    with serving(Service.of(classes), limits=Limits(read_timeout=0.2)) as server, socket.socket() as connection:
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
    go, whole = threading.Event(), Service._said
    monkeypatch.setattr(Service, "_said", lambda *given: go.wait(20) and whole(*given))
    try:
        yield go
    finally:
        go.set()


def test_503_without_a_free_slot_and_504_after_the_timeout(classes: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bayou.runs.batches.STALLED", 0.1)
    service, limits = Service.of(classes), Limits(slots=1, timeout=0.4, max_waiting=2)
    with serving(service, limits=limits) as server, ThreadPoolExecutor(2) as pool, blocked(monkeypatch) as go:
        late = [pool.submit(ask, server, "POST", "/predict", {"rows": [ROW]}) for _ in range(2)]
        while ask(server, "GET", "/healthz")[0] == 200:
            pass
        status, found, headers = ask(server, "GET", "/healthz")
        assert (status, found, headers["Retry-After"]) == (503, {"error": "no slot is free; try again later"}, "1")
        for one in late:
            status, found, _ = one.result()
            assert status in (503, 504)  # the second one may have come after the slot was taken
        assert ask(server, "GET", "/healthz")[0] == 503  # nobody waits, but the slot still computes
        go.set()
        while ask(server, "GET", "/healthz")[0] == 503:
            pass
        assert ask(server, "POST", "/predict", {"rows": [ROW]})[0] == 200


def test_a_full_queue_is_a_503(classes: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        batches = Batches(Service.of(classes), Limits(slots=1, max_waiting=2))
        with blocked(monkeypatch) as go:
            async with batches.running():
                first = [asyncio.create_task(batches.answer(BODY)) for _ in range(2)]
                await asyncio.sleep(0)
                assert not batches.free
                refused = await batches.answer(BODY)
                assert isinstance(refused, Refused)
                assert refused.status == 503
                go.set()
                assert len({await one for one in first}) == 1
                assert batches.free

    asyncio.run(main())


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
    answers = Service.answers

    def counted(self: Service, bodies: list[bytes], until: float = math.inf) -> Any:
        sizes.append(len(bodies))
        return answers(self, bodies, until)

    monkeypatch.setattr(Service, "answers", counted)

    async def main() -> list[bytes | Refused]:
        batches = Batches(service, Limits(slots=1))
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
                assert a[name] == (b[name] if isinstance(b[name], str) else pytest.approx(b[name], rel=1e-4, abs=1e-5))
    assert "mauve" in json.loads(found[3])["notes"][0]


def test_a_single_request_does_not_wait(classes: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batching, "MAX_WAIT", 0.5)

    async def main() -> float:
        batches = Batches(Service.of(classes), Limits(slots=1))
        async with batches.running():
            await asyncio.gather(*(batches.answer(BODY) for _ in range(4)))  # a batch, after which one may wait
            await batches.answer(BODY)
            await asyncio.sleep(0.6)
            start = time.perf_counter()
            await batches.answer(BODY)
            return time.perf_counter() - start

    assert asyncio.run(main()) < 0.4


def test_an_invalid_request_does_not_fail_its_batch(classes: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    service, whole = Service.of(classes), Service._said

    def fails_beyond_one(self: Service, x: torch.Tensor, level: float) -> Any:
        if len(x) > 1:
            raise RuntimeError("too many rows")
        return whole(self, x, level)

    monkeypatch.setattr(Service, "_said", fails_beyond_one)
    one, many, other = service.answers([BODY, json.dumps({"rows": [ROW] * 3}).encode(), BODY])
    assert isinstance(many, RuntimeError)
    assert one == other
    assert json.loads(one)["predictions"]


def test_dependent_rows_are_computed_separately(classes: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert Service.of(classes).together
    whole = Service._predict

    def mixed(self: Service, x: torch.Tensor) -> Any:
        found = whole(self, x)
        return bayou.Predictive(found.likelihood, found.outputs - found.outputs.mean(1, keepdim=True))

    monkeypatch.setattr(Service, "_predict", mixed)
    assert not Service.of(classes).together


def test_computation_ends_at_its_time_limit(classes: Path) -> None:
    (found,) = Service.of(classes).answers([BODY], time.monotonic() - 1)
    assert isinstance(found, TimeoutError)


def test_a_token_is_required_if_set(classes: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "token").write_text("correct-horse\n")
    token = read_token(tmp_path / "token")
    with serving(Service.of(classes), token=token) as server:
        for given in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "Basic correct-horse"}):
            for path in ("/predict", "/"):
                status, found, headers = ask(server, "POST" if path == "/predict" else "GET", path, **given)
                assert (status, headers["WWW-Authenticate"]) == (401, "Bearer")
                assert "Authorization: Bearer" in found["error"]
        given = {"Authorization": "Bearer correct-horse"}
        assert ask(server, "POST", "/predict", {"rows": [ROW]}, **given)[0] == 200
        assert ask(server, "GET", "/healthz")[0] == 200
    monkeypatch.setenv("BAYOU_TOKEN", "from-the-environment")
    assert read_token() == "from-the-environment"
    for bad in ("", "short", "with a space", "größer-als-ASCII"):
        monkeypatch.setenv("BAYOU_TOKEN", bad)
        with pytest.raises(RunError, match="the token of BAYOU_TOKEN must be 8 ASCII characters or more"):
            read_token()


def test_host_names(classes: Path) -> None:
    with serving(Service.of(classes), allowed_hosts=["models.example"]) as server:
        for host, status in (("models.example", 200), ("MODELS.example:80", 200), ("localhost", 400), ("[::1]:1", 400)):
            assert ask(server, "GET", "/healthz", Host=host)[0] == status


def test_https(classes: Path, tmp_path: Path) -> None:
    (tmp_path / "key.pem").write_text(KEY)
    (tmp_path / "cert.pem").write_text(CERTIFICATE)
    files = {"ssl_keyfile": tmp_path / "key.pem", "ssl_certfile": tmp_path / "cert.pem"}
    with serving(Service.of(classes), **files) as server:
        assert server.url.startswith("https://127.0.0.1:")
        context = ssl.create_default_context(cadata=CERTIFICATE)
        connection = http.client.HTTPSConnection("localhost", server.address[1], timeout=10, context=context)
        connection.request("GET", "/healthz")
        assert connection.getresponse().status == 200
        connection.close()
    with pytest.raises(RunError, match="cannot read the certificate"):
        Server(Service.of(classes), port=0, ssl_certfile=tmp_path / "nothing.pem", quiet=True)


def test_a_missing_extra_says_how_to_install_it(classes: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from typer.testing import CliRunner

    from bayou.cli.app import app

    monkeypatch.setitem(sys.modules, "uvicorn", None)
    monkeypatch.delitem(sys.modules, "bayou.runs.serve")
    found = CliRunner().invoke(app, ["serve", str(classes)])
    assert found.exit_code == 2
    assert "bayou serve needs uvicorn, which is not installed: pip install 'bayou[serve]'" in found.output


BAD = (b"[" * 9000, b"1" * 9000, b'{"rows": [%s' % (b" " * 9000), b'{"rows": [{"other": "%s"}]}' % (b"a" * 9000))


@contextmanager
def traced() -> Iterator[None]:
    tracemalloc.start()
    try:
        yield
    finally:
        tracemalloc.stop()


def test_memory_is_constant_over_invalid_requests(server: Server) -> None:
    """10,000 of them are in benchmarks/results."""
    bad = [HEAD + b"Content-Length: %d\r\n" % len(body) + CLOSE + body for body in BAD] + [*SMUGGLED.values()][:4]

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
                assert all(isinstance(one, Refused) for one in service.answers(BAD))
            assert tracemalloc.get_traced_memory()[0] < 100 * 1000
    finally:
        gc.enable()


def test_an_internal_error_is_a_500_and_the_server_continues(
    server: Server, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(Service, "_said", lambda *given: 1 / 0)
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
        several = list(pool.map(lambda _: ask(server, "POST", "/predict", {"rows": [ROW]})[1], range(16)))
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
    for name, value in (("slots", 0), ("timeout", 0.0), ("max_bytes", 0), ("read_timeout", float("nan"))):
        with pytest.raises(RunError, match=f"{name} must be a finite number"):
            Limits(**{name: value})
    port = server.address[1]
    for other in (port, 99_999):
        with pytest.raises(RunError, match=rf"cannot listen at 127\.0\.0\.1:{other}.*another --host or --port"):
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
