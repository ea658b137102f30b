"""Make a release: set its version everywhere, check that all files agree, write its notes.

    python -m docs.release bump 1.0.0                set the version, and the date of today
    python -m docs.release check                     whether all files name one version
    python -m docs.release check v1.0.0              and whether it is that of a tag, with its date
    python -m docs.release notes [1.0.0]             print the notes of a release, or the newest
    python -m docs.release recipe dist/bayou-1.0.0.tar.gz    set the SHA-256 of the conda recipe
    python -m docs.release next 1.1.0                begin the changelog of the next release
    python -m docs.release site docs/_build/html pages    add a built site to those of all versions

``docs/releasing.md`` says when. The version of the code is ``__version__`` of
``src/bayou/__init__.py``, which the build reads; the other files repeat it.
"""

from __future__ import annotations

import argparse
import datetime
import hashlib
import json
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
VERSION = re.compile(r"\d+\.\d+\.\d+((a|b|rc)\d+)?")
UNRELEASED = "unreleased"
HEADING = re.compile(r"^## \[(?P<version>[^\]]+)\] - (?P<date>\S+)$", re.MULTILINE)
# The line of each file that repeats the version, with the version as the group.
PLACES = {
    "src/bayou/__init__.py": r'^__version__ = "([^"]+)"$',
    "CITATION.cff": r"^version: (\S+)$",
    ".zenodo.json": r'^  "version": "([^"]+)",$',
    "recipe/recipe.yaml": r"^  version: (\S+)$",
}
CHANGELOG = "CHANGELOG.md"
CITATION_DATE = r"^date-released: (\S+)$"
RECIPE_SHA256 = r"^  sha256: (\S+)$"
LATEST = "latest"  # the folder of the site of the newest release
TO_LATEST = f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<title>bayou</title>
<meta http-equiv="refresh" content="0; url={LATEST}/index.html">
</head>
<body><a href="{LATEST}/index.html">bayou: the site of the newest release</a></body>
</html>
"""


class ReleaseError(ValueError):
    """The files do not allow what was asked for."""


def read(root: Path, name: str) -> str:
    """Return the text of a file of the project."""
    return (root / name).read_text(encoding="utf-8")


def value_in(root: Path, name: str, pattern: str) -> str:
    """Return the group of the only line of a file that matches a pattern.

    Raises:
        ReleaseError: if no line or several lines match.
    """
    matches = re.findall(pattern, read(root, name), re.MULTILINE)
    if len(matches) != 1:
        raise ReleaseError(f"{name} has {len(matches)} lines that match {pattern}, expected one")
    return str(matches[0])


def set_value(root: Path, name: str, pattern: str, value: str) -> None:
    """Replace the group of the only line of a file that matches a pattern."""
    value_in(root, name, pattern)
    text = read(root, name)
    match = re.search(pattern, text, re.MULTILINE)
    if match is not None:
        text = text[: match.start(1)] + value + text[match.end(1) :]
    (root / name).write_text(text, encoding="utf-8")


def newest_entry(root: Path) -> tuple[str, str]:
    """Return version and date of the first section of the changelog."""
    match = HEADING.search(read(root, CHANGELOG))
    if match is None:
        raise ReleaseError(f"{CHANGELOG} has no heading such as '## [1.0.0] - 2026-01-31'")
    return match["version"], match["date"]


def disagreements(root: Path = ROOT) -> list[str]:
    """Return one sentence for each file whose version is not ``__version__``.

    Args:
        root: the folder of the project.
    """
    expected = value_in(root, "src/bayou/__init__.py", PLACES["src/bayou/__init__.py"])
    versions = {name: value_in(root, name, pattern) for name, pattern in PLACES.items()}
    versions[CHANGELOG], date = newest_entry(root)
    sentences = [
        f"{name} has version {version}, expected {expected}"
        for name, version in versions.items()
        if version != expected
    ]
    cited = value_in(root, "CITATION.cff", CITATION_DATE)
    if date not in (UNRELEASED, cited):
        sentences.append(f"CITATION.cff has the date {cited}, {CHANGELOG} has {date}")
    return sentences


def check(tag: str | None = None, root: Path = ROOT) -> None:
    """Raise an error if the files disagree, or if a tag is not that of their version.

    Args:
        tag: such as "v1.0.0": the changelog must have its version with a date; None for none.
        root: the folder of the project.

    Raises:
        ReleaseError: states each disagreement.
    """
    sentences = disagreements(root)
    version, date = newest_entry(root)
    if tag is not None and tag != f"v{version}":
        sentences.append(f"the tag is {tag}, and the newest entry of {CHANGELOG} is {version}")
    if tag is not None and date == UNRELEASED:
        sentences.append(f"{CHANGELOG} says that {version} is unreleased: run bump {version}")
    if sentences:
        raise ReleaseError("; ".join(sentences))


def bump(version: str, date: str | None = None, root: Path = ROOT) -> None:
    """Set the version and the date in all files; of a version that is set already, the date.

    Args:
        version: such as "1.0.0" or "1.0.0rc1".
        date: such as "2026-01-31"; None for today.
        root: the folder of the project.

    Raises:
        ReleaseError: for what is no version, or if the newest entry of the changelog has been
            released already.
    """
    if not VERSION.fullmatch(version):
        raise ReleaseError(f"got the version {version!r}, expected one like 1.0.0 or 1.0.0rc1")
    before, released = newest_entry(root)
    if released != UNRELEASED and before != version:  # the same version: a new date only
        raise ReleaseError(
            f"the newest entry of {CHANGELOG} is {before} of {released}; add what has changed since "
            f"then: next {version}"
        )
    day = date or datetime.date.today().isoformat()
    for name, pattern in PLACES.items():
        set_value(root, name, pattern, version)
    set_value(root, "CITATION.cff", CITATION_DATE, day)
    text = read(root, CHANGELOG).replace(
        f"## [{before}] - {released}", f"## [{version}] - {day}", 1
    )
    (root / CHANGELOG).write_text(text, encoding="utf-8")


def begin_next(version: str, root: Path = ROOT) -> None:
    """Add an empty, unreleased entry to the changelog, and set its version in all files.

    Args:
        version: of the next release.
        root: the folder of the project.

    Raises:
        ReleaseError: for what is no version, or if the newest entry is unreleased.
    """
    if not VERSION.fullmatch(version):
        raise ReleaseError(f"got the version {version!r}, expected one like 1.1.0")
    before, released = newest_entry(root)
    if released == UNRELEASED:
        raise ReleaseError(f"the entry {before} of {CHANGELOG} is unreleased already")
    text = read(root, CHANGELOG)
    position = text.index(f"## [{before}]")
    entry = f"## [{version}] - {UNRELEASED}\n\n"
    (root / CHANGELOG).write_text(text[:position] + entry + text[position:], encoding="utf-8")
    for name, pattern in PLACES.items():
        set_value(root, name, pattern, version)


def notes(version: str, root: Path = ROOT) -> str:
    """Return the section of the changelog of a release, without its heading.

    Args:
        version: such as "1.0.0".
        root: the folder of the project.

    Raises:
        ReleaseError: if the changelog has no section of that version, or an empty one.
    """
    text = read(root, CHANGELOG)
    headings = list(HEADING.finditer(text))
    for number, heading in enumerate(headings):
        if heading["version"] == version:
            following = headings[number + 1 :]
            body = text[heading.end() : following[0].start() if following else len(text)].strip()
            if not body:
                raise ReleaseError(f"the section {version} of {CHANGELOG} is empty")
            return re.sub(r"^###", "##", body, flags=re.MULTILINE) + "\n"
    known = ", ".join(heading["version"] for heading in headings)
    raise ReleaseError(f"{CHANGELOG} has no section {version}; it has {known}")


def set_recipe(sdist: Path, root: Path = ROOT) -> None:
    """Set the SHA-256 of the sdist in the conda recipe.

    Args:
        sdist: the file that was published.
        root: the folder of the project.

    Raises:
        ReleaseError: if the file is not the sdist of the version of the recipe.
    """
    version = value_in(root, "recipe/recipe.yaml", PLACES["recipe/recipe.yaml"])
    if sdist.name != f"bayou-{version}.tar.gz":
        raise ReleaseError(f"got {sdist.name}, expected bayou-{version}.tar.gz")
    digest = hashlib.sha256(sdist.read_bytes()).hexdigest()
    set_value(root, "recipe/recipe.yaml", RECIPE_SHA256, digest)


def release_order(version: str) -> tuple[int, ...]:
    """Return what versions are sorted by: 1.0.0a1, 1.0.0b1, 1.0.0rc1, 1.0.0, 1.0.1.

    Args:
        version: such as "1.0.0rc1".
    """
    match = re.fullmatch(r"(\d+)\.(\d+)\.(\d+)(?:(a|b|rc)(\d+))?", version)
    if match is None:
        raise ReleaseError(f"got the version {version!r}, expected one like 1.0.0 or 1.0.0rc1")
    *numbers, stage, count = match.groups()
    return (*map(int, numbers), ("a", "b", "rc", None).index(stage), int(count or 0))


def is_final(version: str) -> bool:
    """Return whether a version is a release, and no candidate of one."""
    return re.fullmatch(r"[\d.]+", version) is not None


def add_site(built: Path, pages: Path, root: Path = ROOT) -> None:
    """Add the site of this version to the folder that has the sites of all versions.

    It becomes ``pages/VERSION``; that of the newest release is ``pages/latest``, too. The root has
    ``versions.json``, which the switch of every version reads, the page of a missing address, a
    page that leads to ``latest``, and the mark that keeps GitHub from leaving out folders whose
    names begin with "_".

    Args:
        built: the folder that Sphinx has written.
        pages: the folder of all versions; created if it is missing.
        root: the folder of the project.

    Raises:
        ReleaseError: if there is no site in ``built``.
    """
    version = value_in(root, "src/bayou/__init__.py", PLACES["src/bayou/__init__.py"])
    if not (built / "index.html").exists():
        raise ReleaseError(f"{built} has no index.html: build the site with make docs")
    pages.mkdir(parents=True, exist_ok=True)
    folders = [path.name for path in pages.iterdir() if VERSION.fullmatch(path.name)]
    versions = sorted({*folders, version}, key=release_order, reverse=True)
    newest = next(filter(is_final, versions), versions[0])
    for folder in (version, LATEST) if version == newest else (version,):
        shutil.rmtree(pages / folder, ignore_errors=True)
        shutil.copytree(built, pages / folder, ignore=shutil.ignore_patterns(".*"))
    entries = [{"name": name, "folder": name} for name in versions]
    (pages / "versions.json").write_text(json.dumps(entries, indent=1) + "\n", encoding="utf-8")
    (pages / "index.html").write_text(TO_LATEST, encoding="utf-8")
    shutil.copyfile(pages / LATEST / "404.html", pages / "404.html")
    (pages / ".nojekyll").touch()


def main(arguments: list[str] | None = None) -> int:
    """Run a command; an error is one sentence."""
    parser = argparse.ArgumentParser(
        prog="python -m docs.release",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True)
    for name in ("bump", "next"):
        commands.add_parser(name).add_argument("value", metavar="VERSION")
    commands.add_parser("notes").add_argument("value", metavar="VERSION", nargs="?")
    commands.add_parser("recipe").add_argument("value", metavar="SDIST")
    commands.add_parser("check").add_argument("value", metavar="TAG", nargs="?")
    site = commands.add_parser("site")
    site.add_argument("value", metavar="BUILT")
    site.add_argument("pages", metavar="PAGES")
    options = parser.parse_args(arguments)
    actions: dict[str, Callable[[Any], object]] = {
        "bump": bump,
        "next": begin_next,
        "recipe": lambda path: set_recipe(Path(path)),
        "notes": lambda version: sys.stdout.write(notes(version or newest_entry(ROOT)[0])),
        "check": check,
        "site": lambda built: add_site(Path(built), Path(options.pages)),
    }
    try:
        actions[options.command](options.value)
    except ReleaseError as error:
        print(f"release: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
