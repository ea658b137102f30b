"""The public names: base classes, namespaces, names in files."""

import dataclasses
import types

import pytest
import torch

import bayou
from bayou.core.specs import from_json, to_json
from bayou.network.target import Target


def test_the_top_level_has_fifty_names_and_namespaces_for_the_rest():
    spaces = {name for name in bayou.__all__ if isinstance(getattr(bayou, name), types.ModuleType)}
    assert {
        "diagnostics",
        "flows",
        "guides",
        "likelihoods",
        "methods",
        "metrics",
        "operations",
        "priors",
    } <= spaces
    assert len(set(bayou.__all__) - spaces) <= 50
    for name, space in (
        ("Method", "methods"),
        ("Guide", "guides"),
        ("Prior", "priors"),
        ("Likelihood", "likelihoods"),
    ):
        assert hasattr(getattr(bayou, space), name)
    assert issubclass(bayou.posteriors.Empirical, bayou.Posterior)


@pytest.mark.parametrize(
    ("spec", "name", "family"),
    [
        (bayou.MeanField(0.3), "MeanField", bayou.guides.GuideSpec),
        (bayou.Laplace(), "Laplace", bayou.methods.Method),
        (bayou.priors.StudentT(3.0), "StudentT", bayou.priors.Prior),
        (bayou.likelihoods.StudentT(3.0), "StudentT", bayou.likelihoods.Likelihood),
    ],
)
def test_a_file_holds_the_public_name_which_is_unique_in_its_family(spec, name, family):
    written = to_json(spec)
    assert written["spec"] == type(spec).__name__ == name
    assert from_json(written, family) == spec


def test_a_copied_target_learns_a_noise_of_its_own():
    target = Target.build(torch.nn.Linear(1, 1), bayou.Gaussian(0.5, learn=True), None, 10)
    other = target.copy(20)
    assert (other.n, target.copy().n) == (20, 10)
    assert other.net is target.net
    with torch.no_grad():
        other.likelihood.log_scale += 1.0
    assert target.likelihood.gaussian_noise == pytest.approx(0.5)
    assert dataclasses.replace(other, n=10, likelihood=target.likelihood) == target
