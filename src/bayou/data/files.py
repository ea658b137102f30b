"""Files of data: where they are looked for, that they are what was published, and how to get them.

A file is looked for in the folder ``root``, then in ``BAYOU_DATA``, then in the cache of the user. Its SHA-256 is
checked each time it is used.
"""

from __future__ import annotations

import contextlib
import hashlib
import http.client
import os
import sys
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

from bayou.data.catalogue import CATALOGUE, DataError, Entry, File, find

VARIABLE = "BAYOU_DATA"
_PIECE = 1 << 20


def cache_dir() -> Path:
    """The folder for downloads and decoded files: ``$XDG_CACHE_HOME/bayou``, or what the platform has for caches."""
    if os.environ.get("XDG_CACHE_HOME"):
        return Path(os.environ["XDG_CACHE_HOME"]) / "bayou"
    if sys.platform == "win32" and os.environ.get("LOCALAPPDATA"):
        return Path(os.environ["LOCALAPPDATA"]) / "bayou" / "cache"
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "bayou"
    return Path.home() / ".cache" / "bayou"


def folders(root: str | Path | None = None) -> list[Path]:
    """Where files are looked for, in this order: ``root``, ``BAYOU_DATA``, the cache."""
    given = [root, os.environ.get(VARIABLE) or None]
    return [*(Path(folder).expanduser() for folder in given if folder is not None), cache_dir()]


def locate(file: File, root: str | Path | None = None) -> Path | None:
    """The path of a file that is there, unchecked; None where it is not."""
    places = (folder / path for folder in folders(root) for path in (file.path, *file.other_paths))
    return next((place for place in places if place.is_file()), None)


def available(entry: Entry, root: str | Path | None = None) -> bool:
    """Whether all files of a data set are there (their contents are checked when they are read)."""
    return any(all(locate(file, root) for file in files) for files in (entry.files, *entry.instead))


def require(entry: Entry, root: str | Path | None = None) -> dict[str, Path]:
    """The checked paths of the files of a data set, by their published path; a DataError says what is missing."""
    for files in (entry.files, *entry.instead):
        if all(locate(file, root) for file in files):
            return {file.path: checked(file, root) for file in files}
    nearly = max((entry.files, *entry.instead), key=lambda files: sum(locate(file, root) is not None for file in files))
    missing = [file.path for file in nearly if locate(file, root) is None]
    where = ", ".join(str(folder) for folder in folders(root))
    public = all(file.urls for file in entry.files)
    download = f", or run `bayou download {entry.name}`, which needs a network" if public else ""
    raise DataError(
        f"the data set {entry.name!r} needs {', '.join(missing)}, looked for in {where}; "
        f"set {VARIABLE} to the folder that holds it{download}"
    )


def checked(file: File, root: str | Path | None = None) -> Path:
    """The path of a file whose size and SHA-256 are the published ones."""
    path = locate(file, root)
    if path is None:
        raise DataError(f"{file.path} is in none of {', '.join(map(str, folders(root)))}; set {VARIABLE}")
    verify(path, file.size, file.sha256)
    return path


def verify(path: Path, size: int, sha256: str) -> None:
    """A DataError unless the file has this size and this SHA-256."""
    got = path.stat().st_size
    if got != size:
        raise DataError(f"{path} has {got:,} bytes, not the {size:,} that were published: damaged or not this file")
    digest = digest_of(path)
    if digest != sha256:
        raise DataError(
            f"{path} has SHA-256 {digest[:12]}…, not {sha256[:12]}… as published: damaged or another file; "
            "delete it and get it again"
        )


def digest_of(path: Path) -> str:
    """SHA-256 of a file."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def download(
    name: str, *, root: str | Path | None = None, report: Callable[[str, int, int], None] | None = None
) -> list[Path]:
    """Get the public files of a data set into ``root`` (the cache by default); nothing else in bayou uses a network.

    A file is checked before it gets its name; Ctrl-C leaves nothing of it, and the next download removes what a
    process that was killed left. ``report`` is called with the file's
    path, the bytes so far and the bytes in all.
    """
    entry = find(name)
    if not entry.files:
        raise DataError(f"{name!r} needs no files: it is made by a program, or comes with scikit-learn")
    without = [file for file in entry.files if not file.urls]
    if without:
        have = ", ".join(other.name for other in CATALOGUE.values() if other.files and all(f.urls for f in other.files))
        where = ", ".join(f"{file.path} ({file.origin})" for file in without)
        raise DataError(
            f"there is no public address for {where}; put it below {cache_dir()}, or set {VARIABLE} to a folder that "
            f"holds it. These can be downloaded: {have}"
        )
    folder = cache_dir() if root is None else Path(root).expanduser()
    return [_fetch(file, folder, report) for file in entry.files]


def _fetch(file: File, folder: Path, report: Callable[[str, int, int], None] | None) -> Path:
    from bayou.files import writing  # and torch with it, which names and addresses do without

    path = folder / file.path
    if path.is_file():
        with contextlib.suppress(DataError):
            verify(path, file.size, file.sha256)
            return path
    failures: list[str] = []
    for url in file.urls:
        try:
            with writing(path, folders=True) as out:
                _copy(url, out, file, report)
            return path
        except DataError as problem:
            failures.append(f"{url}: {problem}")
    raise DataError(f"could not get {file.path} ({'; '.join(failures)}); get it by hand and set {VARIABLE}")


def _copy(url: str, out: IO[bytes], file: File, report: Callable[[str, int, int], None] | None) -> None:
    """What is at an address, if it has the published size and SHA-256."""
    digest, done = hashlib.sha256(), 0
    for piece in _pieces(url):
        done += len(piece)
        if done > file.size:
            raise DataError(f"more than the {file.size:,} bytes that were published")
        out.write(piece)
        digest.update(piece)
        if report is not None:
            report(file.path, done, file.size)
    got = digest.hexdigest()
    if (done, got) != (file.size, file.sha256):
        raise DataError(f"got {done:,} bytes with SHA-256 {got[:12]}…, expected {file.size:,}, {file.sha256[:12]}…")


def _pieces(url: str) -> Iterator[bytes]:
    """What is at an address, piece by piece; trouble with the network is a DataError, trouble with the disk none."""
    try:
        with urllib.request.urlopen(urllib.request.Request(url, headers={"User-Agent": "bayou"}), timeout=60) as answer:
            while piece := answer.read(_PIECE):
                yield piece
    except (OSError, http.client.HTTPException) as problem:
        raise DataError(str(problem)) from problem
