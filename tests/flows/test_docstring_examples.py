"""The examples in the docstrings of flows run and print what they say."""

from __future__ import annotations

import doctest
from importlib import import_module

import pytest

MODULES = [
    "continuous_time.continuous",
    "contractive.contracting",
    "contractive.residual",
    "core.bases",
    "core.compose",
    "core.flow",
    "core.nets",
    "core.transform",
    "layers.autoregressive",
    "layers.builders",
    "layers.cdf",
    "layers.conditioners",
    "layers.coupling",
    "layers.determinant",
    "models.amortized",
    "models.causal",
    "models.decoders",
    "models.image_nets",
    "models.images",
    "models.transformer",
    "models.vae",
    "surjections.conditional",
    "surjections.maps",
    "surjections.quantization",
]


@pytest.mark.parametrize("name", MODULES)
def test_docstring_examples_print_what_they_say(name: str) -> None:
    module = import_module(f"bayou.flows.{name}")
    results = doctest.testmod(module)
    assert results.attempted > 0
    assert results.failed == 0
