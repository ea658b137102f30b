"""The wheel, built from the sdist and installed where there are torch, numpy and safetensors and
nothing else.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import venv
import zipfile
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import bayou

ROOT = Path(__file__).parents[2]
HERE = Path(__file__).parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
CORE = ("torch", "numpy", "safetensors")
LAB = ("typer", "rich", "matplotlib", "pillow", "scikit-learn", "jinja2")
# 4.0 MB of Python with its docstrings are 1.27 MB when they are compressed file by file (0.80 MB of it code): a wheel is
# a zip file, which knows no better compression that pip reads everywhere.
MAX_WHEEL_BYTES = 1_400_000
MAX_SDIST_BYTES = 1_400_000
SDIST = {
    ".gitignore",
    "CHANGELOG.md",
    "CITATION.cff",
    "CODE_OF_CONDUCT.md",
    "CONTRIBUTING.md",
    "LICENSE",
    "PKG-INFO",
    "README.md",
    "SECURITY.md",
    "constraints.txt",
    "docs/readme_hook.py",
    "pyproject.toml",
    "tests/packaging/first_use.py",
}

# Code, templates and styles of the report, references of `bayou score`, and the mark of types.
SOURCE_SUFFIXES = {".py", ".j2", ".css", ".json", ".npz", ".typed"}

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


def environment(folder: Path, wheel: Path, names: tuple[str, ...]) -> Path:
    """Make an environment of this Python that has the wheel and links to what it depends on."""
    venv.create(folder, with_pip=False, symlinks=True)
    interpreter = folder / "bin" / "python"
    (site,) = folder.glob("lib/python*/site-packages")
    for one in required(names).values():
        for top in {path.parts[0] for path in one.files or ()} - {"..", "__pycache__"}:
            link, target = site / top, Path(str(one.locate_file(top)))
            if not link.exists() and target.exists():
                link.symlink_to(target)
    pip = [sys.executable, "-m", "pip", "--python", interpreter, "install", "--quiet"]
    run(*pip, "--disable-pip-version-check", "--no-deps", "--no-index", wheel, cwd=folder)
    return interpreter


@pytest.fixture(scope="module")
def python(built: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of an environment that has the wheel; what it depends on is linked, since
    torch is large.
    """
    return environment(tmp_path_factory.mktemp("env"), built[".whl"], CORE)


def other_pythons() -> list[str]:
    """The other supported releases of Python on this machine, each by a command or a path."""
    versions = PROJECT["classifiers"]
    supported = [line.rpartition(" ")[2] for line in versions if re.search(r":: 3\.\d+$", line)]
    this = f"3.{sys.version_info.minor}"
    shims = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    places = [*(str(path) for path in shims.glob("*/bin")), os.environ.get("PATH", "")]
    candidates = [
        shutil.which(f"python{version}", path=place)
        for version in supported
        if version != this
        for place in places
    ]
    works = {}
    for path in filter(None, candidates):
        shown = subprocess.run([path, "-V"], capture_output=True, text=True, check=False).stdout
        works.setdefault(shown.split()[-1].rpartition(".")[0] if shown else "", path)
    return [path for version, path in sorted(works.items()) if version in supported]


def test_the_archives_hold_what_they_need(built: dict[str, Path]) -> None:
    with zipfile.ZipFile(built[".whl"]) as wheel:
        names = set(wheel.namelist())
        (metadata,) = (
            wheel.read(name).decode() for name in names if name.endswith(".dist-info/METADATA")
        )
    source = {
        path.relative_to(ROOT / "src").as_posix()
        for path in (ROOT / "src" / "bayou").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert {Path(name).suffix for name in source} == SOURCE_SUFFIXES
    assert {name for name in names if ".dist-info/" not in name} == source
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in names)
    assert "Project-URL: Changelog, https://" in metadata
    assert "](docs/" not in metadata  # links of the README lead to the repository
    assert "https://raw.githubusercontent.com/bayou-ml/bayou/main/docs/pictures/" in metadata
    assert built[".whl"].stat().st_size <= MAX_WHEEL_BYTES
    assert built[".gz"].stat().st_size <= MAX_SDIST_BYTES
    with tarfile.open(built[".gz"]) as sdist:
        held = {member.name.partition("/")[2] for member in sdist.getmembers() if member.isfile()}
    assert held == SDIST | {f"src/{name}" for name in source}


def test_a_reader_of_the_readme_can_do_what_it_says(built: dict[str, Path], tmp_path: Path) -> None:
    """Its example, the commands and ``bayou verify``, where there is nothing but the lab extra."""
    interpreter = environment(tmp_path / "env", built[".whl"], CORE + LAB)
    done = run(interpreter, HERE / "first_use.py", cwd=tmp_path)
    assert done.stdout.splitlines()[-1].startswith(f"bayou {bayou.__version__} works on Python 3.")
    assert "ok: bayou verify" in done.stdout


@pytest.mark.parametrize("path", other_pythons(), ids=lambda path: Path(path).name)
def test_other_pythons_install_the_wheel_and_compile_it(
    path: str, built: dict[str, Path], tmp_path: Path
) -> None:
    """Without torch: metadata, the syntax of every file, and the import, which is lazy."""
    run(path, "-m", "venv", tmp_path / "env", cwd=tmp_path)
    interpreter = tmp_path / "env" / "bin" / "python"
    pip = [interpreter, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index"]
    run(*pip, built[".whl"], cwd=tmp_path)  # refused where Requires-Python excludes this one
    (package,) = (tmp_path / "env").glob("lib/python*/site-packages/bayou")
    run(interpreter, "-W", "error", "-m", "compileall", "-q", "-f", package, cwd=tmp_path)
    program = "import bayou; print(bayou.__version__, len(bayou.list_methods()))"
    assert run(interpreter, "-c", program, cwd=tmp_path).stdout.split()[0] == bayou.__version__


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
