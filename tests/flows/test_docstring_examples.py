"""The examples in the docstrings of flows run and print what they show."""

import doctest
from importlib import import_module
from pathlib import Path

import pytest

from bayou import flows

ROOT = Path(flows.__file__).parent
MODULES = [
    ".".join(path.relative_to(ROOT).with_suffix("").parts)
    for path in sorted(ROOT.rglob("*.py"))
    if ">>> " in path.read_text(encoding="utf-8")
]


@pytest.mark.parametrize("name", MODULES)
def test_docstring_examples_print_what_they_show(name):
    results = doctest.testmod(import_module(f"bayou.flows.{name}"))
    assert results.attempted > 0
    assert results.failed == 0
