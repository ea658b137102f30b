"""Data files: search paths, checksums and downloads.

A file is looked for in the folder ``root``, then in ``BAYOU_DATA``, then in the cache of the user.
Its SHA-256 is checked each time it is used.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from bayou.data.catalogue import CATALOGUE, DataError, Entry, File, find

VARIABLE = "BAYOU_DATA"
_PIECE_BYTES = 1 << 20


def cache_dir() -> Path:
    """Return the folder for downloads and decoded files.

    It is ``$XDG_CACHE_HOME/bayou``, or the cache folder of the platform.
    """
    if os.environ.get("XDG_CACHE_HOME"):
        return Path(os.environ["XDG_CACHE_HOME"]) / "bayou"
    if sys.platform == "win32" and os.environ.get("LOCALAPPDATA"):
        return Path(os.environ["LOCALAPPDATA"]) / "bayou" / "cache"
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "bayou"
    return Path.home() / ".cache" / "bayou"


def folders(root: str | Path | None = None) -> list[Path]:
    """Return the folders in which files are looked for, in this order.

    They are ``root``, ``BAYOU_DATA`` and the cache.

    Args:
        root: the first folder, if any.
    """
    candidates = [root, os.environ.get(VARIABLE) or None]
    paths = [Path(folder).expanduser() for folder in candidates if folder is not None]
    return [*paths, cache_dir()]


def locate(file: File, root: str | Path | None = None) -> Path | None:
    """Return the path of an existing file, unchecked; None if there is none.

    Args:
        file: of the catalogue.
        root: the first folder in which it is looked for.
    """
    for folder in folders(root):
        for path in (file.path, *file.other_paths):
            if (folder / path).is_file():
                return folder / path
    return None


def available(entry: Entry, root: str | Path | None = None) -> bool:
    """Return whether all files of a data set exist.

    Their contents are checked when they are read.

    Args:
        entry: of the catalogue.
        root: the first folder in which files are looked for.
    """
    return any(all(locate(file, root) for file in files) for files in (entry.files, *entry.instead))


def require(entry: Entry, root: str | Path | None = None) -> dict[str, Path]:
    """Return the checked paths of the files of a data set, by their published path.

    Args:
        entry: of the catalogue.
        root: the first folder in which files are looked for.

    Raises:
        DataError: a file is missing or damaged.
    """
    for files in (entry.files, *entry.instead):
        paths = {file: path for file in files if (path := locate(file, root)) is not None}
        if len(paths) == len(files):
            return {file.path: _check_file(file, path) for file, path in paths.items()}
    missing = [file.path for file in entry.files if locate(file, root) is None]
    searched = ", ".join(str(folder) for folder in folders(root))
    advice = ""
    if all(file.urls for file in entry.files):
        advice = f", or run `bayou download {entry.name}`, which needs a network connection"
    raise DataError(
        f"the data set {entry.name!r} needs {', '.join(missing)}, looked for in {searched}; "
        f"set {VARIABLE} to the folder that contains it{advice}"
    )


def require_file(file: File, root: str | Path | None = None) -> Path:
    """Return the checked path of one file.

    Args:
        file: of the catalogue, or another published one.
        root: the first folder in which it is looked for.

    Raises:
        DataError: it is missing or damaged.
    """
    path = locate(file, root)
    if path is None:
        searched = ", ".join(str(folder) for folder in folders(root))
        raise DataError(
            f"there is no {file.path}, looked for in {searched}; set {VARIABLE} to the folder that "
            "contains it"
        )
    return _check_file(file, path)


def _check_file(file: File, path: Path) -> Path:
    """Return the path, or raise a DataError unless its size and SHA-256 are the published ones."""
    size = path.stat().st_size
    if size != file.size:
        raise DataError(
            f"{path} has {size:,} bytes, not {file.size:,} as published: damaged or another file"
        )
    import hashlib

    with path.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
    if digest != file.sha256:
        raise DataError(
            f"{path} has SHA-256 {digest[:12]}…, not {file.sha256[:12]}… as published: damaged or "
            "another file; delete it and download it again"
        )
    return path


def download(name: str, *, root: str | Path | None = None) -> list[Path]:
    """Download the public files of a data set; nothing else in bayou downloads data.

    A file is checked before it gets its final name; Ctrl-C removes it, and the next download
    removes what a killed process left.

    Args:
        name: of the data set.
        root: the folder; the cache by default.

    Returns:
        The paths of the files.

    Raises:
        DataError: there is no public file, or the download failed.
    """
    entry = find(name)
    if not entry.files:
        raise DataError(f"{name!r} needs no files: it is generated, or part of scikit-learn")
    private = [file for file in entry.files if not file.urls]
    if private:
        public_names = ", ".join(
            candidate.name
            for candidate in CATALOGUE.values()
            if candidate.files and all(file.urls for file in candidate.files)
        )
        sources = ", ".join(f"{file.path} ({file.origin})" for file in private)
        raise DataError(
            f"there is no public URL for {sources}; put it below {cache_dir()}, or set {VARIABLE} "
            f"to a folder that contains it. These can be downloaded: {public_names}"
        )
    folder = cache_dir() if root is None else Path(root).expanduser()
    return [_fetch(file, folder) for file in entry.files]


def _fetch(file: File, folder: Path) -> Path:
    """Return the path of a file below a folder, downloaded if it is not there."""
    from bayou.core.files import writing  # here, because it imports torch

    path = folder / file.path
    if path.is_file():
        with contextlib.suppress(DataError):
            return _check_file(file, path)
    failures: list[str] = []
    for url in file.urls:
        try:
            with writing(path, folders=True) as out:
                _copy(url, out, file)
            return path
        except DataError as problem:
            failures.append(f"{url}: {problem}")
    raise DataError(
        f"could not download {file.path} ({'; '.join(failures)}); download it manually and set "
        f"{VARIABLE}"
    )


def _copy(url: str, out: IO[bytes], file: File) -> None:
    """Download from a URL and check the published size and SHA-256."""
    import hashlib

    digest = hashlib.sha256()
    size = 0
    for piece in _pieces(url):
        size += len(piece)
        if size > file.size:
            raise DataError(f"more than the published {file.size:,} bytes")
        out.write(piece)
        digest.update(piece)
    sha256 = digest.hexdigest()
    if (size, sha256) != (file.size, file.sha256):
        raise DataError(
            f"got {size:,} bytes with SHA-256 {sha256[:12]}…, expected {file.size:,}, "
            f"{file.sha256[:12]}…"
        )


def _pieces(url: str) -> Iterator[bytes]:
    """Yield the chunks of a download; network errors become a DataError, disk errors do not."""
    # Here, so that the command line starts without them.
    import http.client
    import urllib.request

    request = urllib.request.Request(url, headers={"User-Agent": "bayou"})
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            while piece := answer.read(_PIECE_BYTES):
                yield piece
    except (OSError, http.client.HTTPException) as problem:
        raise DataError(str(problem)) from problem
