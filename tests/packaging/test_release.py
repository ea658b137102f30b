"""A release: one version in all files, notes from the changelog, a workflow that publishes what it
tested.
"""

import hashlib
import json
import os
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
    for name, pattern in release.PLACES.items():
        release.set_value(tmp_path, name, pattern, "0.1.0")
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
    release.bump("1.0.0", "2026-12-03", project)  # the tag is made some days later
    assert release.newest_entry(project) == ("1.0.0", "2026-12-03")
    release.check("v1.0.0", project)
    assert json.loads((project / ".zenodo.json").read_text(encoding="utf-8"))["version"] == "1.0.0"
    with pytest.raises(release.ReleaseError, match="the tag is v1.0.1"):
        release.check("v1.0.1", project)
    with pytest.raises(release.ReleaseError, match="1.0.0 of 2026-12-03; add what has changed"):
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


# --- the site of all versions ---------------------------------------------------------------------


@pytest.fixture
def built(tmp_path):
    """What Sphinx writes, in small."""
    folder = tmp_path / "built"
    (folder / "_static").mkdir(parents=True)
    (folder / ".doctrees").mkdir()
    for name in ("index.html", "404.html", "_static/site.js"):
        (folder / name).write_text("of 0.1.0", encoding="utf-8")
    return folder


def site_of(version, project, built, pages):
    text = (project / "src/bayou/__init__.py").read_text(encoding="utf-8")
    name = "src/bayou/__init__.py"
    (project / name).write_text(
        re.sub(r'__version__ = ".*"', f'__version__ = "{version}"', text), encoding="utf-8"
    )
    for path in (built / "index.html", built / "404.html"):
        path.write_text(f"of {version}", encoding="utf-8")
    release.add_site(built, pages, project)


def test_the_newest_release_is_latest_and_older_sites_are_kept(project, built, tmp_path):
    pages = tmp_path / "pages"
    latest_after = {}
    for version in ("1.0.0rc1", "1.0.0", "1.10.0", "1.9.1", "2.0.0rc1"):
        site_of(version, project, built, pages)
        latest_after[version] = (pages / "latest" / "index.html").read_text(encoding="utf-8")
        assert (pages / version / "index.html").read_text(encoding="utf-8") == f"of {version}"
    assert latest_after == {
        "1.0.0rc1": "of 1.0.0rc1",  # there is no release yet
        "1.0.0": "of 1.0.0",
        "1.10.0": "of 1.10.0",
        "1.9.1": "of 1.10.0",
        "2.0.0rc1": "of 1.10.0",
    }
    entries = json.loads((pages / "versions.json").read_text(encoding="utf-8"))
    newest_first = ["2.0.0rc1", "1.10.0", "1.9.1", "1.0.0", "1.0.0rc1"]
    assert entries == [{"name": name, "folder": name} for name in newest_first]
    assert (pages / "404.html").read_text(encoding="utf-8") == "of 1.10.0"
    assert "latest/index.html" in (pages / "index.html").read_text(encoding="utf-8")
    assert (pages / ".nojekyll").exists()
    assert (pages / "1.0.0" / "_static" / "site.js").exists()
    assert not (pages / "1.0.0" / ".doctrees").exists()


