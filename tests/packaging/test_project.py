"""The files around the code agree with one another: versions, addresses, workflow, changelog,
citation.
"""

import os
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
    on_posix = [job for name, job in jobs.items() if name != "windows"]
    for line in (line for job in on_posix for line in commands(job)):
        match = re.fullmatch(r"make ([a-z-]+) PYTHON=python", line)
        assert match, f"{line!r} is not a make target"
        called.add(match[1])
    assert called <= targets
    needed = set(re.findall(r"^make ([a-z-]+)", read(".ci/run"), re.MULTILINE)) | {
        "test-peers",
        "test-oldest",
        "test-newest",
        "test-wheel",
    }
    assert called >= needed


def test_the_workflow_covers_pythons_and_platforms(jobs):
    matrix = jobs["test"]["strategy"]["matrix"]
    assert matrix["python"] == pythons()
    assert f">={pythons()[0]}" == PROJECT["requires-python"]
    for job in ("test", "oldest-torch", "newest-torch"):
        systems = jobs[job]["strategy"]["matrix"]["os"]
        assert [re.sub(r"-[\d.]+", "", system) for system in systems] == [
            "ubuntu",
            "ubuntu-arm",
            "macos",
        ]
    windows = jobs["windows"]["strategy"]["matrix"]
    assert windows["python"] == pythons()
    assert windows["os"] == ["windows-2025", "windows-11-arm"]
    for job in jobs.values():
        (setup,) = (
            step["with"]
            for step in job["steps"]
            if str(step.get("uses")).startswith("actions/setup-python@")
        )
        assert setup["python-version"] in ("${{ matrix.python }}", *pythons())
        assert setup["cache"] == "pip"
        assert all((ROOT / name).is_file() for name in setup["cache-dependency-path"].split())


def test_windows_runs_the_commands_of_make_test(jobs):
    recipe = read("Makefile").partition("\ntest: ")[2].partition("\n\n")[0]
    words = re.search(r"-m pytest (.*) \$\(ARGS\)", recipe)[1].replace("$(JOBS)", "auto")
    steps = [step["run"] for step in jobs["windows"]["steps"] if "run" in step]
    assert steps == [
        "python -m pip install -c constraints.txt -e .[test]",
        f"python -m pytest {words}",
    ]


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
    assert PROJECT["dynamic"] == ["version", "readme"]
    assert "version" not in PROJECT
    citation = yaml.safe_load(read("CITATION.cff"))
    assert str(citation["version"]) == bayou.__version__


def test_addresses_are_those_of_one_repository():
    assert set(PROJECT["urls"]) == {"Homepage", "Documentation", "Source", "Issues", "Changelog"}
    for name, address in PROJECT["urls"].items():
        if name == "Documentation":  # the site that the workflow publishes
            assert address == "https://bayou-ml.github.io/bayou/latest/"
            continue
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


@pytest.mark.parametrize(
    "path", sorted((ROOT / ".github").rglob("*.yml")), ids=lambda path: path.name
)
def test_the_files_of_github_are_yaml(path):
    assert isinstance(yaml.safe_load(path.read_text(encoding="utf-8")), dict)


def test_the_forms_of_issues_have_what_github_needs():
    forms = ROOT / ".github" / "ISSUE_TEMPLATE"
    for path in (forms / "bug.yml", forms / "idea.yml"):
        form = yaml.safe_load(path.read_text(encoding="utf-8"))
        assert {"name", "description", "body"} <= set(form)
        assert all({"type", "id", "attributes"} <= set(entry) for entry in form["body"])


def test_the_page_of_supported_versions_says_what_pyproject_says():
    page = read("docs/support.md")
    assert f"| Python | {pythons()[0]} to {pythons()[-1]} |" in page
    lower = dict(line.split(">=") for line in PROJECT["dependencies"] if ">=" in line)
    assert f"| torch | {lower['torch']} to the newest |" in page
    assert f"| numpy | {lower['numpy']} |" in page


def test_the_page_of_extras_has_each_extra_of_users_and_its_weight():
    page = read("docs/extras.md")
    (others,) = re.findall(r"The extras (.+) are for work on bayou itself", page)
    users = set(PROJECT["optional-dependencies"]) - set(re.findall(r"`(\w+)`", others))
    for name in users:
        assert len(re.findall(rf"^\| `{name}` \|", page, re.MULTILINE)) == 2, name


def test_good_first_issues_point_to_files_that_are_there():
    page = read("docs/good_first_issues.md")
    places = re.findall(r"`((?:src|tests|examples|docs)/[\w./]*)`", page)
    assert len(places) >= 10
    for place in places:
        assert (ROOT / place).exists(), place


def test_a_stream_without_unicode_does_not_end_a_command():
    environment = os.environ | {"PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"}
    command = [sys.executable, "-m", "bayou", "compare", "--help"]
    done = subprocess.run(command, capture_output=True, timeout=120, env=environment, check=True)
    assert b"Usage" in done.stdout
