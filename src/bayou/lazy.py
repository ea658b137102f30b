"""Packages whose names are imported when they are first used; their ``__init__.pyi`` says which,
for type checkers.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any


def lazy(
    package: str, file: str
) -> tuple[dict[str, str], Callable[[str], Any], Callable[[], list[str]]]:
    """The names of a package with the modules that define them, its ``__getattr__`` and its
    ``__dir__`` (PEP 562).
    """
    homes = {
        alias.name: statement.module or package
        for statement in ast.parse(Path(file).with_suffix(".pyi").read_text(encoding="utf-8")).body
        if isinstance(statement, ast.ImportFrom)
        for alias in statement.names
    }

    def find(name: str) -> Any:
        if homes.get(name, package) == package:
            try:
                return import_module(f"{package}.{name}")  # a package, such as bayou.posteriors
            except ModuleNotFoundError as error:
                if error.name != f"{package}.{name}":
                    raise
                raise AttributeError(f"module {package!r} has no attribute {name!r}") from None
        value = getattr(import_module(homes[name]), name)
        setattr(sys.modules[package], name, value)
        return value

    return homes, find, lambda: sorted({*vars(sys.modules[package]), *homes})
