"""The limit of the memory that a file may need, before it is read."""

from __future__ import annotations

import os
from pathlib import Path

from bayou.data.catalogue import DataError

MAX_BYTES = "BAYOU_MAX_BYTES"  # the environment variable for the limit of 4 GiB, uncompressed


def check_size(path: Path, size: int) -> None:
    """Raise a DataError for a file above the memory limit, before it is read.

    Args:
        path: the file.
        size: bytes that it needs in memory.
    """
    limit_text = os.environ.get(MAX_BYTES, "")
    if not limit_text.isdecimal() and limit_text:
        raise DataError(f"{MAX_BYTES} must be a number of bytes, got {limit_text!r}")
    limit = int(limit_text or 2**32)
    if size > limit:
        raise DataError(
            f"{path.name} needs at least {size:,} bytes in memory, and the limit is {limit:,}; set "
            f"{MAX_BYTES} to raise it, or use fewer rows"
        )
