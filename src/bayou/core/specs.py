"""Frozen dataclass specs to JSON and back, so that files can describe their contents without
code.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from typing import Any

NAMED = "spec"  # the key that marks a spec in JSON
LATER = "later"  # the key in the metadata of fields that were added to a spec later
OPAQUE = "callable"  # the key that marks a value JSON cannot hold
DICT, TUPLE = (
    "dict",
    "tuple",
)  # every object in the JSON has one of these four keys: no dict looks like a spec


def described(doc: str | None) -> dict[str, str]:
    """The entries of the ``Args`` section of a docstring, by name."""
    _, _, section = inspect.cleandoc(doc or "").partition("\nArgs:\n")
    entries = re.findall(r"^    (\w+:.*(?:\n {8}.*)*)", section.partition("\n\n")[0], re.MULTILINE)
    return {entry.partition(":")[0]: entry for entry in entries}


class Checked:
    """A spec that validates its fields: an error names the field, its value and the condition.

    ``Args`` of base classes that a docstring does not describe are added to it, so that ``help``
    describes all fields.
    """

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        inherited: dict[str, str] = {}
        for base in cls.__mro__[1:]:
            inherited = described(base.__dict__.get("__doc__")) | inherited
        doc = inspect.cleandoc(cls.__dict__.get("__doc__") or "")
        own = described(doc)
        added = [
            f"    {text}"
            for name, text in inherited.items()
            if name not in own and f"``{name}``:" not in doc
        ]
        if doc and added:
            cls.__doc__ = _insert_args(doc, "\n".join(added)) + "\n"

    def _check(self, names: Sequence[str], valid: Callable[[Any], bool], what: str) -> None:
        for name in names:
            value = getattr(self, name)
            if not valid(value):
                raise ValueError(f"{type(self).__name__} {name} must be {what}, got {value!r:.60}")

    def _check_whole(self, *names: str, least: int = 1) -> None:
        """A ValueError unless these fields are None or whole numbers of at least ``least``."""

        def valid(value: Any) -> bool:
            return value is None or (
                isinstance(value, int) and not isinstance(value, bool) and value >= least
            )

        self._check(names, valid, f"a whole number of at least {least}")

    def _check_positive(self, *names: str) -> None:
        """Raise a ValueError unless these fields are None or positive and finite."""

        def is_valid(value: Any) -> bool:
            return value is None or (_is_number(value) and 0 < value <= sys.float_info.max)

        self._check(names, is_valid, "positive and finite")

    def _check_finite(self, *names: str) -> None:
        """A ValueError unless these fields are finite numbers."""
        self._check(
            names,
            lambda value: _is_number(value) and abs(value) <= sys.float_info.max,
            "a finite number",
        )

    def _check_kind(self, kind: type, *names: str) -> None:
        """A ValueError unless these fields are of this type."""
        self._check(names, lambda value: isinstance(value, kind), f"a {kind.__name__}")

    def _check_words(self, *names: str) -> None:
        """A ValueError unless these fields are tuples of different words."""

        def valid(value: Any) -> bool:
            words = isinstance(value, tuple) and all(isinstance(word, str) for word in value)
            return words and len(set(value)) == len(value)

        self._check(names, valid, "different words")

    def _check_choice(self, name: str, choices: Sequence[str]) -> None:
        """A ValueError unless this field is one of the choices."""
        valid = f"one of {', '.join(choices)}"
        self._check([name], lambda value: isinstance(value, str) and value in choices, valid)


def _insert_args(doc: str, entries: str) -> str:
    """Return a docstring with further entries at the end of its ``Args`` section."""
    before, heading, section = doc.partition("\nArgs:\n")
    if not heading:
        return f"{doc}\n\nArgs:\n{entries}"
    args, separator, rest = section.partition("\n\n")
    return f"{before}{heading}{args}\n{entries}{separator}{rest}"


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def nearest(name: str, names: Sequence[str]) -> str:
    """`` (did you mean 'x'?)`` for a name that is close to another, else an empty string."""
    lower = {other.lower(): other for other in reversed(names)}
    close = get_close_matches(name.lower(), list(lower), n=1, cutoff=0.6)
    return f" (did you mean {lower[close[0]]!r}?)" if close else ""


def later_field(default: Any) -> Any:
    """Declare a field that a spec got after files of it had been written.

    At its default it is not written, so that old files, checkpoints and results keep their
    identity.

    Args:
        default: the value with which the spec means what it meant before.
    """
    return dataclasses.field(default=default, metadata={LATER: True})


def is_written(field: dataclasses.Field[Any], value: Any) -> bool:
    """Return whether the JSON of a spec has this field."""
    is_unchanged = field.metadata.get(LATER, False) and getattr(value, field.name) == field.default
    return field.compare and not is_unchanged


def to_json(value: Any) -> Any:
    """A spec (or a dict, list or plain value with specs in it) as plain JSON values.

    A callable becomes a marker with its name: the file can be written, but loading needs the spec
    itself again. Fields with ``compare=False`` change no result and are left out, as are fields of
    ``later_field`` at their defaults.
    """
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {
            f.name: to_json(getattr(value, f.name))
            for f in dataclasses.fields(value)
            if is_written(f, value)
        }
        return {NAMED: type(value).__name__, "fields": fields}
    if isinstance(value, Mapping):
        return {DICT: [[to_json(key), to_json(item)] for key, item in value.items()]}
    if isinstance(value, tuple):
        return {TUPLE: [to_json(item) for item in value]}
    if isinstance(value, list):
        return [to_json(item) for item in value]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    return {OPAQUE: getattr(value, "__qualname__", type(value).__name__)}


def from_json(value: Any, *families: type) -> Any:
    """The inverse of ``to_json``: specs are found by name among the subclasses of ``families``, and
    nothing is run.
    """
    if isinstance(value, list):
        return [from_json(item, *families) for item in value]
    if not isinstance(value, dict):
        return value
    if OPAQUE in value:
        raise ValueError(
            f"the file was written with a custom {value[OPAQUE]!r}, which files cannot hold, since loading runs no code"
        )
    if DICT in value:
        return {from_json(key, *families): from_json(item, *families) for key, item in value[DICT]}
    if TUPLE in value:
        return tuple(from_json(item, *families) for item in value[TUPLE])
    known = {cls.__name__: cls for family in families for cls in _subclasses(family)}
    name = value[NAMED]
    if name not in known:
        raise ValueError(
            f"the file names {name!r}, which is unknown here; import the module that defines it, or update bayou"
        )
    try:
        return known[name](
            **{key: from_json(item, *families) for key, item in value["fields"].items()}
        )
    except TypeError as error:
        raise ValueError(f"the file's {name} does not fit this version of bayou: {error}") from None


def _subclasses(cls: type) -> list[type]:
    children: list[type] = cls.__subclasses__()
    return [cls, *(found for child in children for found in _subclasses(child))]
