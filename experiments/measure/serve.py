"""The speed of ``bayou serve``, of the server it had before and of a bare FastAPI handler.

    python -m experiments.measure.serve --out experiments/results/serve.md

One network of two layers of 50 units on the diabetes table (ten numbers a row). Servers are
processes of their own and run at the same time; rounds go from one to the next, so that other
programs slow all of them alike. A client keeps its connection and asks again, for one row, as soon
as it has its answer. The server of before is that of the commit ``--before``, in a git worktree
that is removed again.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import csv
import json
import os
import platform
import re
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from sklearn.datasets import load_diabetes

ROOT = Path(__file__).parents[2]
METHODS = {"map": "a point", "mnf": "100 draws of MNF"}
BEFORE = "a61b355"  # the last commit with an HTTP server of its own
SERVERS = ("before", "bayou serve", "bare FastAPI")
CLIENTS = (1, 16, 64)


def train(folder: Path, steps: int) -> list[dict[str, float]]:
    """A run of all methods, and rows to ask for."""
    from bayou.app.runs.config import Config
    from bayou.app.runs.folder import Run

    data = load_diabetes()
    with open(folder / "diabetes.csv", "w", newline="") as stream:
        writer = csv.writer(stream)
        writer.writerow([*data.feature_names, "progression"])
        writer.writerows(np.column_stack([data.data, data.target]).tolist())
    config = Config(
        str(folder / "diabetes.csv"), tuple(METHODS), target="progression", steps=steps, samples=100
    )
    Run.create(folder / "run", config).work()
    return [dict(zip(data.feature_names, row, strict=True)) for row in data.data.tolist()]


def bare(run: str, method: str) -> None:
    """A handler as one would write it: FastAPI calls it in its threads."""
    import uvicorn
    from fastapi import FastAPI

    from bayou.app.runs.service import Service

    service, app = Service.of(run, method=method), FastAPI()

    @app.post("/predict")
    def predict(request: dict) -> dict:
        return json.loads(service.answer(json.dumps(request).encode()))

    listening = socket.socket(
        socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP
    )  # asyncio: no delay if TCP is said
    listening.bind(("127.0.0.1", 0))
    listening.listen(2048)
    print(f"http://127.0.0.1:{listening.getsockname()[1]}", flush=True)
    uvicorn.Server(uvicorn.Config(app, log_level="error")).run([listening])


@contextlib.contextmanager
def started(command: list[str], source: Path) -> Iterator[tuple[int, int]]:
    """The process and the port of a server."""
    environment = os.environ | {"PYTHONPATH": f"{source}/src{os.pathsep}{ROOT}"}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env=environment, cwd=ROOT
    ) as process:
        try:
            assert process.stdout is not None
            found = re.search(r"http://127\.0\.0\.1:(\d+)", process.stdout.readline())
            assert found, command
            yield process.pid, int(found[1])
        finally:
            process.kill()


@contextlib.contextmanager
def servers(run: Path, method: str, old: Path) -> Iterator[dict[str, tuple[int, int]]]:
    serve = [
        sys.executable,
        "-m",
        "bayou",
        "serve",
        str(run),
        "--method",
        method,
        "--port",
        "0",
        "-q",
    ]
    plain = [sys.executable, "-m", "experiments.measure.serve", "--bare", str(run), method]
    with contextlib.ExitStack() as stack:
        sources = ((serve, old), (serve, ROOT), (plain, ROOT))
        yield {
            name: stack.enter_context(started(command, source))
            for name, (command, source) in zip(SERVERS, sources, strict=True)
        }


@contextlib.contextmanager
def worktree(revision: str) -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as folder:
        git = ["git", "-C", str(ROOT), "worktree"]
        subprocess.run(
            [*git, "add", "--detach", f"{folder}/old", revision], check=True, capture_output=True
        )
        try:
            yield Path(folder, "old")
        finally:
            subprocess.run([*git, "remove", "--force", f"{folder}/old"], check=True)


async def client(port: int, request: bytes, until: float, found: list[float]) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    while time.perf_counter() < until:
        start = time.perf_counter()
        writer.write(request)
        head = (await reader.readuntil(b"\r\n\r\n")).lower()
        await reader.readexactly(int(head.partition(b"content-length: ")[2].split()[0]))
        if head.split()[1] != b"200":
            raise SystemExit(f"status {head.split()[1].decode()}")
        found.append(time.perf_counter() - start)
    writer.close()


def load(port: int, request: bytes, clients: int, seconds: float) -> tuple[float, list[float]]:
    """How long it took in all, and the latency of every request, in seconds."""

    async def all_of_them() -> list[float]:
        found: list[float] = []
        await asyncio.gather(
            *(client(port, request, time.perf_counter() + seconds, found) for _ in range(clients))
        )
        return found

    start = time.perf_counter()
    found = asyncio.run(all_of_them())
    return time.perf_counter() - start, found


def head(*lines: str) -> bytes:
    return "".join(f"{line}\r\n" for line in ("POST /predict HTTP/1.1", *lines, "")).encode()


def speed(run: Path, old: Path, row: dict[str, float], seconds: float, rounds: int) -> list[str]:
    lines = [
        "| posterior | clients | server | requests/s | × before | p50, ms | p99, ms |",
        "|---|--:|---|--:|--:|--:|--:|",
    ]
    body = json.dumps({"rows": [row]}).encode()
    request = (
        head("Host: localhost", "Content-Type: application/json", f"Content-Length: {len(body)}")
        + body
    )
    for method, words in METHODS.items():
        with servers(run, method, old) as there:
            for clients in CLIENTS:
                passed, times = dict.fromkeys(there, 0.0), {name: list[float]() for name in there}
                for n in range(-1, rounds):
                    for name, (_, port) in there.items():
                        took, found = load(port, request, clients, seconds if n >= 0 else 0.3)
                        if n >= 0:  # after a warm-up
                            passed[name] += took
                            times[name] += found
                for name in there:
                    middle, late = 1e3 * np.quantile(times[name], (0.5, 0.99))
                    rate, was = (len(times[k]) / passed[k] for k in (name, "before"))
                    numbers = f"{rate:,.0f} | {rate / was:.1f} | {middle:.0f} | {late:.0f}"
                    lines.append(f"| {words} | {clients} | {name} | {numbers} |")
                    print(lines[-1], flush=True)
    return lines


def main(seconds: float = 2.0, rounds: int = 3, steps: int = 60, before: str = BEFORE) -> str:
    with tempfile.TemporaryDirectory() as folder, worktree(before) as old:
        row, run = train(Path(folder), steps)[0], Path(folder, "run")
        lines = speed(run, old, row, seconds, rounds)
        name = platform.processor() or platform.machine()
        lines += ["", f"torch {torch.__version__}, {name}, {os.cpu_count()} cores, load average "]
        lines[-1] += f"{os.getloadavg()[0]:.0f}, {rounds} rounds of {seconds:g} s each, float32."
        return "\n".join([*lines, ""])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--before", metavar="COMMIT", default=BEFORE)
    parser.add_argument("--out", metavar="FILE.md")
    parser.add_argument("--bare", nargs=2, help=argparse.SUPPRESS)
    options = vars(parser.parse_args())
    out, plain = options.pop("out"), options.pop("bare")
    if plain:
        bare(*plain)
    else:
        text = main(**options)
        print(text)
        if out:
            Path(out).write_text(text)
