"""Names for ``bayou list``, and the module of the experiments."""

from __future__ import annotations

import importlib
import inspect
import sys
from pathlib import Path
from typing import Any


def listing(what: str) -> list[tuple[str, str]]:
    """Names with their descriptions."""
    if what == "data":
        from bayou.data import CATALOGUE, available

        return [
            (name, entry.summary + ("" if available(entry) else "  [not downloaded]"))
            for name, entry in CATALOGUE.items()
        ]
    if what == "methods":
        from bayou.select import list_methods

        return list(list_methods().items())
    if what == "nets":
        from bayou.runs.nets import NETS

        return [(name, net.describe()) for name, net in NETS.items()]
    if what == "flows":
        from bayou.flows import registry

        return [(name, _first_line(entry.build)) for name, entry in registry("vector").items()]
    if what == "experiments":
        return [(name, study.title) for name, study in experiments().studies().items()]
    raise ValueError(
        f"there is no list of {what!r}; ask for data, methods, flows, nets or experiments"
    )


def experiments() -> Any:
    """The module ``experiments.reproduce`` of the clone that bayou was installed from, or of the
    current folder.
    """
    for root in (Path(__file__).parents[3], Path.cwd()):
        if (root / "experiments" / "reproduce.py").is_file():
            if str(root) not in sys.path:
                sys.path.insert(0, str(root))
            return importlib.import_module("experiments.reproduce")
    raise ValueError(
        "the experiments are not part of the package: run this command in a clone of the repository"
    )


def _first_line(thing: Any) -> str:
    options = ", ".join(
        f"{name}={value!r}" for name, value in getattr(thing, "keywords", {}).items()
    )
    text = (inspect.getdoc(getattr(thing, "func", thing)) or "").splitlines() or [
        ""
    ]  # func: what a partial calls
    return text[0] + (f" ({options})" if options else "")
