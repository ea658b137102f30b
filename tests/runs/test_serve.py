"""A run over HTTP, by a real socket: what it answers is what ``bayou predict`` writes, and what it refuses, and how."""

from __future__ import annotations

import csv
import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import bayou
from bayou.data.preprocess import ImagePreprocessor
from bayou.runs import use
from bayou.runs.config import Config
from bayou.runs.folder import Run, RunError
from bayou.runs.serve import Server, Service

HEADER = ["name", "height", "colour"]


def rows(count: int) -> list[dict[str, Any]]:
    x = torch.randn(count, 2, generator=torch.Generator().manual_seed(0)).tolist()
    return [
        {"name": f"n{i}", "height": round(a, 4), "colour": "red" if b > 0 else "blue"} for i, (a, b) in enumerate(x)
    ]


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
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


@pytest.fixture(scope="module")
def server(classes: Path) -> Iterator[Server]:
    with serving(Service.of(classes, max_rows=50), max_bytes=10_000) as found:
        yield found


def ask(server: Server, method: str, path: str, body: Any = None, **headers: str) -> tuple[int, Any, Any]:
    connection = http.client.HTTPConnection(*server.server_address[:2], timeout=30)
    try:
        data = body if isinstance(body, bytes | None) else json.dumps(body).encode()
        connection.request(method, path, data, headers)
        answer = connection.getresponse()
        return answer.status, json.loads(answer.read() or b"null"), answer.headers
    finally:
        connection.close()


@pytest.mark.parametrize("task", ["classes", "numbers"])
def test_it_answers_what_predict_writes(task: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    folder = request.getfixturevalue(task)
    new = [*rows(5), {"name": "far", "height": 50.0, "colour": None}]
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


def test_images_and_lists_of_numbers() -> None:
    x = [[float((i * k) % 17) for k in range(64)] for i in range(3)]
    net, classes = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10)), [str(k) for k in range(10)]
    posterior = bayou.fit(net, (torch.tensor(x), torch.arange(3)), method=bayou.MAP(steps=2), progress=False)
    images = ImagePreprocessor.fit(np.array(x).reshape(3, 1, 8, 8), classes, white=16.0)
    service = Service(posterior, images, "digits", 1)
    answers = service.predict({"rows": x})["predictions"]
    assert len(answers) == 3
    assert {*answers[0]["probabilities"]} == set("0123456789")
    assert sum(answers[0]["probabilities"].values()) == pytest.approx(1, abs=1e-5)
    square = [[row[8 * k : 8 * k + 8] for k in range(8)] for row in x]
    assert service.predict({"rows": square})["predictions"] == answers
    assert service.describe()["shape"] == (1, 8, 8)


def test_health_and_what_to_send(server: Server) -> None:
    assert ask(server, "GET", "/healthz")[:2] == (200, {"status": "ok"})
    status, found, _ = ask(server, "GET", "/")
    assert status == 200
    assert found["columns"] == ["height", "colour"]
    assert found["classes"] == ["no", "yes"]
    assert (found["task"], found["target"], found["max_rows"]) == ("classification", "y", 50)
    status, found, headers = ask(server, "HEAD", "/healthz")
    assert (status, found, headers["Content-Length"]) == (200, None, "16")


ROW = {"height": 1.0, "colour": "red"}


