"""The names that a user finds: base classes, namespaces, second names of the same class."""

from __future__ import annotations

import dataclasses
import types

import pytest
import torch

import bayou
from bayou.specs import from_json, to_json
from bayou.target import Target


def test_the_top_level_has_fifty_names_and_namespaces_for_the_rest() -> None:
    spaces = {name for name in bayou.__all__ if isinstance(getattr(bayou, name), types.ModuleType)}
    assert {"diagnostics", "flows", "guides", "likelihoods", "methods", "metrics", "operations", "priors"} <= spaces
    assert len(set(bayou.__all__) - spaces) <= 50
    for name, space in (("Method", "methods"), ("Guide", "guides"), ("Prior", "priors"), ("Likelihood", "likelihoods")):
        assert hasattr(getattr(bayou, space), name)
    assert issubclass(bayou.posteriors.Empirical, bayou.Posterior)


@pytest.mark.parametrize(
    ("spec", "alias", "family"),
    [
        (bayou.MeanField(0.3), "MeanField", bayou.guides.GuideSpec),
        (bayou.priors.Laplace(0.3), "Laplace", bayou.priors.Prior),
        (bayou.likelihoods.StudentT(3.0), "StudentT", bayou.likelihoods.Likelihood),
    ],
)
def test_files_may_say_either_name(spec: object, alias: str, family: type) -> None:
    """Written under the old name, as ever; and where names of several families meet, their own names win."""
    written = to_json(spec)
    assert written["spec"] in ("FFG", "DoubleExponential", "StudentTLikelihood")
    assert from_json(written, family) == from_json(written | {"spec": alias}, family) == spec
    every = (bayou.methods.Method, bayou.likelihoods.Likelihood, bayou.priors.Prior, bayou.guides.GuideSpec)
    assert isinstance(from_json(to_json(bayou.Laplace()), *every), bayou.Laplace)
    assert isinstance(from_json(to_json(bayou.priors.StudentT()), *every), bayou.priors.StudentT)


def test_a_copied_target_learns_a_noise_of_its_own() -> None:
    target = Target.build(torch.nn.Linear(1, 1), bayou.Gaussian(0.5, learn=True), None, 10)
    other = target.copy(20)
    assert (other.n, target.copy().n) == (20, 10)
    assert other.net is target.net
    with torch.no_grad():
        other.likelihood.log_scale += 1.0
    assert target.likelihood.gaussian_noise == pytest.approx(0.5)
    assert dataclasses.replace(other, n=10, likelihood=target.likelihood) == target
