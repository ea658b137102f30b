"""What a start costs: the modules that imports and commands bring in, and the seconds of both."""

import json
import os
import subprocess
import sys

import pytest

# What no start may import: plots, tables and machine learning of others, and what they bring.
HEAVY = {"matplotlib", "pandas", "sklearn", "scipy", "PIL", "pyarrow", "jinja2", "starlette"}
MODULES = "import json, sys; print(json.dumps(sorted(sys.modules)))"
HELP = "import sys; from bayou.app.cli.app import app; app(['--help'], standalone_mode=False)"
REPEATS = 5


def imported(code: str) -> set[str]:
    """Return the names of all modules of a process that ran some code."""
    result = subprocess.run(
        [sys.executable, "-c", f"{code}\n{MODULES}"], capture_output=True, text=True, check=True
    )
    return set(json.loads(result.stdout.splitlines()[-1]))


def packages(names: set[str]) -> set[str]:
    return {name.partition(".")[0] for name in names}


def test_import_bayou_brings_in_the_standard_library_only():
    before = imported("")
    modules = imported("import bayou") - before
    assert packages(modules) <= {"bayou", *sys.stdlib_module_names}
    assert len([name for name in modules if name.startswith("bayou")]) <= 4
    assert len(modules) <= 60


def test_the_first_name_of_bayou_brings_in_torch_and_nothing_heavy():
    torch_alone = imported("import torch, safetensors.torch")
    modules = imported("import bayou; bayou.fit") - torch_alone
    assert not packages(modules) & HEAVY
    assert len(modules) <= 330  # 261 in November 2026


def test_help_brings_in_no_library_but_that_of_the_terminal():
    modules = imported(HELP)
    assert not packages(modules) & {"torch", "numpy", "safetensors", *HEAVY}
    assert not modules & {"http.client", "multiprocessing.pool", "concurrent.futures.process"}
    assert len([name for name in modules if name.startswith("bayou")]) <= 30


@pytest.mark.parametrize("name", ["predict", "train", "compare", "serve", "report"])
def test_the_help_of_a_command_needs_no_torch(name):
    modules = imported(HELP.replace("'--help'", f"'{name}', '--help'"))
    assert not packages(modules) & {"torch", "numpy", *HEAVY}


def processor_seconds(code: str) -> float:
    """Return the fewest processor seconds of several processes that run some code.

    They depend less on what else the machine does than those of a clock.
    """
    code += "\nimport sys, time; print(time.process_time(), file=sys.stderr)"
    seconds = []
    for _ in range(REPEATS):
        result = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True
        )
        seconds.append(float(result.stderr.splitlines()[-1]))
    return min(seconds)


@pytest.mark.slow
def test_starts_are_short_beside_the_import_of_torch(tmp_path, monkeypatch):
    """Ratios with wide margins; the goals are 1.15, .3 s and torch + .7 s on an idle machine."""
    torch_seconds = processor_seconds("import torch")
    monkeypatch.setenv("PYTHONPYCACHEPREFIX", os.fspath(tmp_path))  # compiled at the first run
    monkeypatch.delenv("PYTHONDONTWRITEBYTECODE", raising=False)
    assert processor_seconds("import bayou") < 0.3 * torch_seconds
    assert processor_seconds(HELP) < 0.6 * torch_seconds
    assert processor_seconds("import torch, bayou; bayou.fit") < 1.7 * torch_seconds
