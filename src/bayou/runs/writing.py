"""Files of a run: text and plain values, written under another name and renamed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


class RunError(ValueError):
    """A run folder that cannot be used as asked."""


def write_text(path: Path, text: str) -> None:
    """Write atomically."""
    part = path.with_name(f".{path.name}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part.write_text(text, encoding="utf-8")
        part.replace(path)
    except OSError as error:
        raise RunError(f"cannot write {path}: {error.strerror or error}; choose another --out") from error


def write_json(path: Path, value: Any) -> None:
    """Write plain values atomically; numbers that are not finite become null."""
    plain = json.loads(json.dumps(value), parse_constant=lambda name: None)
    write_text(path, json.dumps(plain, indent=1) + "\n")


def read_json(path: Path) -> Any:
    """Plain values of a file, or a RunError."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise RunError(f"{path} cannot be read: {error}; delete it and run again") from None
