"""Files of a run: plain values as JSON, with a digest that detects later changes."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from bayou.files import FileError, read_bytes, write_text
from bayou.runs.config import DIGEST


class RunError(ValueError):
    """A run folder that cannot be used as requested."""


def write_json(path: Path, value: Any) -> None:
    """Write plain values atomically, objects with their digest; numbers that are not finite become
    null.

    A symbolic link at ``path`` is replaced, and its target left as it is.
    """
    plain = json.loads(json.dumps(value), parse_constant=lambda name: None)
    plain = plain | {DIGEST: _digest(plain)} if isinstance(plain, dict) else plain
    write_text(path, json.dumps(plain, indent=1) + "\n", through_links=False)


def read_json(path: Path, **expected: type) -> Any:
    """Plain values of a file, or a RunError; an object that was written without a digest is taken
    as it is.

    ``expected``: keys that an object must have, and the types of their values.
    """
    try:
        value = json.loads(read_bytes(path))
    except (FileError, ValueError, RecursionError) as error:
        raise RunError(f"{path} cannot be read: {error}; delete it and run again") from None
    if isinstance(value, dict) and value.pop(DIGEST, "") not in ("", _digest(value)):
        raise RunError(
            f"{path} has been modified: its digest does not match, so that its numbers may not be those of the "
            f'run. Restore it, or run again; if the change is intended, remove its "{DIGEST}"'
        )
    for key, kind in expected.items():
        got = value.get(key) if isinstance(value, dict) else None
        if not isinstance(got, kind) or isinstance(got, bool):
            raise RunError(
                f"{path} has {key} = {got!r:.60}, expected {kind.__name__}; restore it, or run again"
            )
    return value


def _digest(value: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
