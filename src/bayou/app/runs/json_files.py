"""Files of a run: plain values as JSON."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from bayou.core.files import FileError, read_bytes, write_text


class RunError(ValueError):
    """A run folder that cannot be used as requested."""


def check_output(path: Path, force: bool) -> None:
    """Raise a RunError if a file to be written is there already.

    Args:
        path: the file; a symbolic link counts as one.
        force: overwrite it.
    """
    if (path.exists() or path.is_symlink()) and not force:
        raise RunError(
            f"{path} already exists; choose another --out, or use --force to overwrite it"
        )


def write_json(path: Path, value: object) -> None:
    """Write plain values atomically.

    Numbers that are not finite become null. A symbolic link at ``path`` is replaced, and its target
    left as it is.

    Args:
        path: the file.
        value: what JSON can hold.
    """
    plain = json.loads(json.dumps(value), parse_constant=lambda name: None)
    write_text(path, json.dumps(plain, indent=1) + "\n", through_links=False)


def read_json(path: Path, **expected: type) -> Any:
    """Read the plain values of a file.

    Args:
        path: the file.
        expected: keys that an object must have, and the types of their values.

    Raises:
        RunError: the file cannot be read, lacks a key, or one has another type.
    """
    try:
        value = json.loads(read_bytes(path))
    except (FileError, ValueError, RecursionError) as error:
        raise RunError(f"{path} cannot be read: {error}; delete it and run again") from None
    for key, expected_type in expected.items():
        item = value.get(key) if isinstance(value, dict) else None
        if not isinstance(item, expected_type) or isinstance(item, bool):
            raise RunError(
                f"{path} has {key} = {item!r:.60}, expected {expected_type.__name__}; restore it, "
                "or run again"
            )
    return value
