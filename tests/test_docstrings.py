"""Public names say what they are: every parameter is in the docstring, by its name."""

import ast
import dataclasses
import importlib
import inspect
from functools import cache
from pathlib import Path
from types import FunctionType, GenericAlias

import pytest

import bayou
from bayou.core.specs import Checked, args_entries
from bayou.select import Training

ROOT = Path(bayou.__file__).parents[1]
MODULES = (
    "bayou",
    "bayou.calibration",
    "bayou.diagnostics",
    "bayou.flows",
    "bayou.guides",
    "bayou.likelihoods",
    "bayou.methods",
    "bayou.metrics",
    "bayou.operations",
    "bayou.posteriors",
    "bayou.priors",
    "bayou.select",
    "bayou.truth",
)


@cache
def source_docstrings(module):
    """Return the docstrings in the source of a module, by qualified name."""
    path = ROOT / module.replace(".", "/")
    text = (path / "__init__.py" if path.is_dir() else path.with_suffix(".py")).read_text()
    docstrings = {}

    def visit(body, prefix):
        for node in body:
            if isinstance(node, ast.ClassDef | ast.FunctionDef):
                docstrings.setdefault(prefix + node.name, ast.get_docstring(node) or "")
                if isinstance(node, ast.ClassDef):
                    visit(node.body, f"{prefix}{node.name}.")

    visit(ast.parse(text).body, "")
    return docstrings


def source_entries(value):
    """Return the entries of the ``Args`` section of a class or function in its source."""
    doc = source_docstrings(value.__module__).get(value.__qualname__, "")
    return set(args_entries(doc))


def parameters(function):
    """Return the public parameters of a function."""
    return {
        name
        for name, parameter in inspect.signature(function).parameters.items()
        if name not in ("self", "cls")
        and not name.startswith("_")
        and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    }


def public_functions(cls):
    """Yield the public functions that a class defines itself."""
    for name, value in vars(cls).items():
        function = getattr(value, "__func__", inspect.unwrap(value) if callable(value) else None)
        if not name.startswith("_") and isinstance(function, FunctionType):
            yield function


def undescribed(cls):
    """Yield the parameters of a class and of its methods without an entry in ``Args``.

    A class describes the fields that it introduces, in its docstring or in that of ``__init__``;
    a method may leave what it has in common with the same method of a base class to that.
    """
    bases = [base for base in cls.__mro__ if base.__module__.startswith("bayou")]
    init = vars(cls).get("__init__")
    is_own_init = inspect.isfunction(init) and init.__module__.startswith("bayou")
    if is_own_init and not dataclasses.is_dataclass(cls):
        for name in sorted(parameters(init) - source_entries(cls) - source_entries(init)):
            yield f"{cls.__qualname__}: {name}"
    introduced = vars(cls).get("__annotations__", {})
    for field in dataclasses.fields(cls) if dataclasses.is_dataclass(cls) else ():
        if field.name not in introduced:
            continue
        if field.init and not field.name.startswith("_") and field.name not in source_entries(cls):
            yield f"{cls.__qualname__}: {field.name}"
    for function in public_functions(cls):
        described = set()
        for base in bases:
            if function.__name__ in vars(base):
                key = f"{base.__qualname__}.{function.__name__}"
                described |= set(args_entries(source_docstrings(base.__module__).get(key, "")))
        for name in sorted(parameters(function) - described):
            yield f"{function.__qualname__}: {name}"


def public_values(module):
    """Yield the classes and functions that a module exports."""
    namespace = importlib.import_module(module)
    for name in namespace.__all__:
        value = getattr(namespace, name)
        is_ours = getattr(value, "__module__", "").startswith("bayou")
        if is_ours and type(value) is not GenericAlias and callable(value):
            yield value


@pytest.mark.parametrize("module", MODULES)
def test_every_public_parameter_has_an_entry_in_the_source(module):
    missing = []
    for value in public_values(module):
        if value is Training:
            continue  # the help texts of its fields are its Args
        if inspect.isclass(value):
            missing += undescribed(value)
        else:
            missing += [f"{value.__name__}: {n}" for n in parameters(value) - source_entries(value)]
    assert not missing, "\n".join(missing)


@pytest.mark.parametrize("module", MODULES)
def test_args_describe_nothing_but_parameters(module):
    for value in public_values(module):
        name = value.__name__
        assert value.__doc__, f"{name} has no docstring"
        assert not value.__doc__.startswith(f"{name}("), f"{name} has the docstring of a dataclass"
        if entries := set(args_entries(value.__doc__)):
            is_options = inspect.isclass(value) and issubclass(value, dict)
            keywords = (
                vars(value)["__annotations__"]
                if is_options
                else inspect.signature(value).parameters
            )
            assert entries <= set(keywords), name


def test_a_docstring_has_the_args_of_the_base_classes():
    @dataclasses.dataclass
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
