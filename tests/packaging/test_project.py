"""The files around the code agree with one another: versions, addresses, workflow, changelog,
citation.
"""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

import bayou
from bayou.app.cli.app import app

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
HOME = "https://github.com/bayou-ml/bayou"


def read(name):
    return (ROOT / name).read_text(encoding="utf-8")


def pythons():
    found = (
        re.fullmatch(r"Programming Language :: Python :: (3\.\d+)", line)
        for line in PROJECT["classifiers"]
    )
    return [match[1] for match in found if match]


@pytest.fixture(scope="module")
def jobs():
    jobs = yaml.safe_load(read(".github/workflows/ci.yml"))["jobs"]
    return jobs


def commands(job):
    """The commands of a job, once for each value of its matrix that they name."""
    found = [step["run"] for step in job["steps"] if "run" in step]
    for name, values in job["strategy"]["matrix"].items():
        found = [
            line.replace(f"${{{{ matrix.{name} }}}}", value) for line in found for value in values
        ]
    return found


def test_the_workflow_runs_make_targets_only(jobs):
    targets = set(re.findall(r"^([a-z-]+):.*##", read("Makefile"), re.MULTILINE))
    called = set()
    for line in (line for job in jobs.values() for line in commands(job)):
        match = re.fullmatch(r"make ([a-z-]+) PYTHON=python", line)
        assert match, f"{line!r} is not a make target"
        called.add(match[1])
    assert called <= targets
    needed = set(re.findall(r"^make ([a-z-]+)", read(".ci/run"), re.MULTILINE)) | {
        "test-peers",
        "test-oldest",
    }
    assert called >= needed


def test_the_workflow_covers_pythons_and_platforms(jobs):
    matrix = jobs["test"]["strategy"]["matrix"]
    assert matrix["python"] == pythons()
    assert f">={pythons()[0]}" == PROJECT["requires-python"]
    for job in ("test", "oldest-torch"):
        systems = jobs[job]["strategy"]["matrix"]["os"]
        assert [re.sub(r"-[\d.]+", "", system) for system in systems] == [
            "ubuntu",
            "ubuntu-arm",
            "macos",
        ]
    for job in jobs.values():
        (setup,) = (
            step["with"]
            for step in job["steps"]
            if str(step.get("uses")).startswith("actions/setup-python@")
        )
        assert setup["python-version"] in ("${{ matrix.python }}", *pythons())
        assert setup["cache"] == "pip"
        assert all((ROOT / name).is_file() for name in setup["cache-dependency-path"].split())


def test_the_oldest_torch_is_the_one_that_is_allowed():
    (oldest,) = re.findall(r"^torch>=(\S+)$", "\n".join(PROJECT["dependencies"]), re.MULTILINE)
    assert f"torch=={oldest}.0/" in read("Makefile")


def test_every_pin_is_there_once():
    names = [
        line.partition("==")[0].lower()
        for line in read("constraints.txt").splitlines()
        if "==" in line
    ]
    assert sorted(names) == sorted(set(names))


def test_the_version_is_in_one_place():
    assert PROJECT["dynamic"] == ["version"]
    assert not re.search(r"^version:", read("CITATION.cff"), re.MULTILINE)
    assert re.search(rf"^## \[{re.escape(bayou.__version__)}\]", read("CHANGELOG.md"), re.MULTILINE)


def test_addresses_are_those_of_one_repository():
    assert set(PROJECT["urls"]) == {"Homepage", "Documentation", "Source", "Issues", "Changelog"}
    for address in PROJECT["urls"].values():
        assert address.startswith(HOME)
        _, _, path = address.partition("/main/")
        assert (ROOT / path).exists()
    citation = yaml.safe_load(read("CITATION.cff"))
    assert {"cff-version", "message", "title", "authors"} <= set(
        citation
    )  # what the format requires
    assert (citation["repository-code"], citation["license"]) == (HOME, PROJECT["license"])
    assert f"{HOME}/security/advisories/new" in read("SECURITY.md")


def test_python_m_bayou_is_the_command():
    done = subprocess.run(
        [sys.executable, "-m", "bayou", "list", "methods"],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert (
        done.stdout == CliRunner().invoke(app, ["list", "methods"], catch_exceptions=False).output
    )
    assert "laplace" in done.stdout
