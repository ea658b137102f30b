"""bayou: honest uncertainty from neural networks, with posteriors as rich as normalizing flows.

Names are imported when they are first used, so that ``import bayou`` and the command line cost nothing until they need
torch. The list of names is in ``__init__.pyi``, which type checkers read.
"""

from __future__ import annotations

import ast
from importlib import import_module
from pathlib import Path
from typing import Any

__version__ = "0.1.0"

_HOMES = {
    alias.name: statement.module
    for statement in ast.parse(Path(__file__).with_suffix(".pyi").read_text(encoding="utf-8")).body
    if isinstance(statement, ast.ImportFrom)
    for alias in statement.names
}
# ``import *`` must work without the lab extra
__all__ = sorted(name for name, home in _HOMES.items() if not home.startswith("bayou.adapters"))  # noqa: PLE0605


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None or home == __name__:
        try:
            return import_module(f"{__name__}.{name}")  # a package, such as bayou.posteriors
        except ModuleNotFoundError as error:
            if error.name != f"{__name__}.{name}":
                raise
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}") from None
    value = getattr(import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
