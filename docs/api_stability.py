"""The stability of the public names, their page and the file of their signatures.

    python -m docs.api_stability             write tests/api/signatures.txt from the code
    python -m docs.api_stability --release   write tests/api/released.txt, too: when a release is made

``docs/api_stability.toml`` lists the stable names; all other public names are provisional.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import inspect
import re
import sys
import tomllib
import types
from collections.abc import Iterator
from enum import Enum
from importlib import import_module
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
TABLE = HERE / "api_stability.toml"
SIGNATURES = HERE.parent / "tests" / "api" / "signatures.txt"
RELEASED = HERE.parent / "tests" / "api" / "released.txt"
COMMAND = "python -m docs.api_stability"
EXTRAS = {"bayou": ("BayesClassifier", "BayesRegressor")}  # of the lab extra, not in __all__
HOMES = {"bayou.rng": "bayou.core.rng", "bayou.ood": "bayou.operations.ood"}  # of attributes


@functools.cache
def packages() -> tuple[str, ...]:
    """Return the packages whose names are public, ``bayou`` first."""
    return tuple(tomllib.loads(TABLE.read_text(encoding="utf-8")))


def home_of(package: str) -> types.ModuleType:
    """Return the module that a public package is imported from."""
    return import_module(HOMES.get(package, package))


def public_names(package: str) -> list[str]:
    """Return the names that a package exports, except those that ``bayou`` exports itself.

    Args:
        package: such as "bayou.flows".
    """
    if package == "bayou.rng":  # a module without __all__
        module = home_of(package)
        return sorted(
            name
            for name, value in vars(module).items()
            if not name.startswith("_")
            and inspect.isfunction(value)
            and value.__module__ == module.__name__
        )
    home = home_of(package)
    names = sorted({*home.__all__, *EXTRAS.get(package, ())})
    if package == "bayou":
        return names
    top = import_module("bayou")
    return [
        name
        for name in names
        if name not in top.__all__ or getattr(top, name) is not getattr(home, name)
    ]


def value_of(package: str, name: str) -> Any:
    """Return what a public name stands for."""
    return getattr(home_of(package), name)


def stable_names(package: str) -> list[str]:
    """Return the names of a package that the table lists as stable."""
    table = tomllib.loads(TABLE.read_text(encoding="utf-8"))
    return sorted(table[package]["stable"].split())


# --- the page -----------------------------------------------------------------------------------


def description(value: Any) -> str:
    """Return what a name is, in one word."""
    if isinstance(value, types.ModuleType):
        return "package"
    if isinstance(value, type):
        return "warning" if issubclass(value, Warning) else "class"
    return "function" if callable(value) and hasattr(value, "__name__") else "value"


def page() -> str:
    """Return the tables of all public names, one for each package, in Markdown."""
    sections = []
    for package in packages():
        stable = set(stable_names(package))
        names = public_names(package)
        count = sum(name in stable for name in names)
        lines = [f"## {package}", "", f"{count} of {len(names)} names are stable.", ""]
        lines += ["| name | what it is | stability |", "|---|---|---|"]
        for name in names:
            stability = "stable" if name in stable else "provisional"
            lines.append(f"| `{name}` | {description(value_of(package, name))} | {stability} |")
        sections.append("\n".join(lines) + "\n")
    return "\n".join(sections)


# --- the signatures -----------------------------------------------------------------------------


def as_text(default: Any) -> str:
    """Return a default value as text that does not depend on the process."""
    if isinstance(default, Enum):
        return f"{type(default).__name__}.{default.name}"
    if isinstance(default, type | types.FunctionType | types.BuiltinFunctionType):
        return default.__qualname__
    return re.sub(r" at 0x[0-9a-f]+", "", repr(default))


def annotation_text(annotation: Any) -> str:
    """Return an annotation as it stands in the source."""
    if isinstance(annotation, str):
        return annotation.strip("'\"")
    return inspect.formatannotation(annotation)


def signature_text(function: Any) -> str:
    """Return the parameters of a function or class, their annotations and defaults, on one line."""
    signature = inspect.signature(function)
    words: list[str] = []
    has_star = False
    for parameter in signature.parameters.values():
        if parameter.name in ("self", "cls"):
            continue
        if parameter.kind is parameter.KEYWORD_ONLY and not has_star:
            words.append("*")
            has_star = True
        has_star = has_star or parameter.kind is parameter.VAR_POSITIONAL
        prefix = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}
        word = prefix.get(parameter.kind, "") + parameter.name
        if parameter.annotation is not parameter.empty:
            word += f": {annotation_text(parameter.annotation)}"
        if parameter.default is not parameter.empty:
            word += f" = {as_text(parameter.default)}"
        words.append(word)
    text = f"({', '.join(words)})"
    if not isinstance(function, type) and signature.return_annotation is not signature.empty:
        text += f" -> {annotation_text(signature.return_annotation)}"
    return text


def public_classes() -> set[type]:
    """Return all public classes, whose members are recorded under their own names."""
    values = (value_of(package, name) for package in packages() for name in public_names(package))
    return {value for value in values if isinstance(value, type)}


def members(cls: type) -> Iterator[tuple[str, Any]]:
    """Yield the public members that a class has, except those of public base classes."""
    elsewhere = public_classes() - {cls}
    seen: set[str] = set()
    for base in cls.__mro__:
        if not base.__module__.startswith("bayou") or base in elsewhere:
            continue
        for name, value in sorted(vars(base).items()):
            if not name.startswith("_") and name not in seen:
                seen.add(name)
                yield name, value


def member_line(name: str, value: Any) -> str | None:
    """Return the line of a member; None for what has no signature, such as a field."""
    if isinstance(value, property | functools.cached_property):
        getter = value.fget if isinstance(value, property) else value.func
        annotation = inspect.signature(getter).return_annotation
        suffix = "" if annotation is inspect.Signature.empty else f": {annotation_text(annotation)}"
        return f"{name}{suffix}"
    function = getattr(value, "__func__", value)
    if isinstance(function, types.FunctionType):
        return f"{name}{signature_text(function)}"
    return None


def lines_of(full_name: str, value: Any) -> Iterator[str]:
    """Yield the lines of a public name: its signature, and for a class those of its members."""
    if isinstance(value, types.ModuleType):
        yield f"{full_name}: package"
    elif isinstance(value, type) and issubclass(value, Enum):
        yield f"{full_name}: {', '.join(value.__members__)}"
    elif isinstance(value, type):
        is_plain = not isinstance(value.__init__, types.FunctionType)  # that of a built-in class
        yield full_name + ("()" if is_plain else signature_text(value))
        fields = dataclasses.fields(value) if dataclasses.is_dataclass(value) else ()
        names = {field.name for field in fields if field.init}
        for name, member in members(value):
            line = None if name in names else member_line(name, member)
            if line is not None:
                yield f"{full_name}.{line}"
    elif callable(value):
        yield full_name + signature_text(value)
    else:
        yield f"{full_name}: {type(value).__name__}"


def signatures() -> list[str]:
    """Return one line for every stable name and every public method of a stable class."""
    return [
        line
        for package in packages()
        for name in stable_names(package)
        for line in lines_of(f"{package}.{name}", value_of(package, name))
    ]


def name_of(line: str) -> str:
    """Return the full name at the beginning of a line of signatures."""
    return re.split(r"[(:]", line, maxsplit=1)[0]


def unexplained(released: list[str], current: list[str], section: str) -> list[str]:
    """Return the released lines that changed or are gone and that a changelog does not mention.

    Args:
        released: the lines of the last release.
        current: those of the code.
        section: the newest section of the changelog, which must have the last part of a changed
            name in backticks: `fit` or `fit(steps=)`.
    """
    now = set(current)
    mentioned = set(re.findall(r"\w+", " ".join(re.findall(r"`([^`]+)`", section))))
    return [
        line
        for line in released
        if line not in now and name_of(line).rpartition(".")[2] not in mentioned
    ]


def read(path: Path) -> list[str]:
    """Return the lines of a file of signatures, without its header."""
    lines = path.read_text(encoding="utf-8").splitlines()
    return [line for line in lines if line and not line.startswith("#")]


def write(path: Path, lines: list[str]) -> None:
    """Write a file of signatures."""
    header = f"# The signatures of the stable names. Written by: {COMMAND}\n"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(header + "\n".join(lines) + "\n", encoding="utf-8")


def main(arguments: list[str] | None = None) -> None:
    """Write the files of signatures."""
    parser = argparse.ArgumentParser(prog=COMMAND, description=__doc__)
    parser.add_argument(
        "--release", action="store_true", help="write the file of the last release, too"
    )
    options = parser.parse_args(arguments)
    lines = signatures()
    for path in (SIGNATURES, RELEASED) if options.release else (SIGNATURES,):
        write(path, lines)
        print(f"{len(lines)} signatures in {path}")


if __name__ == "__main__":
    sys.exit(main())
