"""A run over HTTP: responses equal the file of ``bayou predict``, and invalid requests have a
status and a message.
"""

import asyncio
import csv
import http.client
import json
import os
import re
import signal
import subprocess
import sys
import threading
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest
import torch

import bayou
from bayou.app.runs.batches import Batches, Limits
from bayou.app.runs.config import Config
from bayou.app.runs.folder import Run, RunError
from bayou.app.runs.predictions import write_predictions
from bayou.app.runs.serve import Server
from bayou.app.runs.service import Refused, Service
from bayou.data.preprocess import ImagePreprocessor

HEADER = ["name", "height", "color"]
ROW = {"height": 1.0, "color": "red"}


def table_rows(count):
    x = torch.randn(count, 2, generator=torch.Generator().manual_seed(0)).tolist()
    return [
        {"name": f"n{i}", "height": round(a, 4), "color": "red" if b > 0 else "blue"}
        for i, (a, b) in enumerate(x)
    ]


def body_of(count):
    return json.dumps({"rows": [ROW] * count}).encode()


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A run on a table of classes, and one of numbers."""
    targets = {
        "classes": lambda row: "yes" if row["height"] > 0 else "no",
        "numbers": lambda row: 1e3 + row["height"],
    }
    folders = {}
    for task, target in targets.items():
        folder = tmp_path_factory.mktemp(task)
        with open(folder / "table.csv", "w", newline="") as stream:
            writer = csv.writer(stream)
            writer.writerow([*HEADER, "y"])
            writer.writerows([*row.values(), target(row)] for row in table_rows(60))
        source = str(folder / "table.csv")
        config = Config(source, ("map",), target="y", id="name", steps=10, samples=4)
        Run.create(folder / "run", config).work()
        folders[task] = folder / "run"
    return folders


@pytest.fixture(scope="module")
def service(runs):
    return Service.of(runs["classes"], max_rows=50)


@contextmanager
def run_server(service, **options):
    with Server(service, port=0, quiet=True, **options) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


@pytest.fixture(scope="module")
def server(service):
    with run_server(service, limits=Limits(max_bytes=10_000, timeout=5.0)) as running:
        yield running


def ask(server, method, path, body=None, **headers):
    connection = http.client.HTTPConnection(*server.address, timeout=30)
    try:
        data = body if isinstance(body, bytes | None) else json.dumps(body).encode()
        names = {name.replace("_", "-"): value for name, value in headers.items()}
        connection.request(method, path, data, names)
        response = connection.getresponse()
        return response.status, json.loads(response.read() or b"null"), response.headers
    finally:
        connection.close()


@pytest.mark.parametrize("task", ["classes", "numbers"])
def test_responses_equal_the_file_of_predict(task, runs, tmp_path):
    new = [*table_rows(5), {"name": "far", "height": 50.0, "color": None}]
    with open(tmp_path / "new.csv", "w", newline="") as stream:
        writer = csv.DictWriter(stream, HEADER)
        writer.writeheader()
        writer.writerows(new)
    write_predictions(runs[task], tmp_path / "new.csv", tmp_path / "out.csv", level=0.8)
    with open(tmp_path / "out.csv", newline="") as stream:
        written = list(csv.DictReader(stream))
    with run_server(Service.of(runs[task])) as server:
        status, answer, headers = ask(server, "POST", "/predict", {"rows": new, "level": 0.8})
    assert status == 200
    assert headers["Content-Type"] == "application/json"
    assert len(answer["predictions"]) == len(new)
    for prediction, line in zip(answer["predictions"], written, strict=True):
        flat = {k: v for k, v in prediction.items() if k not in ("probabilities", "interval")}
        flat |= {f"p({name})": value for name, value in prediction.get("probabilities", {}).items()}
        flat |= dict(zip(("10%", "90%"), prediction.get("interval", ()), strict=False))
        assert {*flat} == {*line} - {"row"}
        for name, value in flat.items():
            if isinstance(value, str):
                assert value == line[name]
            else:
                tolerance = 1e-3 if name == "distance" else 1e-6
                assert value == pytest.approx(float(line[name]), rel=tolerance, abs=1e-6)
    assert answer["predictions"][-1]["distance"] > 1


def test_images_and_lists_of_numbers():
    x = [[float((i * k) % 17) for k in range(64)] for i in range(3)]
    net = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10))
    rows = (torch.tensor(x), torch.arange(3))
    posterior = bayou.fit(net, rows, method=bayou.MAP(steps=2), progress=False)
    images = np.array(x).reshape(3, 1, 8, 8)
    preprocessor = ImagePreprocessor.fit(images, list("0123456789"), white=16.0)
    service = Service(posterior, preprocessor, "digits", 1)

    def predict(rows):
        return json.loads(service.answer(json.dumps({"rows": rows}).encode()))["predictions"]

    answers = predict(x)
    assert len(answers) == 3
    assert {*answers[0]["probabilities"]} == set("0123456789")
    assert sum(answers[0]["probabilities"].values()) == pytest.approx(1, abs=1e-5)
    assert predict(images[:, 0].tolist()) == answers
    assert service.describe()["shape"] == (1, 8, 8)


def test_health_and_description(server):
    status, health, _ = ask(server, "GET", "/healthz")
    assert (status, health) == (200, {"status": "ok", "waiting": {"requests": 0, "rows": 0}})
    status, description, _ = ask(server, "GET", "/")
    assert status == 200
    assert description["columns"] == ["height", "color"]
    assert description["classes"] == ["no", "yes"]
    assert description["task"] == "classification"
    assert (description["target"], description["max_rows"]) == ("y", 50)


def test_metrics_are_text_of_prometheus(runs):
    with run_server(Service.of(runs["classes"])) as server:
        ask(server, "POST", "/predict", {"rows": table_rows(30)})
        ask(server, "POST", "/predict", {"rows": []})
        connection = http.client.HTTPConnection(*server.address, timeout=30)
        connection.request("GET", "/metrics")
        response = connection.getresponse()
        text = response.read().decode()
        connection.close()
    assert response.headers["Content-Type"].startswith("text/plain; version=0.0.4")
    lines = text.splitlines()
    assert 'bayou_requests_total{status="200"} 1' in lines
    assert 'bayou_requests_total{status="422"} 1' in lines
    assert "bayou_watch_rows 30" in lines
    sample = re.compile(r'[a-z_]+(\{([a-z]+="[^"]*",?)*\})? [-+.e0-9]+(inf|nan)?')
    assert all(line.startswith("# ") or sample.fullmatch(line) for line in lines)


@pytest.mark.parametrize(
    ("status", "body", "message"),
    [
        (400, b"{", "the body is not valid JSON"),
        (400, b"[" * 5000, "the body is not valid JSON"),
        (400, b'{"rows": [{"height": NaN}]}', "use null for a missing value"),
        (400, b'{"rows": [{"height": ' + b"1" * 5000 + b"}]}", "the body is not valid JSON"),
        (400, b"\xff\xfe\x00", "the body is not valid JSON"),
        (400, [ROW], "send an object with a list of rows"),
        (400, {"rows": [ROW], "samples": 3}, "not 'samples'"),
        (400, {"rows": [ROW], "level": 2}, "level must be a number between 0 and 1, got 2"),
        (413, {"rows": [ROW] * 51}, "51 rows are more than 50"),
        (413, b" " * 10_001, "more than 10,000 bytes"),
        (422, {"rows": []}, "there are no rows"),
        (422, {"rows": [{}]}, "each needs the columns 'height', 'color'"),
        (422, {"rows": [ROW, 3]}, "row 2 is not an object"),
        (422, {"rows": [{"heigth": 1}]}, "'heigth', which is not a column.*did you mean 'height'"),
        (422, {"rows": [{"height": [1]}]}, "'height' of row 1 is neither a number"),
        (422, {"rows": [{"color": "red"}]}, "no row has 'height'; .* null is a missing value"),
        (422, b'{"rows": [{"height": 1e999}]}', "too large for a number: inf"),
        (422, b'{"rows": [{"height": 1%s}]}' % (b"0" * 400), "too large for a number: 1000"),
        (422, b'{"rows": [{"height": %s}]}' % (b"[" * 400 + b"]" * 400), "neither a number nor"),
        (422, {"rows": [[1, "red"]]}, "numbers only, and as many in each; send rows with text"),
        (422, b'{"rows": [[1e999, 1]]}', "finite numbers"),
    ],
)
def test_invalid_requests_are_refused(server, status, body, message):
    answer_status, answer, _ = ask(server, "POST", "/predict", body)
    assert (answer_status, [*answer]) == (status, ["error"])
    assert re.search(message, answer["error"])


def test_other_routes_and_content_types_are_refused(server):
    for status, method, path in (
        (404, "GET", "/nothing"),
        (405, "GET", "/predict"),
        (405, "DELETE", "/"),
    ):
        answer_status, answer, headers = ask(server, method, path)
        assert answer_status == status
        assert f"there is no {method} {path}; there are POST /predict" in answer["error"]
        assert ("Allow" in headers) == (status == 405)
    status, answer, _ = ask(
        server, "POST", "/predict", {"rows": [ROW]}, Content_Type="multipart/form-data; boundary=x"
    )
    assert (status, "Content-Type: application/json" in answer["error"]) == (415, True)
    with_charset = "application/json; charset=utf-8"
    assert ask(server, "POST", "/predict", {"rows": [ROW]}, Content_Type=with_charset)[0] == 200


@pytest.fixture
def release(monkeypatch):
    """Computations last until this event is set."""
    event = threading.Event()
    compute = Service.predict

    def wait_and_compute(self, queries):
        event.wait(20)
        return compute(self, queries)

    monkeypatch.setattr(Service, "predict", wait_and_compute)
    yield event
    event.set()


def test_late_responses_are_503(service, release):
    with run_server(service, limits=Limits(timeout=0.2)) as server:
        status, answer, _ = ask(server, "POST", "/predict", {"rows": [ROW]})
        assert (status, "no answer within 0.2 s" in answer["error"]) == (503, True)
        release.set()
        assert ask(server, "POST", "/predict", {"rows": [ROW]})[0] == 200


def test_rows_that_wait_are_limited(service, release):
    async def main():
        batches = Batches(service, Limits(max_waiting=80))
        async with batches.running():
            first = asyncio.create_task(batches.answer(body_of(40)))
            while batches.rows < 40:
                await asyncio.sleep(0.001)
            with pytest.raises(Refused, match="40 rows wait before these 50, the limit is 80"):
                await batches.answer(body_of(50))
            with pytest.raises(Refused, match="40 rows wait") as error:
                batches.health()
            assert error.value.status == 503
            small = asyncio.create_task(batches.answer(body_of(1)))
            release.set()
            assert len(json.loads(await first)["predictions"]) == 40
            assert len(json.loads(await small)["predictions"]) == 1
            assert batches.health()["status"] == "ok"

    asyncio.run(main())


def test_small_requests_come_before_large_ones_and_do_not_starve_them(service, release):
    """Every batch that follows has space for one of the large requests, or for the small one."""
    finished = []

    async def ask_for(batches, rows):
        await batches.answer(body_of(rows))
        finished.append(rows)

    async def main():
        batches = Batches(replace(service, max_rows=3000), Limits())
        async with batches.running():
            tasks = []
            for rows in (2000, 2001, 2002, 2003, 1):
                waiting = batches.rows
                tasks.append(asyncio.create_task(ask_for(batches, rows)))
                while batches.rows < waiting + rows:
                    await asyncio.sleep(0.001)
            release.set()
            await asyncio.gather(*tasks)

    asyncio.run(main())
    assert finished[:2] == [2000, 1]
    assert sorted(finished[2:]) == [2001, 2002, 2003]


@pytest.mark.parametrize("task", ["classes", "numbers"])
def test_requests_computed_together_have_the_responses_of_each_alone(task, runs, monkeypatch):
    service = Service.of(runs[task])
    requests = [{"rows": [row], "level": (0.5, 0.9)[n % 2]} for n, row in enumerate(table_rows(12))]
    requests[3] = {"rows": [{"height": 1.0, "color": "mauve"}]}  # with a note of its own
    bodies = [json.dumps(request).encode() for request in requests]
    expected = [json.loads(service.answer(body)) for body in bodies]
    sizes = []
    predict = Service.predict

    def count_and_predict(self, queries):
        sizes.append(len(queries))
        return predict(self, queries)

    monkeypatch.setattr(Service, "predict", count_and_predict)

    async def main():
        batches = Batches(service, Limits())
        async with batches.running():
            answers = map(batches.answer, [*bodies, b"{"])
            return await asyncio.gather(*answers, return_exceptions=True)

    *answers, refused = asyncio.run(main())
    assert max(sizes) > 1
    assert isinstance(refused, Refused)
    for body, alone in zip(answers, expected, strict=True):
        together = json.loads(body)
        assert together["notes"] == alone["notes"]
        for prediction, prediction_alone in zip(
            together["predictions"], alone["predictions"], strict=True
        ):
            assert {*prediction} == {*prediction_alone}
            for name, value in prediction_alone.items():
                if not isinstance(value, str):
                    value = pytest.approx(value, rel=1e-4, abs=1e-5)
                assert prediction[name] == value
    assert "mauve" in json.loads(answers[3])["notes"][0]


def test_an_internal_error_is_a_500_and_the_server_continues(server, monkeypatch, capsys):
    with monkeypatch.context() as patch:
        patch.setattr(Service, "_predictions", lambda *arguments: 1 / 0)
        status, answer, _ = ask(server, "POST", "/predict", {"rows": [ROW]})
    assert status == 500
    assert "ZeroDivisionError" not in answer["error"]
    assert "ZeroDivisionError" in capsys.readouterr().err
    assert ask(server, "POST", "/predict", {"rows": [ROW]})[0] == 200


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"level": 1.0}, "level"),
        ({"samples": 0}, "samples"),
        ({"max_rows": 0}, "max_rows"),
        ({"method": "mnf"}, "mnf"),
    ],
)
def test_invalid_options_of_the_service_are_errors(runs, options, message):
    with pytest.raises(ValueError, match=message):
        Service.of(runs["classes"], **options)


def test_invalid_limits_and_addresses_are_errors(service, server):
    for limits in ({"max_waiting": 0}, {"timeout": float("nan")}):
        with pytest.raises(RunError, match="must be a positive, finite number"):
            Limits(**limits)
    port = server.address[1]
    with pytest.raises(RunError, match=rf"cannot listen at 127\.0\.0\.1:{port}.*another --host"):
        Server(service, port=port, quiet=True)


def test_a_missing_extra_is_named(runs, monkeypatch):
    from typer.testing import CliRunner

    from bayou.app.cli.app import app

    monkeypatch.setitem(sys.modules, "uvicorn", None)
    monkeypatch.delitem(sys.modules, "bayou.app.runs.serve")
    result = CliRunner().invoke(app, ["serve", str(runs["classes"])])
    assert result.exit_code == 2
    assert "needs uvicorn, which is not installed: pip install 'bayou[serve]'" in result.output


@pytest.mark.skipif(os.name != "posix", reason="Windows cannot send these signals to a process")
@pytest.mark.parametrize("name", ["SIGINT", pytest.param("SIGTERM", marks=pytest.mark.slow)])
def test_the_command_serves_until_a_signal(name, runs):
    command = [sys.executable, "-m", "bayou", "serve", str(runs["classes"]), "--port", "0"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ
    ) as process:
        try:
            line = process.stdout.readline()
            address = re.search(r"serving run/map-0 at http://127\.0\.0\.1:(\d+)", line)
            assert address, line
            connection = http.client.HTTPConnection("127.0.0.1", int(address[1]), timeout=30)
            connection.request("POST", "/predict", json.dumps({"rows": [ROW]}))
            (prediction,) = json.loads(connection.getresponse().read())["predictions"]
            assert prediction["class"] in ("yes", "no")
            process.send_signal(getattr(signal, name))  # with the connection still open
            assert process.wait(60) == 0
            assert process.stderr.read().splitlines()[-1] == "stopped"
            connection.close()
        finally:
            process.kill()
