"""A folder that appears, or replaces another, as a whole."""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

SUFFIX_BYTES = 4  # random bytes in the name of a temporary folder


@contextmanager
def staged_folder(path: Path) -> Iterator[Path]:
    """Make a temporary folder that becomes the folder ``path`` at the end of the block.

    A folder that is there already is renamed, replaced and then deleted; after an error or Ctrl-C
    it is there as it was.

    Args:
        path: the folder.

    Yields:
        The temporary folder, beside ``path``.
    """
    suffix = secrets.token_hex(SUFFIX_BYTES)
    staged = path.with_name(f".{path.name}.{suffix}.part")
    previous = path.with_name(f".{path.name}.{suffix}.before")
    try:
        staged.mkdir()
        yield staged
        if path.exists():
            os.rename(path, previous)
        os.rename(staged, path)
    except BaseException:
        if previous.exists() and not path.exists():
            os.rename(previous, path)
        raise
    finally:
        shutil.rmtree(staged, ignore_errors=True)
        if path.exists():
            shutil.rmtree(previous, ignore_errors=True)
