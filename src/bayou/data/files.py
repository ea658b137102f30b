"""Data files: search paths, checksums and downloads.

A file is looked for in the folder ``root``, then in ``BAYOU_DATA``, then in the cache of the user.
Its SHA-256 is checked each time it is used.
"""

from __future__ import annotations

import contextlib
import hashlib
import http.client
import os
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from bayou.data.catalogue import CATALOGUE, DataError, Entry, File, find

VARIABLE = "BAYOU_DATA"
_PIECE = 1 << 20


def cache_dir() -> Path:
    """The folder for downloads and decoded files:
    ``$XDG_CACHE_HOME/bayou``, or the cache folder of the platform.
    """
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
    """The path of an existing file, unchecked; None if there is none."""
    places = (folder / path for folder in folders(root) for path in (file.path, *file.other_paths))
    return next((place for place in places if place.is_file()), None)


def available(entry: Entry, root: str | Path | None = None) -> bool:
    """Whether all files of a data set exist (their contents are checked when they are read)."""
    return any(all(locate(file, root) for file in files) for files in (entry.files, *entry.instead))


def require(entry: Entry, root: str | Path | None = None) -> dict[str, Path]:
    """The checked paths of the files of a data set, by their published path; a DataError names
    missing files.
    """
    for files in (entry.files, *entry.instead):
        if all(locate(file, root) for file in files):
            return {
                file.path: _checked(file, path) for file in files if (path := locate(file, root))
            }
    nearly = max(
        (entry.files, *entry.instead),
        key=lambda files: sum(locate(file, root) is not None for file in files),
    )
    missing = [file.path for file in nearly if locate(file, root) is None]
    where = ", ".join(str(folder) for folder in folders(root))
    public = all(file.urls for file in entry.files)
    download = (
        f", or run `bayou download {entry.name}`, which needs a network connection"
        if public
        else ""
    )
    raise DataError(
        f"the data set {entry.name!r} needs {', '.join(missing)}, looked for in {where}; "
        f"set {VARIABLE} to the folder that contains it{download}"
    )


def _checked(file: File, path: Path) -> Path:
    """The path, or a DataError unless its size and SHA-256 are the published ones."""
    got = path.stat().st_size
    if got != file.size:
        raise DataError(
            f"{path} has {got:,} bytes, not {file.size:,} as published: damaged or another file"
        )
    with path.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
    if digest != file.sha256:
        raise DataError(
            f"{path} has SHA-256 {digest[:12]}…, not {file.sha256[:12]}… as published: damaged or another file; "
            "delete it and download it again"
        )
    return path


def download(name: str, *, root: str | Path | None = None) -> list[Path]:
    """Download the public files of a data set to ``root`` (the cache by default); nothing else in
    bayou does.

    A file is checked before it gets its final name; Ctrl-C removes it, and the next download
    removes what a killed process left.
    """
    entry = find(name)
    if not entry.files:
        raise DataError(f"{name!r} needs no files: it is generated, or part of scikit-learn")
    without = [file for file in entry.files if not file.urls]
    if without:
        have = ", ".join(
            other.name
            for other in CATALOGUE.values()
            if other.files and all(f.urls for f in other.files)
        )
        where = ", ".join(f"{file.path} ({file.origin})" for file in without)
        raise DataError(
            f"there is no public URL for {where}; put it below {cache_dir()}, or set {VARIABLE} to a folder that "
            f"contains it. These can be downloaded: {have}"
        )
    folder = cache_dir() if root is None else Path(root).expanduser()
    return [_fetch(file, folder) for file in entry.files]


def _fetch(file: File, folder: Path) -> Path:
    from bayou.files import writing  # here, because it imports torch

    path = folder / file.path
    if path.is_file():
        with contextlib.suppress(DataError):
            return _checked(file, path)
    failures: list[str] = []
    for url in file.urls:
        try:
            with writing(path, folders=True) as out:
                _copy(url, out, file)
            return path
        except DataError as problem:
            failures.append(f"{url}: {problem}")
    raise DataError(
        f"could not download {file.path} ({'; '.join(failures)}); download it manually and set {VARIABLE}"
    )


def _copy(url: str, out: IO[bytes], file: File) -> None:
    """Download from a URL and check the published size and SHA-256."""
    digest, done = hashlib.sha256(), 0
    for piece in _pieces(url):
        done += len(piece)
        if done > file.size:
            raise DataError(f"more than the published {file.size:,} bytes")
        out.write(piece)
        digest.update(piece)
    got = digest.hexdigest()
    if (done, got) != (file.size, file.sha256):
        raise DataError(
            f"got {done:,} bytes with SHA-256 {got[:12]}…, expected {file.size:,}, {file.sha256[:12]}…"
        )


def _pieces(url: str) -> Iterator[bytes]:
    """The chunks of a download; network errors become a DataError, disk errors do not."""
    try:
        with urllib.request.urlopen(
            urllib.request.Request(url, headers={"User-Agent": "bayou"}), timeout=60
        ) as answer:
            while piece := answer.read(_PIECE):
                yield piece
    except (OSError, http.client.HTTPException) as problem:
        raise DataError(str(problem)) from problem
