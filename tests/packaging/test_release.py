"""A release: one version in all files, notes from the changelog, a workflow that publishes what it
tested.
"""

import hashlib
import json
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

import bayou
from docs import release

ROOT = Path(__file__).parents[2]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
NOT_PINNED: set[str] = set()  # actions that have a tag instead of a commit
CONDA_NAMES = {"torch": "pytorch", "matplotlib": "matplotlib-base"}


@pytest.fixture
def project(tmp_path):
    """The files that name a version, and a changelog of two releases."""
    for name in (*release.PLACES, release.CHANGELOG):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    (tmp_path / release.CHANGELOG).write_text(
        "# Changelog\n\n## [0.1.0] - unreleased\n\n### Added\n\n- `fit`\n\n## [0.0.1] - 2025-01-31\n\n- x\n",
        encoding="utf-8",
    )
    return tmp_path


def test_all_files_name_the_version_of_the_code():
    """After a change of one: python -m docs.release bump VERSION."""
    assert release.disagreements() == []
    assert release.newest_entry(ROOT)[0] == bayou.__version__
    assert PYPROJECT["project"]["dynamic"][0] == "version"
    assert PYPROJECT["tool"]["hatch"]["version"]["path"] == "src/bayou/__init__.py"
    header = (ROOT / "docs/conf.py").read_text(encoding="utf-8")
    assert "version = release = bayou.__version__\n" in header
    assert 'html_title = f"bayou {release}"\n' in header


def test_production_stable_is_said_from_1_0_on_only():
    (status,) = [
        line for line in PYPROJECT["project"]["classifiers"] if line.startswith("Development")
    ]
    assert bayou.__version__ >= "1" or "Production/Stable" not in status


def test_bump_sets_version_and_date_everywhere(project):
    release.bump("1.0.0", "2026-12-01", project)
    assert release.disagreements(project) == []
    assert release.newest_entry(project) == ("1.0.0", "2026-12-01")
    for name in release.PLACES:
        assert "1.0.0" in (project / name).read_text(encoding="utf-8"), name
    release.check("v1.0.0", project)
    assert json.loads((project / ".zenodo.json").read_text(encoding="utf-8"))["version"] == "1.0.0"
    with pytest.raises(release.ReleaseError, match="the tag is v1.0.1"):
        release.check("v1.0.1", project)
    with pytest.raises(release.ReleaseError, match="1.0.0 of 2026-12-01; add what has changed"):
        release.bump("1.0.1", root=project)
    release.begin_next("1.1.0", project)
    assert release.newest_entry(project) == ("1.1.0", "unreleased")
    assert release.disagreements(project) == []
    with pytest.raises(release.ReleaseError, match="unreleased already"):
        release.begin_next("1.2.0", project)
    for wrong in ("1.0", "v1.0.0", "1.0.0.post1", "one"):
        with pytest.raises(release.ReleaseError, match="expected one like"):
            release.bump(wrong, root=project)


@pytest.mark.parametrize("name", [*release.PLACES, release.CHANGELOG])
def test_a_file_with_another_version_is_named(name, project):
    text = (project / name).read_text(encoding="utf-8")
    (project / name).write_text(text.replace("0.1.0", "0.2.0"), encoding="utf-8")
    with pytest.raises(release.ReleaseError) as caught:
        release.check(root=project)
    assert name == "src/bayou/__init__.py" or name in str(caught.value)


def test_a_tag_of_what_is_unreleased_is_refused(project):
    release.check(root=project)
    with pytest.raises(release.ReleaseError, match=r"unreleased: run bump 0\.1\.0"):
        release.check("v0.1.0", project)


def test_the_notes_are_the_section_of_the_changelog(project):
    assert release.notes("0.1.0", project) == "## Added\n\n- `fit`\n"
    assert release.notes("0.0.1", project) == "- x\n"
    with pytest.raises(release.ReleaseError, match=r"no section 9\.9\.9; it has 0\.1\.0, 0\.0\.1"):
        release.notes("9.9.9", project)
    assert len(release.notes(bayou.__version__)) > 1000


def test_the_command_prints_errors_as_one_sentence(capsys):
    assert release.main(["notes"]) == 0
    assert capsys.readouterr().out == release.notes(bayou.__version__)
    assert release.main(["check"]) == 0
    assert release.main(["notes", "9.9.9"]) == 2
    assert capsys.readouterr().err.startswith("release: CHANGELOG.md has no section 9.9.9")


