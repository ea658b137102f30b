"""A plan: what is fitted, how it is described, changed and fitted."""

import signal
import traceback
from dataclasses import replace

import pytest
import torch
from torch import nn

import bayou
from bayou.core import progress
from bayou.network.target import Target
from bayou.select import NamedMethod, Plan, by_name, plan, prior_scale
from bayou.select.folds import describe_folds, split_folds
from bayou.select.plans import Fitted
from bayou.select.prior_scale import select_prior_scale
from bayou.select.search_run import SearchRun
from bayou.select.shared_searches import shared_searches
from bayou.training.data import as_data

F64 = torch.float64


def numbers():
    """40 rows of two numbers, and a number y with noise."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(40, 2, generator=generator, dtype=F64)
    return x, x[:, :1].sin() + 0.2 * torch.randn(40, 1, generator=generator, dtype=F64)


def classes():
    """The same rows with two classes."""
    x, y = numbers()
    return x, (y[:, 0] > 0).long()


def network(outputs):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 6), nn.Tanh(), nn.Linear(6, outputs)).double()


def target_of(rows):
    """The target of ``bayou.fit`` for a name, with rows as they are."""
    if rows[1].is_floating_point():
        return Target.build(network(1), bayou.Gaussian(0.5, learn=True), None, 40)
    return Target.build(network(2), bayou.Categorical(), None, 40)


@pytest.mark.parametrize("name", ["map", "ensemble", "laplace", "ffg"])
@pytest.mark.parametrize("rows", [numbers(), classes()], ids=["numbers", "classes"])
def test_the_fit_of_a_plan_is_one_fit_of_its_method(name, rows):
    method = by_name(name, effort=0.05)
    made = plan(method, target_of(rows), rows)
    assert isinstance(made, Plan)
    posterior = made.fit()
    again = made.method.fit(made.target, made.rows)
    x = rows[0][:5]
    outputs = posterior.predict(x, samples=3).outputs
    assert torch.equal(outputs, again.predict(x, samples=3).outputs)
    assert posterior.plan == made.description
    assert len(posterior.selection) >= len(made.stages) > 0
    assert str(made).startswith("fit ")
    assert all(decision in str(made) for decision in made.decisions)


def test_a_plan_says_in_words_what_was_selected():
    rows = numbers()
    made = plan(by_name("laplace", effort=0.1), target_of(rows), rows)
    assert " of the default, chosen from " in made.description
    assert "noise " in made.description
    assert "in the units of the fit, by the errors" in made.description
    assert "and by the predictive variance of Laplace" in made.description
    x, y = rows
    fitted = bayou.fit(network(1), (x, 50 * y), by_name("map", effort=0.1))
    noise = fitted.target.likelihood.gaussian_noise
    std = float(50 * y.std(correction=0))
    assert f"noise {noise / std:.3g} standard deviations of y, by the errors" in fitted.plan
    rows = classes()
    layers = plan(by_name("ffg", steps=5), target_of(rows), rows)
    assert "random weights: " in layers.description
    assert "was selected: the lowest NLL" in layers.choice


def test_the_scale_of_a_prior_and_its_folds_are_described():
    rows = as_data(classes())
    assert describe_folds(split_folds(rows, 0)) == "by 5-fold cross-validation"
    target = replace(target_of(classes()), prior=bayou.Normal("fan_in", gain=3.0))
    run = SearchRun(progress=False, start=bayou.MAP(effort=0.1))
    selected, record, (decision,) = select_prior_scale(target, rows, run, draws_all_weights=False)
    assert decision.endswith("of the default, chosen from 5 on 8 held-out rows")
    assert len(record["trials"]) == 5
    scale = min(record["trials"], key=lambda trial: trial["nll"])["scale"]
    assert decision.startswith(f"prior scale {scale:.3g} ")
    before = target.priors["0.weight"].log_scale
    after = selected.priors["0.weight"].log_scale
    assert float((after - before).exp()) == pytest.approx(scale)


def test_methods_that_are_compared_share_the_search_of_the_prior_scale(monkeypatch):
    rows = as_data(classes())
    prior = bayou.Normal("fan_in", gain=3.0)
    run = SearchRun(progress=False, start=bayou.MAP(effort=0.1))
    searches = []
    original = prior_scale.search_paths
    monkeypatch.setattr(
        prior_scale, "search_paths", lambda *args: searches.append(1) or original(*args)
    )

    def select(run=run, gain=1.0, rows=rows, draws_all_weights=False):
        target = replace(target_of(classes()), prior=prior)
        with torch.no_grad():
            next(target.net.parameters()).mul_(gain)
        _, record, decision = select_prior_scale(
            target, rows, run, draws_all_weights=draws_all_weights
        )
        return {trial["scale"]: trial["nll"] for trial in record["trials"]}, decision

    alone = select()
    random_alone = select(draws_all_weights=True)
    assert len(searches) == 2
    with shared_searches():
        assert select() == select() == alone
        assert len(searches) == 3
        losses, _ = select(draws_all_weights=True)  # without the widest prior
        assert len(searches) == 3
        assert losses.keys() == random_alone[0].keys()
        assert list(losses.values()) == pytest.approx(list(random_alone[0].values()), rel=1e-2)
        select(run=replace(run, seed=1))
        select(gain=2.0)
        select(rows=rows.split(0.2, 0)[0])
        assert len(searches) == 6
        x, y = rows.source
        select(rows=rows.with_source((x, 1 - y)))  # other data with the same numbers of rows
        select(rows=rows.with_source((-x, y)))
        assert len(searches) == 8
        assert select(rows=rows.with_source((x.clone(), y.clone()))) == alone
        assert len(searches) == 8
    select()
    assert len(searches) == 9


def test_a_plan_can_be_changed_and_fitted():
    rows = numbers()
    made = plan(by_name("ffg", steps=10, effort=0.1), target_of(rows), rows)
    longer = replace(made, method=replace(made.method, steps=20))
    assert longer.fit().history[-1]["step"] == 19
    mode = plan(by_name("map", effort=0.1), target_of(rows), rows)
    assert isinstance(mode.method, Fitted)
    other = replace(mode, target=replace(mode.target, prior=bayou.Normal(0.01)))
    narrow = other.fit()  # the posterior of the search is that of another target
    assert narrow.sample(1)["0.weight"].abs().max() < 0.1


def test_a_method_object_is_its_own_plan():
    rows = numbers()
    made = plan(bayou.MAP(steps=3), target_of(rows), rows)
    assert made.method == bayou.MAP(steps=3)
    assert made.stages == ()
    assert made.fit().plan == ""


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("rows", [numbers(), classes()], ids=["numbers", "classes"])
def test_ctrl_c_ends_the_search_with_the_network_as_it_is(rows, first, monkeypatch):
    """While its line is shown for the first time, too."""
    monkeypatch.setattr(progress, "REDRAW", 0.0)
    target = target_of(rows)

    def press(title, step, total, fields):
        if step >= first and "choosing" in title:
            signal.raise_signal(signal.SIGINT)

    made = plan("laplace", target, rows, seed=0, progress=press)
    posterior = made.fit()
    assert posterior.stopped == "interrupted"
    torch.testing.assert_close(posterior.mean(), target.start(), rtol=0, atol=0)
    with pytest.raises(ValueError, match="the search was interrupted"):
        made.method.fit(target.copy(), rows)


def test_a_recipe_takes_the_method_for_the_size_of_the_network():
    recipe = NamedMethod(bayou.MAP(), bayou.MAP(), large=bayou.MLE(), max_weights=32)
    assert recipe.method_for(target_of(classes())) == bayou.MAP()  # 32 weights
    assert replace(recipe, max_weights=31).method_for(target_of(classes())) == bayou.MLE()


@pytest.mark.parametrize("rows", [numbers(), classes()], ids=["numbers", "classes"])
def test_the_done_part_of_a_fit_never_decreases(rows, monkeypatch):
    monkeypatch.setattr(progress, "REDRAW", 0.0)
    done = []
    titles = []

    def show(title, step, total, fields):
        titles.append(title)
        if "done" in fields:
            done.append(fields["done"])

    method = by_name("ffg", steps=3, effort=0.1)
    plan(method, target_of(rows), rows, seed=0, progress=show).fit(progress=show)
    assert done == sorted(done)
    counts = {title.partition(" of ")[2].partition(":")[0] for title in titles}
    assert len(counts) == 1  # all stages are numbered together


def test_between_the_user_and_the_last_fit_there_are_at_most_seven_functions(monkeypatch):
    """Of fits that are compared, too."""
    depths = []
    plain = bayou.VI.fit

    def fit(self, *args, **options):
        files = [frame.filename for frame in traceback.extract_stack()]
        depths.append(sum("/bayou/" in file and "/tests/" not in file for file in files))
        return plain(self, *args, **options)

    monkeypatch.setattr(bayou.VI, "fit", fit)
    for outputs, rows in ((1, numbers()), (2, classes())):
        bayou.fit(network(outputs), rows, by_name("mnf", effort=0.05))
    assert 1 < max(depths) <= 7, depths
