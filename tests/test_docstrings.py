"""Public names say what they are: every parameter is in the docstring, by its name."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

import bayou
from bayou.core.specs import Checked, args_entries

UNDESCRIBED = {"Guide": {"args", "kwargs"}}  # of nn.Module: a subclass has parameters of its own

PUBLIC: dict[str, Callable[..., Any]] = {
    name: value
    for module in (bayou, bayou.select)
    for name in module.__all__
    if callable(value := getattr(module, name))
}


@pytest.mark.parametrize("name", PUBLIC)
def test_the_docstring_has_every_parameter_and_args_nothing_else(name: str) -> None:
    value = PUBLIC[name]
    doc = value.__doc__
    assert doc, "no docstring of its own"
    assert not doc.startswith(f"{name}("), "the signature that a dataclass without a docstring gets"
    if inspect.isclass(value) and issubclass(value, Exception) and "__init__" not in vars(value):
        return  # takes a message
    names = set(inspect.signature(value).parameters) - UNDESCRIBED.get(name, set())
    assert not {one for one in names if not re.search(rf"(?<!\w){one}(?!\w)", doc)}
    assert set(args_entries(doc)) <= names


def test_a_docstring_has_the_args_of_the_base_classes() -> None:
    @dataclass
    class Base(Checked):
        """A base.

        Args:
            near: how near,
                in meters.
            far: how far.
        """

    class Child(Base):
        """A child. ``far``: farther."""

    class Grandchild(Child):
        """A grandchild.

        Args:
            size: how large.
        """

    assert (
        Child.__doc__
        == "A child. ``far``: farther.\n\nArgs:\n    near: how near,\n        in meters.\n"
    )
    assert list(args_entries(Grandchild.__doc__)) == ["size", "near", "far"]
    assert args_entries(Grandchild.__doc__)["near"] == "near: how near,\n        in meters."
