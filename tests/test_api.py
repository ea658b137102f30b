"""The stable names keep their signatures, or the changelog says how they changed; all public names
have a stability, and types.
"""

import json
import os
import re
import subprocess
import sys
from enum import Enum
from pathlib import Path

import pytest

import bayou
from docs import api_stability

ROOT = Path(__file__).parents[1]
MIN_COMPLETENESS = 0.98  # of the symbols of the package whose type is known


def newest_section():
    """Return the first section of the changelog."""
    return (ROOT / "CHANGELOG.md").read_text(encoding="utf-8").split("\n## ")[1]


@pytest.mark.parametrize("package", api_stability.packages())
def test_every_stable_name_is_public(package):
    names = api_stability.stable_names(package)
    assert len(names) == len(set(names))
    gone = set(names) - set(api_stability.public_names(package))
    assert not gone, f"{sorted(gone)} are in {api_stability.TABLE} and no public names of {package}"


def test_every_documented_package_has_a_stability():
    documented = re.findall(
        r"^\| \[`(bayou[\w.]*)`\]", (ROOT / "docs/api.md").read_text(encoding="utf-8"), re.MULTILINE
    )
    assert sorted(documented) == sorted(api_stability.packages())


def test_every_public_name_is_on_the_page_once():
    page = api_stability.page()
    for package in api_stability.packages():
        section = page.partition(f"## {package}\n")[2].partition("\n## ")[0]
        rows = re.findall(r"^\| `(\w+)` \| \w+ \| (stable|provisional) \|$", section, re.MULTILINE)
        assert [name for name, _ in rows] == api_stability.public_names(package)
        stable = [name for name, stability in rows if stability == "stable"]
        assert stable == api_stability.stable_names(package)


def test_the_file_of_signatures_is_that_of_the_code():
    """After a wanted change: python -m docs.api_stability, and a line in CHANGELOG.md."""
    recorded, current = api_stability.read(api_stability.SIGNATURES), api_stability.signatures()
    changed = [f"- {line}" for line in recorded if line not in set(current)]
    changed += [f"+ {line}" for line in current if line not in set(recorded)]
    assert recorded == current, (
        "signatures of stable names changed:\n"
        + "\n".join(changed)
        + f"\nIf that is wanted, run `{api_stability.COMMAND}` and describe the change in the newest "
        "section of CHANGELOG.md, with the name in backticks. A name, parameter or method that goes "
        "away must be deprecated first (CONTRIBUTING.md)."
    )


def test_what_changed_since_the_last_release_is_in_the_changelog():
    missing = api_stability.unexplained(
        api_stability.read(api_stability.RELEASED), api_stability.signatures(), newest_section()
    )
    assert not missing, (
        "these signatures of the last release changed, and the newest section of CHANGELOG.md does "
        "not mention their names in backticks:\n" + "\n".join(missing)
    )


def test_a_changed_signature_needs_a_mention_of_its_name():
    released = [
        "bayou.fit(net, steps: int = 1) -> Posterior",
        "bayou.Plan.fit()",
        "bayou.load(path)",
    ]
    current = ["bayou.fit(net, steps: int = 2) -> Posterior", "bayou.load(path)", "bayou.new()"]
    assert api_stability.unexplained(released, current, "fit is other") == released[:2]
    assert api_stability.unexplained(released, current, "- `fit(steps=)` is 2; `Plan.fit`") == []
    assert api_stability.unexplained(released, released, "") == []


def test_a_line_has_the_parameters_the_defaults_and_the_members():
    class Color(Enum):
        RED = 1

    def paint(x: int, *rest: str, color: Color = Color.RED, brush: type = dict, **more: int) -> str:
        return ""

    assert api_stability.signature_text(paint) == (
        "(x: int, *rest: str, color: tests.test_api.Color = Color.RED, brush: type = dict, **more: int)"
        " -> str"
    ).replace("tests.test_api.Color", api_stability.annotation_text(Color))
    lines = list(api_stability.lines_of("bayou.MAP", bayou.MAP))
    assert lines[0].startswith("bayou.MAP(l2: float | None = None, *, epochs: int | None = None, ")
    assert list(api_stability.lines_of("bayou.flows", bayou.flows)) == ["bayou.flows: package"]
    assert "bayou.Predictive.mean: Tensor" in api_stability.signatures()


@pytest.mark.slow
def test_the_types_of_the_package_are_complete():
    """Annotate the attributes and parameters in the message: what is inferred counts as unknown."""
    folder = Path(sys.executable).parent
    environment = os.environ | {
        "PATH": f"{folder}{os.pathsep}{os.environ['PATH']}",  # the Python whose packages are read
        "PYTHONPATH": str(Path(bayou.__file__).parents[1]),
    }
    command = [str(folder / "basedpyright"), "--verifytypes", "bayou", "--ignoreexternal"]
    done = subprocess.run(
        [*command, "--outputjson"], capture_output=True, text=True, timeout=600, env=environment
    )
    report = json.loads(done.stdout)["typeCompleteness"]
    unknown = [
        f"{symbol['name']}: {symbol['diagnostics'][0]['message'].splitlines()[0]}"
        for symbol in report["symbols"]
        if symbol["isExported"] and not symbol["isTypeKnown"] and symbol["diagnostics"]
    ]
    assert report["completenessScore"] >= MIN_COMPLETENESS, "\n".join(unknown)
