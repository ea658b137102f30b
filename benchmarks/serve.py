"""Requests a second and latency of ``bayou serve``: a server in a process of its own, clients in threads of this one.

    python -m benchmarks.serve --out benchmarks/results/serve.md

One network of two layers of 50 units on the diabetes table (ten numbers a row), a posterior of each of a few methods. A
client keeps its connection and asks again as soon as it has its answer.
"""

from __future__ import annotations

import argparse
import csv
import http.client
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import numpy as np
import torch
from sklearn.datasets import load_diabetes

METHODS = {"map": "a point", "ensemble": "5 networks", "mnf": "100 draws of MNF"}


def train(folder: Path, steps: int) -> list[dict[str, float]]:
    """A run of all methods, and rows to ask for."""
    from bayou.runs.config import Config
    from bayou.runs.folder import Run

    data = load_diabetes()
    with open(folder / "diabetes.csv", "w", newline="") as stream:
        writer = csv.writer(stream)
        writer.writerow([*data.feature_names, "progression"])
        writer.writerows(np.column_stack([data.data, data.target]).tolist())
    config = Config(str(folder / "diabetes.csv"), tuple(METHODS), target="progression", steps=steps, samples=100)
    Run.create(folder / "run", config).work()
    return [dict(zip(data.feature_names, row, strict=True)) for row in data.data.tolist()]


def client(port: int, body: bytes, until: float, found: list[float]) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    while time.perf_counter() < until:
        start = time.perf_counter()
        connection.request("POST", "/predict", body)
        answer = connection.getresponse()
        answer.read()
        if answer.status != 200:
            raise SystemExit(f"status {answer.status}")
        found.append(time.perf_counter() - start)
    connection.close()


def cpu(process: int) -> float:
    """Seconds that a process has computed; nan where the system does not say."""
    try:
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return float("nan")
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def load(process: int, port: int, body: bytes, clients: int, seconds: float) -> tuple[float, float, float, float]:
    """Requests a second; median and 99th percentile of the latency; what a request computes: in milliseconds."""
    client(port, body, time.perf_counter() + 0.3, [])  # warm
    each: list[list[float]] = [[] for _ in range(clients)]
    start, before = time.perf_counter(), cpu(process)
    threads = [threading.Thread(target=client, args=(port, body, start + seconds, one)) for one in each]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    passed, times = time.perf_counter() - start, np.concatenate(each)
    own = 1e3 * (cpu(process) - before) / len(times)
    return len(times) / passed, *(1e3 * np.quantile(times, (0.5, 0.99))), own


def main(seconds: float = 5.0, steps: int = 300, out: str | None = None) -> list[str]:
    lines = ["| posterior | rows a request | clients | requests/s | rows/s | p50, ms | p99, ms | CPU, ms |"]
    lines.append("|---|---:|---:|---:|---:|---:|---:|---:|")
    print(*lines, sep="\n", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        rows = train(Path(folder), steps)
        for method, words in METHODS.items():
            command = [sys.executable, "-m", "bayou", "serve", f"{folder}/run", "--method", method, "--port", "0", "-q"]
            with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
                assert server.stdout is not None
                found = re.search(r"http://127\.0\.0\.1:(\d+)", server.stdout.readline())
                assert found
                for count in (1, 100):
                    body = json.dumps({"rows": rows[:count]}).encode()
                    for clients in (1, 4, 16):
                        rate, middle, late, own = load(server.pid, int(found[1]), body, clients, seconds)
                        numbers = f"{rate:,.0f} | {rate * count:,.0f} | {middle:.0f} | {late:.0f} | {own:.1f}"
                        lines.append(f"| {words} | {count} | {clients} | {numbers} |")
                        print(lines[-1], flush=True)
                server.terminate()
    name = platform.processor() or platform.machine()
    busy = f"load average {os.getloadavg()[0]:.0f}" if hasattr(os, "getloadavg") else "load unknown"
    lines += ["", f"torch {torch.__version__}, {name}, {os.cpu_count()} cores, {busy}, {seconds:g} s each, float32."]
    if out:
        Path(out).write_text("\n".join(lines) + "\n")
    return lines


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--out", metavar="FILE.md")
    main(**vars(parser.parse_args()))