def test_the_command_needs_nothing_but_python():
    done = subprocess.run(
        [sys.executable, "-S", "-m", "docs.release", "check"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")


# --- the recipe of conda-forge ------------------------------------------------------------------


@pytest.fixture(scope="module")
def recipe():
    return yaml.safe_load((ROOT / "recipe/recipe.yaml").read_text(encoding="utf-8"))


def conda_requirements(lines):
    """Return the requirements of pip as conda names them: names and their versions."""
    parsed = [Requirement(line) for line in lines if not line.startswith("bayou[")]
    return {CONDA_NAMES.get(entry.name, entry.name): entry.specifier for entry in parsed}


def test_the_recipe_requires_what_pyproject_requires(recipe):
    project = PYPROJECT["project"]
    lines = dict(line.partition(" ")[::2] for line in recipe["requirements"]["run"])
    python = lines.pop("python").replace("${{ python_min }}", recipe["context"]["python_min"])
    assert SpecifierSet(python) == SpecifierSet(project["requires-python"])
    assert {name: SpecifierSet(version) for name, version in lines.items()} == conda_requirements(
        project["dependencies"]
    )
    assert set(recipe["requirements"]["run_constraints"]) == set(
        conda_requirements(project["optional-dependencies"]["lab"])
    )
    (backend,) = [line for line in recipe["requirements"]["host"] if line.startswith("hatchling")]
    assert Requirement(backend) == Requirement(PYPROJECT["build-system"]["requires"][0])


def test_the_recipe_says_what_pyproject_says(recipe):
    project = PYPROJECT["project"]
    assert recipe["about"]["summary"] == project["description"]
    assert recipe["about"]["license"] == project["license"]
    assert recipe["about"]["homepage"] == project["urls"]["Homepage"]
    assert recipe["build"]["python"]["entry_points"] == [
        f"{name} = {target}" for name, target in project["scripts"].items()
    ]
    zenodo = json.loads((ROOT / ".zenodo.json").read_text(encoding="utf-8"))
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert (zenodo["title"], zenodo["license"]) == (citation["title"], citation["license"])
    assert zenodo["keywords"] == citation["keywords"]
    assert [entry["name"] for entry in zenodo["creators"]] == [
        entry["name"] for entry in citation["authors"]
    ]


def test_the_hash_of_the_published_file_is_written_to_the_recipe(project, tmp_path):
    sdist = tmp_path / "bayou-0.1.0.tar.gz"
    sdist.write_bytes(b"sdist")
    release.set_recipe(sdist, project)
    text = (project / "recipe/recipe.yaml").read_text(encoding="utf-8")
    assert hashlib.sha256(b"sdist").hexdigest() in text
    with pytest.raises(release.ReleaseError, match=r"expected bayou-0\.1\.0\.tar\.gz"):
        release.set_recipe(tmp_path / "bayou-0.2.0.tar.gz", project)


# --- the workflows ------------------------------------------------------------------------------


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_every_action_is_pinned_by_its_commit(path):
    text = path.read_text(encoding="utf-8")
    uses = re.findall(r"uses: (\S+)(.*)", text)
    assert uses
    for action, comment in uses:
        name, _, commit = action.partition("@")
        is_pinned = re.fullmatch(r"[0-9a-f]{40}", commit) and re.fullmatch(
            r"  # v\d+\.\d+\.\d+", comment
        )
        assert bool(is_pinned) == (name not in NOT_PINNED), action


def test_one_action_has_one_commit():
    pins = {
        tuple(action.split("@"))
        for path in WORKFLOWS
        for action in re.findall(r"uses: (\S+)", path.read_text(encoding="utf-8"))
    }
    assert len(pins) == len({name for name, _ in pins})


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_a_workflow_may_read_only_unless_a_job_says_more(path):
    workflow = yaml.safe_load(path.read_text(encoding="utf-8"))
    assert workflow["permissions"] == {"contents": "read"}
    for job in workflow["jobs"].values():
        assert job["timeout-minutes"] <= 120
        for step in job["steps"]:
            # An expression in a script is replaced before the shell reads it, whatever it holds.
            allowed = "${{ matrix." if path.name == "ci.yml" else None
            script = step.get("run", "")
            assert "${{" not in script or (allowed and allowed in script), script


def test_what_is_published_was_built_once_and_tried():
    jobs = yaml.safe_load((ROOT / ".github/workflows/release.yml").read_text(encoding="utf-8"))[
        "jobs"
    ]
    order = ["build", "try", "testpypi", "fetch", "pypi", "github"]
    assert list(jobs) == order
    assert [jobs[name].get("needs") for name in order] == [None, *order[:-1]]
    builders = [name for name, job in jobs.items() if "-m build" in str(job)]
    assert builders == ["build"]
    signers = {name: job["permissions"] for name, job in jobs.items() if "permissions" in job}
    assert signers == {
        "testpypi": {"id-token": "write"},
        "pypi": {"id-token": "write"},
        "github": {"contents": "write"},
    }
    for name in ("testpypi", "pypi"):
        (step,) = [step for step in jobs[name]["steps"] if "gh-action-pypi-publish" in step["uses"]]
        assert step["with"]["attestations"] is True
        assert not {"password", "user"} & set(step["with"])
        assert jobs[name]["environment"]["name"] == name
    assert jobs["pypi"]["if"] == "github.ref_type == 'tag'"
    pythons = [
        line.rpartition(" ")[2]
        for line in PYPROJECT["project"]["classifiers"]
        if re.search(r":: 3\.\d+$", line)
    ]
    assert jobs["try"]["strategy"]["matrix"]["python"] == pythons


def test_dependabot_looks_at_the_actions_and_the_pins():
    settings = yaml.safe_load((ROOT / ".github/dependabot.yml").read_text(encoding="utf-8"))
    assert settings["version"] == 2
    assert {entry["package-ecosystem"] for entry in settings["updates"]} == {
        "github-actions",
        "pip",
    }
