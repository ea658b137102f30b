"""Frozen dataclass specs as JSON, so that files can describe their contents without code."""

from __future__ import annotations

import dataclasses
import inspect
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from typing import Any, TypeGuard

# Every object in the JSON has one of these four keys, so that no dict looks like a spec.
NAMED = "spec"  # a spec
OPAQUE = "callable"  # a value JSON cannot hold
DICT = "dict"
TUPLE = "tuple"
LATER = "later"  # the key in the metadata of fields that were added to a spec later
MIN_SIMILARITY = 0.6  # of a name and the one that is proposed instead


def args_entries(doc: str | None) -> dict[str, str]:
    """Return the entries of the ``Args`` section of a docstring, by name.

    Args:
        doc: the docstring.
    """
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
            inherited = args_entries(base.__dict__.get("__doc__")) | inherited
        doc = inspect.cleandoc(cls.__dict__.get("__doc__") or "")
        entries = args_entries(doc)
        added = [
            f"    {text}"
            for name, text in inherited.items()
            if name not in entries and f"``{name}``:" not in doc
        ]
        if doc and added:
            cls.__doc__ = _insert_args(doc, "\n".join(added)) + "\n"

    def _check(self, names: Sequence[str], is_valid: Callable[[Any], bool], condition: str) -> None:
        """Raise a ValueError with the condition unless these fields are valid."""
        for name in names:
            value = getattr(self, name)
            if not is_valid(value):
                raise ValueError(
                    f"{type(self).__name__} {name} must be {condition}, got {value!r:.60}"
                )

    def _check_whole(self, *names: str, least: int = 1) -> None:
        """Raise a ValueError unless these fields are None or whole numbers, at least ``least``."""

        def is_valid(value: object) -> bool:
            if value is None:
                return True
            return isinstance(value, int) and not isinstance(value, bool) and value >= least

        self._check(names, is_valid, f"a whole number of at least {least}")

    def _check_positive(self, *names: str) -> None:
        """Raise a ValueError unless these fields are None or positive and finite."""

        def is_valid(value: object) -> bool:
            return value is None or (_is_number(value) and 0 < value <= sys.float_info.max)

        self._check(names, is_valid, "positive and finite")

    def _check_finite(self, *names: str) -> None:
        """Raise a ValueError unless these fields are finite numbers."""

        def is_valid(value: object) -> bool:
            return _is_number(value) and abs(value) <= sys.float_info.max

        self._check(names, is_valid, "a finite number")

    def _check_kind(self, kind: type, *names: str) -> None:
        """Raise a ValueError unless these fields are of this type."""
        self._check(names, lambda value: isinstance(value, kind), f"a {kind.__name__}")

    def _check_words(self, *names: str) -> None:
        """Raise a ValueError unless these fields are tuples of different words."""

        def is_valid(value: object) -> bool:
            if not isinstance(value, tuple):
                return False
            return all(isinstance(word, str) for word in value) and len(set(value)) == len(value)

        self._check(names, is_valid, "different words")

    def _check_choice(self, name: str, choices: Sequence[str]) -> None:
        """Raise a ValueError unless this field is one of the choices."""

        def is_valid(value: object) -> bool:
            return isinstance(value, str) and value in choices

        self._check([name], is_valid, f"one of {', '.join(choices)}")


def _insert_args(doc: str, entries: str) -> str:
    """Return a docstring with further entries at the end of its ``Args`` section."""
    before, heading, section = doc.partition("\nArgs:\n")
    if not heading:
        return f"{doc}\n\nArgs:\n{entries}"
    args, separator, rest = section.partition("\n\n")
    return f"{before}{heading}{args}\n{entries}{separator}{rest}"


def _is_number(value: object) -> TypeGuard[int | float]:
    """Return whether this is an int or a float; booleans are none."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def nearest(name: str, names: Sequence[str]) -> str:
    """Return `` (did you mean 'x'?)`` for a name that is close to a known one, else "".

    Args:
        name: the name that is not known.
        names: the known names.
    """
    by_lower_case = {known.lower(): known for known in reversed(names)}
    matches = get_close_matches(name.lower(), list(by_lower_case), n=1, cutoff=MIN_SIMILARITY)
    if not matches:
        return ""
    return f" (did you mean {by_lower_case[matches[0]]!r}?)"


def later_field(default: Any) -> Any:
    """Declare a field that a spec got after files of it had been written.

    At its default it is not written, so that old files, checkpoints and results keep their
    identity.

    Args:
        default: the value with which the spec means what it meant before.
    """
    return dataclasses.field(default=default, metadata={LATER: True})


def is_written(field: dataclasses.Field[Any], value: object) -> bool:
    """Return whether the JSON of a spec has this field.

    Args:
        field: the field.
        value: the spec.
    """
    is_unchanged = field.metadata.get(LATER, False) and getattr(value, field.name) == field.default
    return field.compare and not is_unchanged


def to_json(value: object) -> Any:
    """Return a spec as plain JSON values.

    A callable becomes a marker with its name: the file can be written, but loading needs the spec
    itself again. Fields with ``compare=False`` change no result and are left out, as are fields of
    ``later_field`` at their defaults.

    Args:
        value: a spec, or a dict, list, tuple or plain value with specs in it.
    """
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {
            field.name: to_json(getattr(value, field.name))
            for field in dataclasses.fields(value)
            if is_written(field, value)
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
    """Invert ``to_json``; no code of the file is run.

    Args:
        value: plain JSON values.
        families: classes among whose subclasses specs are looked up by name.

    Raises:
        ValueError: for callables, for unknown names and for fields that a spec does not have.
    """
    if isinstance(value, list):
        return [from_json(item, *families) for item in value]
    if not isinstance(value, dict):
        return value
    if OPAQUE in value:
        raise ValueError(
            f"the file was written with a custom {value[OPAQUE]!r}, which files cannot hold, since "
            "loading runs no code"
        )
    if DICT in value:
        return {from_json(key, *families): from_json(item, *families) for key, item in value[DICT]}
    if TUPLE in value:
        return tuple(from_json(item, *families) for item in value[TUPLE])
    known = {cls.__name__: cls for family in families for cls in _subclasses(family)}
    name = value[NAMED]
    if name not in known:
        raise ValueError(
            f"the file names {name!r}, which is unknown here; import the module that defines it, "
            "or update bayou"
        )
    try:
        fields = {key: from_json(item, *families) for key, item in value["fields"].items()}
        return known[name](**fields)
    except TypeError as error:
        raise ValueError(f"the file's {name} does not fit this version of bayou: {error}") from None


def _subclasses(cls: type) -> list[type]:
    """Return a class and all classes below it."""
    children: list[type] = cls.__subclasses__()
    return [cls, *(descendant for child in children for descendant in _subclasses(child))]
