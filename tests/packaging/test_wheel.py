"""The wheel, built from the sdist and installed where there are torch, numpy and safetensors and
nothing else.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import venv
import zipfile
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
HERE = Path(__file__).parent
CORE = ("torch", "numpy", "safetensors")

pytestmark = pytest.mark.slow


def run(*words: str | Path, cwd: Path, check: bool = True) -> subprocess.CompletedProcess[str]:
    """A command that sees no PYTHONPATH."""
    plain = {
        key: value
        for key, value in os.environ.items()
        if not key.startswith(("PYTHON", "MYPY", "PIP_"))
    }
    done = subprocess.run(
        [*map(str, words)], cwd=cwd, env=plain, capture_output=True, text=True, timeout=600
    )
    assert not check or done.returncode == 0, done.stdout + done.stderr
    return done


def required(names: tuple[str, ...]) -> dict[str, Distribution]:
    """The installed distributions that these need, themselves included."""
    found: dict[str, Distribution] = {}
    waiting = list(names)
    while waiting:
        name = waiting.pop()
        try:
            found[name] = distribution(name)
        except PackageNotFoundError:  # a CPU build of torch does without its CUDA libraries
            continue
        needs = [Requirement(line) for line in found[name].requires or ()]
        needs = [one for one in needs if one.marker is None or one.marker.evaluate({"extra": ""})]
        waiting += [one.name for one in needs if one.name not in found]
    return found


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """sdist and wheel by suffix; ``build`` makes the wheel from the sdist, which must therefore be
    enough.
    """
    folder = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", folder, ROOT, cwd=folder)
    return {path.suffix: path for path in folder.iterdir() if path.suffix in (".gz", ".whl")}


@pytest.fixture(scope="module")
def python(built: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of an environment that has the wheel; what it depends on is linked, since
    torch is large.
    """
    folder = tmp_path_factory.mktemp("env")
    venv.create(folder, with_pip=False, symlinks=True)
    interpreter = folder / "bin" / "python"
    (site,) = folder.glob("lib/python*/site-packages")
    for one in required(CORE).values():
        for top in {path.parts[0] for path in one.files or ()} - {"..", "__pycache__"}:
            link, target = site / top, Path(str(one.locate_file(top)))
            if not link.exists() and target.exists():
                link.symlink_to(target)
    pip = [
        sys.executable,
        "-m",
        "pip",
        "--python",
        interpreter,
        "install",
        "--quiet",
        "--disable-pip-version-check",
    ]
    run(*pip, "--no-deps", "--no-index", built[".whl"], cwd=folder)
    return interpreter


def test_the_archives_hold_what_they_need(built: dict[str, Path]) -> None:
    with zipfile.ZipFile(built[".whl"]) as wheel:
        names = set(wheel.namelist())
        (metadata,) = (
            wheel.read(name).decode() for name in names if name.endswith(".dist-info/METADATA")
        )
    source = {
        path.relative_to(ROOT / "src").as_posix() for path in (ROOT / "src" / "bayou").rglob("*.py")
    }
    others = {"bayou/py.typed", "bayou/app/report/page.html.j2", "bayou/app/report/style.css"}
    assert {name for name in names if ".dist-info/" not in name} == source | others
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in names)
    assert "Project-URL: Changelog, https://" in metadata
    with tarfile.open(built[".gz"]) as sdist:
        held = {name.partition("/")[2] for name in sdist.getnames()}
    files = (
        "pyproject.toml",
        "README.md",
        "LICENSE",
        "CHANGELOG.md",
        "CITATION.cff",
        "SECURITY.md",
        "constraints.txt",
    )
    assert held >= {*files, "src/bayou/py.typed", "tests/conftest.py"}
    assert not any(name.startswith((".ci", ".git/", ".venv", "demo-output")) for name in held)


def test_the_core_fits_predicts_saves_and_loads(python: Path, tmp_path: Path) -> None:
    run(python, "-W", "ignore", HERE / "user_program.py", cwd=tmp_path)


def test_each_missing_extra_says_how_to_install_it(python: Path, tmp_path: Path) -> None:
    (tmp_path / "table.parquet").write_bytes(b"PAR1")
    run(python, "-W", "ignore", HERE / "without_extras.py", cwd=tmp_path)
    for command in ([python.with_name("bayou")], [python, "-m", "bayou"]):
        done = run(*command, "--help", cwd=tmp_path, check=False)
        assert (done.returncode, done.stdout) == (1, "")
        assert (
            done.stderr
            == "The command line needs typer, which is not installed: pip install 'bayou[lab]'\n"
        )


@pytest.mark.parametrize(
    "checker",
    [
        ("mypy", "--strict", "--cache-dir=cache", "--python-executable"),
        ("basedpyright", "--level=error", "--pythonpath"),
    ],
    ids=lambda words: words[0],
)
def test_a_program_of_a_user_has_no_type_errors(
    checker: tuple[str, ...], python: Path, tmp_path: Path
) -> None:
    """Types are those of the installed wheel (py.typed), and a wrong one is found."""
    program = tmp_path / "program.py"
    text = (HERE / "user_program.py").read_text(encoding="utf-8")
    name, *options = checker
    command = [Path(sys.executable).with_name(name), *options, python, program]
    program.write_text(
        text + 'assert_type(bayou.load("a", net()), int)\nbayou.MAP(steps="many")\n',
        encoding="utf-8",
    )
    found = run(*command, cwd=tmp_path, check=False)
    lines = text.count("\n") + 1, text.count("\n") + 2
    errors = [line for line in found.stdout.splitlines() if "error:" in line]
    assert len(errors) == 2, found.stdout + found.stderr
    assert all(f"program.py:{line}:" in error for line, error in zip(lines, errors, strict=True)), (
        found.stdout
    )
