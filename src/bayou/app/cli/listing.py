"""Names for ``bayou list``."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial


def list_entries(topic: str) -> list[tuple[str, str]]:
    """Return names with their descriptions.

    Args:
        topic: data, methods, likelihoods, nets, flows or references.

    Raises:
        ValueError: there is no such list.
    """
    if topic == "data":
        from bayou.data import CATALOGUE, available

        rows = []
        for name, entry in CATALOGUE.items():
            mark = "" if available(entry) else "  [not downloaded]"
            rows.append((name, f"{entry.summary}{mark}"))
        return rows
    if topic == "methods":
        from bayou.select import list_methods

        return list(list_methods().items())
    if topic == "likelihoods":
        from bayou.likelihoods import list_likelihoods

        return list(list_likelihoods().items())
    if topic == "nets":
        from bayou.app.runs.nets import NETS

        return [(name, net.describe()) for name, net in NETS.items()]
    if topic == "flows":
        from bayou.flows import registry

        return [(name, _first_line(entry.build)) for name, entry in registry("vector").items()]
    if topic == "references":
        from bayou.truth import REFERENCES

        return [(name, source.summary) for name, source in REFERENCES.items()]
    raise ValueError(
        f"there is no list of {topic!r}; ask for data, methods, likelihoods, flows, nets or "
        "references"
    )


def _first_line(builder: Callable[..., object]) -> str:
    """Return the first line of a builder's docstring, with the options of a partial."""
    options = ""
    function = builder
    if isinstance(builder, partial):
        function = builder.func
        options = ", ".join(f"{name}={value!r}" for name, value in builder.keywords.items())
    lines = (inspect.getdoc(function) or "").splitlines() or [""]
    return lines[0] + (f" ({options})" if options else "")
