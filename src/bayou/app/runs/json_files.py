"""Files of a run: plain values as JSON, with a digest that detects later changes."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from bayou.app.runs.config import DIGEST
from bayou.core.files import FileError, read_bytes, write_text


class RunError(ValueError):
    """A run folder that cannot be used as requested."""


def write_json(path: Path, value: Any) -> None:
    """Write plain values atomically, objects with their digest.

    Numbers that are not finite become null. A symbolic link at ``path`` is replaced, and its target
    left as it is.

    Args:
        path: the file.
        value: what JSON can hold.
    """
    plain = json.loads(json.dumps(value), parse_constant=lambda name: None)
    if isinstance(plain, dict):
        plain = plain | {DIGEST: _digest(plain)}
    write_text(path, json.dumps(plain, indent=1) + "\n", through_links=False)


def read_json(path: Path, **expected: type) -> Any:
    """Read the plain values of a file and check its digest.

    An object that was written without a digest is taken as it is.

    Args:
        path: the file.
        expected: keys that an object must have, and the types of their values.

    Raises:
        RunError: the file cannot be read, has been modified, or lacks a key.
    """
    try:
        value = json.loads(read_bytes(path))
    except (FileError, ValueError, RecursionError) as error:
        raise RunError(f"{path} cannot be read: {error}; delete it and run again") from None
    if isinstance(value, dict) and value.pop(DIGEST, "") not in ("", _digest(value)):
        raise RunError(
            f"{path} has been modified: its digest does not match, so that its numbers may not be "
            "those of the run. Restore it, or run again; if the change is intended, remove its "
            f'"{DIGEST}"'
        )
    for key, expected_type in expected.items():
        item = value.get(key) if isinstance(value, dict) else None
        if not isinstance(item, expected_type) or isinstance(item, bool):
            raise RunError(
                f"{path} has {key} = {item!r:.60}, expected {expected_type.__name__}; restore it, "
                "or run again"
            )
    return value


def _digest(value: dict[str, Any]) -> str:
    """Return the SHA-256 of plain values."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
