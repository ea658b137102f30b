"""Print what each extra of bayou installs and what it weighs: the table of ``docs/extras.md``.

    python -m docs.extras

The sizes are those of the installed files of this environment without compiled caches, on the disk
and not in the download. A package that is not installed is named.
"""

from __future__ import annotations

import re
import tomllib
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path

from packaging.requirements import Requirement

PROJECT = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text(encoding="utf-8"))[
    "project"
]
USER_EXTRAS = (
    "lab",
    "parquet",
    "botorch",
    "pandas",
    "hub",
    "mlflow",
    "sbi",
    "serve",
    "onnx",
)  # the others are for development
LARGEST = 4  # packages that a row names with their size


def normalized(name: str) -> str:
    """Return the name of a package as indexes compare it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def size(package: Distribution) -> int:
    """Return the bytes of the files of a package."""
    paths = [Path(str(file.locate())) for file in package.files or () if file.suffix != ".pyc"]
    return sum(path.stat().st_size for path in paths if path.is_file())


def applies(requirement: Requirement, extras: set[str]) -> bool:
    """Return whether a requirement is installed here together with these extras."""
    marker = requirement.marker
    return marker is None or any(marker.evaluate({"extra": extra}) for extra in {"", *extras})


def installed(requirements: list[str], sizes: dict[str, int | None]) -> dict[str, int | None]:
    """Return the bytes of all packages that requirements bring in; None if not installed here.

    Args:
        requirements: as in ``pyproject.toml``.
        sizes: of packages that are counted already; it is extended.
    """
    for text in requirements:
        requirement = Requirement(text)
        name = normalized(requirement.name)
        if name in sizes:
            continue
        try:
            package = distribution(name)
        except PackageNotFoundError:
            sizes[name] = None
            continue
        sizes[name] = size(package)
        needed = [Requirement(line) for line in package.requires or ()]
        selected = [one for one in needed if applies(one, requirement.extras)]
        installed([str(one).partition(";")[0] for one in selected], sizes)
    return sizes


def row(name: str, sizes: dict[str, int | None]) -> str:
    """Return a row of the table: packages, megabytes, the largest ones."""
    known = {package: count for package, count in sizes.items() if count is not None}
    largest = sorted(known, key=lambda package: known[package], reverse=True)[:LARGEST]
    text = ", ".join(f"{package} {known[package] / 1e6:.1f}" for package in largest)
    missing = sorted(set(sizes) - set(known))
    note = f"; not installed here: {', '.join(missing)}" if missing else ""
    return f"| {name} | {len(sizes)} | {sum(known.values()) / 1e6:.0f} | {text}{note} |"


def table() -> str:
    """Return the table in Markdown."""
    core = installed(PROJECT["dependencies"], {})
    lines = [
        "| | packages | MB on disk | the largest, MB |",
        "|---|---|---|---|",
        row("core", core),
    ]
    for extra in USER_EXTRAS:
        sizes = installed(PROJECT["optional-dependencies"][extra], dict(core))
        new = {name: count for name, count in sizes.items() if name not in core}
        lines.append(row(f"`{extra}`", new))
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