def test_a_site_that_is_built_again_replaces_its_files(project, built, tmp_path):
    pages = tmp_path / "pages"
    (built / "gone.html").touch()
    site_of("1.0.0", project, built, pages)
    (built / "gone.html").unlink()
    site_of("1.0.0", project, built, pages)
    assert not (pages / "1.0.0" / "gone.html").exists()
    assert not (pages / "latest" / "gone.html").exists()
    with pytest.raises(release.ReleaseError, match=r"no index\.html: build the site"):
        release.add_site(tmp_path, pages, project)


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
    assert recipe["about"]["documentation"] == project["urls"]["Documentation"]
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
    assert {name: job.get("needs") for name, job in jobs.items()} == {
        "build": None,
        "docs": None,
        "try": "build",
        "testpypi": ["try", "docs"],
        "fetch": "testpypi",
        "pypi": "fetch",
        "github": "pypi",
        "site": "github",
    }
    builders = [name for name, job in jobs.items() if "-m build" in str(job)]
    assert builders == ["build"]
    signers = {name: job["permissions"] for name, job in jobs.items() if "permissions" in job}
    assert signers == {
        "testpypi": {"id-token": "write"},
        "pypi": {"id-token": "write"},
        "github": {"contents": "write"},
        "site": {"contents": "write"},
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


def jobs_of(path):
    return yaml.safe_load(path.read_text(encoding="utf-8"))["jobs"]


def shells():
    """Every script of bash in the workflows, with the name of its job."""
    for path in WORKFLOWS:
        for name, job in jobs_of(path).items():
            if name != "windows":
                for step in job["steps"]:
                    if "run" in step:
                        yield pytest.param(step["run"], id=f"{path.stem}-{name}-{step['run'][:20]}")


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
@pytest.mark.parametrize("script", list(shells()))
def test_the_scripts_of_the_workflows_are_bash(script):
    script = re.sub(r"\$\{\{.*?\}\}", "value", script)
    done = subprocess.run(["bash", "-n"], input=script, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def ancestors(jobs, name):
    """The jobs that have ended before a job begins."""
    needs = jobs[name].get("needs", [])
    needs = [needs] if isinstance(needs, str) else needs
    return {*needs, *(earlier for one in needs for earlier in ancestors(jobs, one))}


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_a_job_takes_only_what_a_job_before_it_has_made(path):
    jobs = jobs_of(path)
    made = {
        name: {step["with"]["name"] for step in job["steps"] if "upload-artifact" in str(step)}
        for name, job in jobs.items()
    }
    for name, job in jobs.items():
        before = ancestors(jobs, name)
        assert before <= set(jobs)
        present = {artifact for earlier in before for artifact in made[earlier]}
        for step in job["steps"]:
            if "download-artifact" in step.get("uses", ""):
                assert step["with"]["name"] in present
            names = set(re.findall(r"matrix\.(\w+)", str(step)))
            assert names <= set(job.get("strategy", {}).get("matrix", {}))


def test_a_job_that_may_write_runs_no_code_of_other_projects():
    """A token that can change the repository is in no process that pip has installed."""
    for path in WORKFLOWS:
        for job in jobs_of(path).values():
            if job.get("permissions", {}).get("contents") == "write":
                assert not re.search(r"\bpip\b|\bmake\b", str(job["steps"]))


@pytest.mark.skipif(shutil.which("git") is None, reason="needs git")
@pytest.mark.skipif(sys.platform == "win32", reason="the job runs on Linux")
def test_the_job_of_the_site_pushes_to_the_branch_of_the_pages(tmp_path, built):
    """The script of the workflow, with a folder in the place of GitHub: twice, and unchanged."""
    (script,) = [
        step["run"]
        for step in jobs_of(ROOT / ".github/workflows/release.yml")["site"]["steps"]
        if "run" in step
    ]
    remote = tmp_path / "bayou-ml" / "bayou.git"
    subprocess.run(["git", "init", "--quiet", "--bare", remote], check=True)
    commands = tmp_path / "commands"
    commands.mkdir()
    (commands / "python").symlink_to(sys.executable)
    (commands / "gh").write_text("#!/bin/sh\ntest \"$*\" = 'auth setup-git'\n", encoding="utf-8")
    (commands / "gh").chmod(0o755)
    environment = os.environ | {
        "PATH": f"{commands}{os.pathsep}{os.environ['PATH']}",
        "GITHUB_SERVER_URL": tmp_path.as_uri(),
        "GITHUB_REPOSITORY": "bayou-ml/bayou",
        "GITHUB_REF_NAME": f"v{bayou.__version__}",
    }
    log = ["git", "-C", str(remote), "log", "--format=%s", "gh-pages"]
    for text, commits in (("one", 1), ("two", 2), ("two", 2)):
        checkout = tmp_path / f"checkout-{text}-{commits}-{len(list(tmp_path.iterdir()))}"
        for name in ("src/bayou/__init__.py", "docs/release.py"):
            (checkout / name).parent.mkdir(parents=True)
            shutil.copy(ROOT / name, checkout / name)
        (built / "index.html").write_text(text, encoding="utf-8")
        shutil.copytree(built, checkout / "site")
        subprocess.run(["bash", "-e", "-c", script], cwd=checkout, env=environment, check=True)
        done = subprocess.run(log, capture_output=True, text=True, check=True)
        assert done.stdout.splitlines() == [f"Add the site of v{bayou.__version__}"] * commits
    show = ["git", "-C", str(remote), "show"]
    for folder in (bayou.__version__, "latest"):
        page = subprocess.run(
            [*show, f"gh-pages:{folder}/index.html"], capture_output=True, text=True, check=True
        )
        assert page.stdout == "two"
