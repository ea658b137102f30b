"""What the search of some rows decides for other rows of the same table: ``Plan.narrowed``."""

from dataclasses import dataclass, field, replace
from typing import final

import pytest
import torch
from torch import nn

import bayou
from bayou.network.target import Target
from bayou.posteriors import Empirical
from bayou.select import Auto, NamedMethod, Plan, by_name, plan
from bayou.select.recipes import Recipe, Standardized
from bayou.select.regression import CORRECTION
from bayou.training.data import as_data


def numbers(rows=60):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(rows, 2, generator=generator)
    return x, x[:, :1].sin() + 0.3 * torch.randn(rows, 1, generator=generator)


def classes(rows=60):
    x, y = numbers(rows)
    return x, (y[:, 0] > 0).long()


def target_of(rows):
    torch.manual_seed(0)
    x, y = rows
    is_real = y.is_floating_point()
    net = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 1 if is_real else 2))
    likelihood = bayou.Gaussian(0.5, learn=True) if is_real else bayou.Categorical()
    return Target.build(net, likelihood, None, len(x))


def plans_of_most_and_all_rows(recipe, rows):
    """The plan of four fifths of the rows, and that of its narrowed recipe for all rows."""
    count = len(rows[0]) * 4 // 5
    first = plan(recipe, target_of(rows).copy(count), tuple(part[:count] for part in rows))
    assert isinstance(first.narrowed, Recipe)
    return first, plan(first.narrowed, target_of(rows), rows, progress=False)


def test_the_correction_of_a_method_is_selected_once():
    """The noise of the mode is that of all rows, its factor that of four fifths."""
    recipe = by_name("laplace", effort=0.1)
    first, second = plans_of_most_and_all_rows(recipe, numbers())
    stages = [record["stage"] for record in first.stages]
    assert [stage for stage in stages if stage != CORRECTION] == [
        record["stage"] for record in second.stages
    ]
    assert CORRECTION in stages
    correction = first.narrowed.correction
    assert second.narrowed.correction == correction
    of_modes = plan(by_name("map", effort=0.1), target_of(numbers()), numbers(), progress=False)
    noise_of_modes = of_modes.target.likelihood_spec.noise
    noise = second.target.likelihood_spec.noise
    assert noise == pytest.approx(correction.factor * noise_of_modes)
    posterior = second.fit()
    assert posterior.predict(numbers()[0]).mean.isfinite().all()


def test_the_random_layers_are_selected_once():
    first, second = plans_of_most_and_all_rows(by_name("ffg", steps=20), classes(200))
    name = first.narrowed.layers
    assert f"random weights: {name}, chosen from" in first.description
    assert f"random weights: {name}, as for other rows of this table" in second.description
    assert "method" not in [record["stage"] for record in second.stages]


@pytest.mark.parametrize("rows", [classes(100), numbers(60)], ids=["classes", "numbers"])
def test_the_length_of_members_is_selected_once(rows):
    recipe = by_name("tabm", members=2, effort=0.02)
    first, second = plans_of_most_and_all_rows(recipe, rows)
    assert second.narrowed == first.narrowed != recipe
    if first.narrowed.length is not None:
        assert second.method.epochs == first.method.epochs == first.narrowed.length.epochs
        assert not second.stages
    assert "2 members that share their weights" in second.description


def test_the_network_of_bins_narrows_its_own_recipe():
    recipe = replace(by_name("bins", effort=0.1), exact=None)
    first, second = plans_of_most_and_all_rows(recipe, numbers())
    assert first.narrowed.recipe.correction is not None
    assert CORRECTION not in [record["stage"] for record in second.stages]


def test_the_network_that_predicts_its_noise_narrows_its_own_recipe():
    recipe = by_name("tabm-noise", members=2, effort=0.02)
    first, second = plans_of_most_and_all_rows(recipe, numbers())
    length = first.narrowed.recipe.length
    assert second.method.epochs == first.method.epochs == length.epochs
    assert not second.stages


def test_a_resumed_search_has_the_same_correction(tmp_path):
    rows = numbers()
    options = {"checkpoint": tmp_path / "fit", "progress": False}
    plans = [
        plan(by_name("ensemble", effort=0.1), target_of(rows), rows, **options) for _ in range(2)
    ]
    assert plans[0].narrowed == plans[1].narrowed
    assert plans[0].narrowed.correction.factor != 1


def test_a_recipe_without_decisions_keeps_its_identity():
    """Fields of narrowed recipes are not written at their defaults, so that old files resume."""
    from bayou.core.specs import to_json

    recipe = NamedMethod(bayou.Laplace(), bayou.MAP())
    assert not {"layers", "correction"} & set(to_json(recipe)["fields"])
    narrowed = replace(recipe, layers="last layer")
    assert "layers" in to_json(narrowed)["fields"]


@final
@dataclass(frozen=True)
class Counted(Recipe):
    """A recipe that notes how many rows it has planned for, and what it was narrowed to."""

    noted: list = field(default_factory=list, compare=False)
    is_narrow: bool = False
    batch_size: int = 128

    def make_plan(self, target, data, run):
        self.noted.append((as_data(data, 128).n, self.is_narrow))
        inner = Standardized(Slope())
        chosen = inner.make_plan(target, data, run)
        return replace(chosen, narrowed=replace(self, is_narrow=True))


@final
@dataclass(frozen=True)
class Slope(bayou.inference.method.Method):
    def fit(self, target, data, **options):
        posterior = Empirical(target, target.network, {"weight": torch.ones(1, 1, 1)}, [])
        posterior.stopped = "finished"
        return posterior


def test_auto_searches_for_the_first_part_of_the_rows():
    """The second part and all rows are planned by the narrowed recipes."""
    x = torch.randn(100, 1, generator=torch.Generator().manual_seed(0))
    recipe = Counted()
    net = nn.Linear(1, 1, bias=False)
    posterior = bayou.fit(
        net, (x, x), Auto({"one": recipe}), likelihood=bayou.Gaussian(0.3), progress=False
    )
    assert recipe.noted == [(80, False), (80, True), (100, True)]
    assert isinstance(posterior.predict(x).mean, torch.Tensor)
    assert Plan.narrowed is None
