"""Speed of two source trees in one run: every row of flows.py and posteriors.py, before and after a
change.

git worktree add ../before <commit> && python experiments/measure/trees.py ../before .

Each tree has a process of its own, with its own copy of the measurements. The two take turns within a
round, so that a busy machine slows both alike; a ratio above 1 is the first tree's time over the
second's: the second is faster.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path
from statistics import median
from typing import Any


def benchmark(tree: Path, name: str) -> Any:
    spec = importlib.util.spec_from_file_location(
        name, tree / "experiments" / "measure" / f"{name}.py"
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def serve(tree: Path) -> None:
    """Answer lines of (row, repetitions) with processor milliseconds, in the process of one
    tree.
    """
    import torch

    torch.set_num_threads(1)
    flows, posteriors = benchmark(tree, "flows"), benchmark(tree, "posteriors")
    calls: dict[str, Callable[[], object]] = {}
    names = [f"flow: {row}" for row in flows.ROWS]
    names += [f"{name}: {part}" for name in posteriors.FAMILIES for part in ("step", "prediction")]
    print(json.dumps(names), flush=True)
    for line in sys.stdin:
        row, repetitions = json.loads(line)
        if row not in calls:
            if row.startswith("flow: "):
                kind, task = flows.ROWS[row[6:]]
                torch.manual_seed(0)
                calls[row] = task(flows.bayou_model(kind), False)
            else:
                name = row.rsplit(": ", 1)[0]
                calls[f"{name}: step"], calls[f"{name}: prediction"] = posteriors.contestant(name)
            calls[row]()
        start = time.process_time()
        for _ in range(repetitions):
            calls[row]()
        print(json.dumps((time.process_time() - start) / repetitions * 1e3), flush=True)


class Tree:
    def __init__(self, path: Path) -> None:
        environment = os.environ | {"PYTHONPATH": str(path / "src"), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, __file__, "--serve", str(path)]
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
            bufsize=1,
        )
        self.rows: list[str] = self.answer()

    def answer(self) -> Any:
        assert self.process.stdout is not None
        return json.loads(self.process.stdout.readline())

    def time(self, row: str, repetitions: int) -> float:
        assert self.process.stdin is not None
        print(json.dumps((row, repetitions)), file=self.process.stdin, flush=True)
        return float(self.answer())


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("trees", type=Path, nargs="*", help="two checkouts: before, after")
    parser.add_argument(
        "--rounds", type=int, default=15, help="turns that each tree takes on a row"
    )
    parser.add_argument("--serve", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve(options.serve.resolve())
        return
    if len(options.trees) != 2:
        parser.error(f"expected two checkouts, before and after, got {len(options.trees)}")
    before, after = (Tree(path.resolve()) for path in options.trees)
    print(
        f"{date.today()}, {platform.machine()}, one thread, processor time, medians of {options.rounds} rounds\n"
    )
    print("| row | before, ms | after, ms | before / after |\n|---|---:|---:|---:|", flush=True)
    for row in (row for row in before.rows if row in after.rows):
        once = max(before.time(row, 1), after.time(row, 1))
        repetitions = max(1, round(100 / once))  # a tenth of a second a turn
        pairs = [
            (before.time(row, repetitions), after.time(row, repetitions))
            for _ in range(options.rounds)
        ]
        old, new, ratio = (
            median(p[0] for p in pairs),
            median(p[1] for p in pairs),
            median(p[0] / p[1] for p in pairs),
        )
        print(f"| {row} | {old:.2f} | {new:.2f} | {ratio:.3f} |", flush=True)


if __name__ == "__main__":
    main()