REFUSED: list[tuple[int, str, str, Any, str]] = [
    (400, "POST", "/predict", b"{", "the body is no JSON"),
    (400, "POST", "/predict", b"", "the body is no JSON"),
    (400, "POST", "/predict", b"[" * 5000, "the body is no JSON"),
    (400, "POST", "/predict", b'{"rows": [{"height": NaN}]}', "a missing value is null"),
    (400, "POST", "/predict", [ROW], "send an object with a list of rows"),
    (400, "POST", "/predict", {"rows": [ROW], "samples": 3}, "not 'samples'"),
    (400, "POST", "/predict", {"rows": [ROW], "level": 2}, "level must be a number between 0 and 1, got 2"),
    (404, "GET", "/nothing", None, "there is no /nothing; there are /predict"),
    (405, "GET", "/predict", None, "/predict takes POST, not GET"),
    (405, "DELETE", "/", None, "/ takes GET, HEAD, not DELETE"),
    (413, "POST", "/predict", {"rows": [ROW] * 51}, "51 rows are more than 50"),
    (413, "POST", "/predict", b" " * 10_001, "10,001 bytes are more than 10,000"),
    (422, "POST", "/predict", {"rows": []}, "there are no rows"),
    (422, "POST", "/predict", {"rows": [{}]}, "each needs 'height', 'colour' by name"),
    (422, "POST", "/predict", {"rows": [ROW, 3]}, "row 2 is no object"),
    (422, "POST", "/predict", {"rows": [{"heigth": 1, "colour": "red"}]}, "no column 'height'.*'heigth'"),
    (422, "POST", "/predict", {"rows": [{"height": [1], "colour": "red"}]}, "'height' of row 1 is no number"),
    (422, "POST", "/predict", {"rows": [[1, "red"]]}, "numbers only, and as many in each"),
    (501, "BREW", "/predict", None, "BREW"),
]


def test_what_is_refused_gets_a_status_and_a_sentence(server: Server) -> None:
    for status, method, path, body, words in REFUSED:
        got, found, headers = ask(server, method, path, body)
        assert (got, [*found]) == (status, ["error"]), words
        assert re.search(words, found["error"]), found
        assert ("Allow" in headers) == (status == 405)
    assert ask(server, "GET", "/healthz")[0] == 200


def test_bad_lengths_and_clients_that_go(server: Server) -> None:
    assert ask(server, "POST", "/predict", b"{}", **{"Content-Length": "ten"})[0] == 400
    assert ask(server, "POST", "/predict", None, **{"Transfer-Encoding": "chunked"})[0] == 411
    with socket.create_connection(server.server_address[:2]) as gone:
        gone.sendall(b"POST /predict HTTP/1.1\r\nContent-Length: 100\r\n\r\n{")
    assert ask(server, "GET", "/healthz")[0] == 200


def test_a_defect_is_a_500_and_the_server_goes_on(
    server: Server, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(Service, "predict", lambda *given: 1 / 0)
        status, found, _ = ask(server, "POST", "/predict", {"rows": [ROW]})
    assert status == 500
    assert "ZeroDivisionError" not in found["error"]
    assert "ZeroDivisionError" in capsys.readouterr().err
    assert ask(server, "POST", "/predict", {"rows": [ROW]})[0] == 200


def test_one_connection_many_requests_and_many_connections(server: Server) -> None:
    """Threads get what one alone gets; a refusal leaves the connection as it was."""
    host, port = server.server_address[:2]
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


def test_mistakes_of_whoever_starts_it(classes: Path, server: Server) -> None:
    for options, words in (
        ({"level": 1.0}, "level"),
        ({"samples": 0}, "samples"),
        ({"max_rows": 0}, "max_rows"),
        ({"method": "mnf"}, "mnf"),
    ):
        with pytest.raises(RunError, match=words):
            Service.of(classes, **options)
    port = int(server.server_address[1])
    for other in (port, 99_999):
        with pytest.raises(RunError, match=rf"cannot listen at 127\.0\.0\.1:{other}.*another --host or --port"):
            Server(server.service, port=other)


@pytest.mark.parametrize("name", ["SIGINT", pytest.param("SIGTERM", marks=pytest.mark.slow)])
def test_the_command_answers_until_it_is_told_to_end(name: str, classes: Path) -> None:
    command = [sys.executable, "-m", "bayou", "serve", str(classes), "--port", "0"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ
    ) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            found = re.search(r"run/map-0 answers at http://127\.0\.0\.1:(\d+)", line)
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
