"""What the README says is so."""

from __future__ import annotations

import re
import shlex
import tomllib
from pathlib import Path

import pytest
import torch
from typer.main import get_command
from typer.testing import CliRunner

import bayou
from bayou.app.cli.app import app
from bayou.app.runs.folder import Run

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "README.md").read_text(encoding="utf-8")
(CODE,) = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
DATA, _, REST = CODE.partition("\nposterior")


@pytest.fixture(scope="module")
def example(tmp_path_factory):
    """Return the names of the example after it ran as it is written."""
    namespace = {"__builtins__": __builtins__}
    torch.manual_seed(0)
    file = tmp_path_factory.mktemp("readme") / "sine.bayou"
    exec(CODE.replace('"sine.bayou"', repr(str(file))), namespace)
    return namespace


def widths(example):
    """The width of the interval of the example at an input."""
    grid, width = torch.linspace(-4, 4, 100), (example["high"] - example["low"])[:, 0]
    return lambda x: float(width[(grid - x).abs().argmin()])


def test_the_interval_is_wide_where_there_were_no_data(example):
    width, x = widths(example), example["x"]
    assert not bool(((x > -1) & (x < 0.5)).any())  # as its comment says
    among = max(width(place) for place in (-1.8, -1.5, -1.2, 0.7, 1.0, 1.3))
    assert width(-0.25) > 1.3 * among  # in the gap
    assert min(width(3), width(-3)) > 2 * among  # and beyond
    assert min(width(4), width(-4)) > 4 * among


def test_the_interval_covers_what_it_promises(example):
    generator = torch.Generator().manual_seed(1)
    x = torch.rand(1000, 1, generator=generator) + torch.where(
        torch.rand(1000, 1, generator=generator) < 0.5, -2, 0.5
    )
    y = torch.sin(2 * x) + 0.05 * torch.randn(1000, 1, generator=generator)
    found = bayou.diagnostics.check(example["posterior"], (example["x"], example["y"]), (x, y))
    assert found["coverage"].status == "ok", found["coverage"]
    assert found.status == "ok", str(found)


def test_the_checks_of_the_example_find_nothing_wrong(example):
    found = bayou.diagnostics.check(example["posterior"], (example["x"], example["y"]))
    assert {one.name for one in found} >= {
        "mode",
        "constant",
        "linear",
    }  # what the comment beside it says
    assert found.status == "ok", str(found)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", re.findall(r'`"(\w+)"`', TEXT.partition("To compare methods")[2].partition("\n\n")[0])
)
def test_the_methods_that_the_text_compares(name):
    """On the example: no error, no failed check and no warning."""
    namespace = {}
    torch.manual_seed(0)
    exec(DATA, namespace)
    data = (namespace["x"], namespace["y"])
    found = bayou.diagnostics.check(
        bayou.fit(namespace["net"], data, name, seed=0, progress=False), data
    )
    assert found.status != "failed", str(found)


def test_every_name_in_the_tables_is_there():
    part = TEXT.partition("## Methods")[2].partition("## Flows")[0]
    lines = "\n".join(line for line in part.splitlines() if line.startswith("|"))
    names = set(re.findall(r"`([A-Za-z_.]+)`", lines)) - {"vmap", "draw.kl"}  # of torch, of a draw
    assert len(names) > 30
    spaces = (bayou, bayou.guides, bayou.priors, bayou.likelihoods)
    for name in names:
        found = next((space for space in spaces if hasattr(space, name.split(".")[0])), None)
        for word in name.split("."):
            assert hasattr(found, word), name
            found = getattr(found, word)
    for name in ("predict", "sample", "save"):
        assert hasattr(bayou.Posterior, name)


@pytest.mark.parametrize("line", re.findall(r"^    (bayou .*)$", TEXT, re.MULTILINE))
def test_the_commands_are_understood(line):
    words = shlex.split(line, comments=True)[1:]
    command = get_command(app).commands[words[0]]
    command.make_context(words[0], words[1:])  # raises on an option that is not there


@pytest.mark.slow
def test_the_demo_shows_a_plain_network_that_is_sure_where_it_is_wrong(tmp_path):
    """As `make demo` runs it: MLE is flagged as overconfident, the others are better, and MNF is
    the best of them.
    """
    (line,) = re.findall(
        r"\$\(BIN\)/(bayou compare .*)", (ROOT / "Makefile").read_text(encoding="utf-8")
    )
    words = line.replace("demo-output", str(tmp_path / "demo")).split()[1:]
    done = CliRunner().invoke(app, [*words, "--quiet"], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    results = {result["method"]: result for result in Run.open(tmp_path / "demo").results()}
    plain = results.pop("mle")
    assert any(
        c["status"] != "ok" and c["text"].startswith("overconfident") for c in plain["checks"]
    )
    assert len(results) == 4
    for name, result in results.items():
        assert all(check["status"] != "failed" for check in result["checks"]), name
        assert result["metrics"]["nll"] < plain["metrics"]["nll"]
        assert result["metrics"]["ece"] < plain["metrics"]["ece"]
        if (
            name != "mnf"
        ):  # as docs/quickstart.md says: over the last layer alone letters are not told apart as well
            assert result["metrics"]["auroc_entropy"] > plain["metrics"]["auroc_entropy"]
    assert min(results, key=lambda name: results[name]["metrics"]["nll"]) == "mnf"


def test_make_targets_links_license_and_python():
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for target in re.findall(r"make (\w+)", TEXT):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target
    for link in re.findall(r"\]\(([^)#:]+)\)", TEXT):
        assert (ROOT / link).exists(), link
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert project["requires-python"] == ">=3.11"
    assert (ROOT / "LICENSE").read_text(encoding="utf-8").startswith("MIT License")
