"""The digest of what made a row: a changed setting or default gives another one, and the row is
stale.
"""

from __future__ import annotations

import ast
import hashlib
import inspect
import json
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from types import ModuleType
from typing import Any

import torch
from torch import nn

from bayou.app.runs import layers
from bayou.app.runs.nets import NETS
from bayou.core.specs import is_written
from bayou.likelihoods import Categorical
from bayou.methods.vi import Variational
from bayou.select import folds, held_out, relevance
from bayou.select.auto import HELD_OUT_FRACTION
from bayou.target import Target

IDLE = (
    "log_every",
    "checkpoint_every",
    "random_state",
    "device",
    "verbose",
)  # settings that change no number
SELECTION = (
    folds,
    held_out,
    relevance,
    HELD_OUT_FRACTION,
)  # the defaults of methods by name: constants of modules


def digest(*parts: Any) -> str:
    """Twelve digits of the SHA-256 of these values, each spelled with the defaults of its
    fields.
    """
    return hashlib.sha256(json.dumps([spell(part) for part in parts]).encode()).hexdigest()[:12]


def network(name: str) -> tuple[Any, ...]:
    """The settings and the builder of a network by name."""
    return NETS[name], getattr(layers, NETS[name].builder)


def code(module: ModuleType) -> str:
    """The syntax tree of a module without docstrings: what it does, where settings alone do not say
    it.

    Node by node, since ``ast.dump`` differs between versions of Python.
    """
    tree = ast.parse(inspect.getsource(module))
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)
            and ast.get_docstring(node) is not None
        ):
            node.body = node.body[1:]
    leaves = [
        [v for _, v in ast.iter_fields(n) if isinstance(v, str | int | float)]
        for n in ast.walk(tree)
    ]
    return str(
        [(type(node).__name__, own) for node, own in zip(ast.walk(tree), leaves, strict=True)]
    )


def spell(value: Any) -> Any:
    """A value as JSON: a spec by all its fields, a function or class by its qualified name and its
    defaults.

    A variational method is spelled a second time as it is for a large network, with the prior that
    it chooses there. A module is spelled by its constants.
    """
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, torch.dtype):
        return str(value)
    if isinstance(value, list | tuple):
        return [spell(item) for item in value]
    if isinstance(value, Mapping):
        return [[spell(key), spell(item)] for key, item in value.items() if key not in IDLE]
    if isinstance(value, ModuleType):
        return {name: spell(item) for name, item in vars(value).items() if name.isupper()}
    if is_dataclass(value) and not isinstance(value, type):
        if not isinstance(value, Variational):
            return _fields(value)
        large, target = value.adapt_to_size(
            Target.build(nn.Linear(100, 100), Categorical(), None, 1)
        )
        return [_fields(value), _fields(large), spell(target.prior)]
    if callable(value) and hasattr(value, "__qualname__"):
        parameters = inspect.signature(value).parameters.values()
        defaults = {one.name: one.default for one in parameters if one.default is not one.empty}
        return [value.__qualname__, spell(defaults)]
    raise TypeError(
        f"no digest of a {type(value).__name__}: {value!r:.80}; spell it by its settings"
    )


def _fields(spec: Any) -> list[Any]:
    written = {one.name: getattr(spec, one.name) for one in fields(spec) if is_written(one, spec)}
    return [type(spec).__qualname__, spell(written)]
