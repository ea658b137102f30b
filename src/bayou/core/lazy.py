"""Packages whose names are imported when they are first used.

The ``__init__.py`` of such a package has its imports below ``if TYPE_CHECKING:``, where readers,
editors and type checkers find them:

    if TYPE_CHECKING:
        from bayou.methods import VI as VI
    else:
        MODULES, __getattr__, __dir__ = lazy_imports(__name__, __file__)
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any


def lazy_imports(
    package: str, file: str
) -> tuple[dict[str, str], Callable[[str], Any], Callable[[], list[str]]]:
    """Return what a package needs to import its names when they are used (PEP 562).

    Args:
        package: the name of the package.
        file: its ``__init__.py``, whose imports below ``if TYPE_CHECKING:`` are read.

    Returns:
        The module of each name, and the package's ``__getattr__`` and ``__dir__``.
    """
    modules = {
        alias.name: statement.module or package
        for statement in _deferred_statements(file)
        if isinstance(statement, ast.ImportFrom)
        for alias in statement.names
    }

    def find(name: str) -> Any:
        """Import a name, or a subpackage such as bayou.posteriors."""
        if modules.get(name, package) == package:
            try:
                return import_module(f"{package}.{name}")
            except ModuleNotFoundError as error:
                if error.name != f"{package}.{name}":
                    raise
                raise AttributeError(f"module {package!r} has no attribute {name!r}") from None
        module = import_module(modules[name])
        try:
            value = getattr(module, name)
        except AttributeError:  # a module of a package, such as bayou.core.rng
            value = import_module(f"{modules[name]}.{name}")
        setattr(sys.modules[package], name, value)
        return value

    def list_names() -> list[str]:
        """List the names of the package, imported or not."""
        return sorted({*vars(sys.modules[package]), *modules})

    return modules, find, list_names


def _deferred_statements(file: str) -> Iterator[ast.stmt]:
    """Yield the statements of a file below ``if TYPE_CHECKING:``."""
    for statement in ast.parse(Path(file).read_text(encoding="utf-8")).body:
        if isinstance(statement, ast.If) and ast.unparse(statement.test) == "TYPE_CHECKING":
            yield from statement.body
