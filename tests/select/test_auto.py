"""The name "auto": a mixture of methods with weights found on held-out rows."""

from dataclasses import dataclass, field
from typing import final

import pytest
import torch
from torch import nn

import bayou
from bayou.core.progress import BayouWarning
from bayou.inference.method import Method
from bayou.network.target import Target
from bayou.posteriors import Empirical, Mixture
from bayou.select import Auto, Plan, Recipe, plan
from bayou.select.folds import SINGLE_FOLD_ROWS
from bayou.select.search_run import stop_at_network
from bayou.training.data import as_data

NOISE = bayou.Gaussian(0.3)


@final
@dataclass(frozen=True)
class Line(Method):
    """The point y = slope·x, with the rows of every call; call ``interrupted`` ends by Ctrl-C."""

    slope: float
    rows: list = field(default_factory=list, compare=False)
    interrupted: int = -1

    def fit(self, target, data, **options):
        stack = {"weight": torch.full((1, 1, 1), self.slope)}
        posterior = Empirical(target, target.network, stack, [{"step": 0.0, "mode_nll": 1.0}])
        posterior.stopped = "finished" if len(self.rows) != self.interrupted else "interrupted"
        self.rows.append(as_data(data, 128).n)
        return posterior


@final
@dataclass(frozen=True)
class Broken(Method):
    def fit(self, target, data, **options):
        raise FloatingPointError("it went to infinity")


def fit(methods, rows=100, **settings):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(rows, 1, generator=generator)
    y = x + 0.3 * torch.randn(rows, 1, generator=generator)
    net = nn.Linear(1, 1, bias=False)
    auto = Auto(methods, **settings)
    return bayou.fit(net, (x, y), auto, likelihood=NOISE, progress=False)


def test_auto_is_the_mixture_of_what_predicts_best_together():
    """Two lines that are wrong on one side each are kept, one that is far off and one that cannot
    be fitted are not; those that are kept are fitted to all rows.
    """
    methods = {"low": Line(0.8), "high": Line(1.2), "far": Line(9.0), "broken": Broken()}
    posterior = fit(methods)
    assert isinstance(posterior, Mixture)
    assert float(posterior.weights.sum()) == pytest.approx(1)
    assert bool((posterior.weights > 0.2).all())
    assert methods["low"].rows == [80, 80, 100]
    assert methods["far"].rows == [80, 80]
    weight = f"{float(posterior.weights[0]):.2f}"
    assert f"the mixture {weight} low + " in posterior.choice
    assert "40 held-out rows" in posterior.choice
    assert "broken failed: it went to infinity" in posterior.choice
    assert posterior.plan.startswith(f"{weight} low + ")
    assert [trial["method"] for trial in posterior.selection[0]["trials"]] == ["low", "high", "far"]
    assert posterior.stopped == "finished"
    assert [record["member"] for record in posterior.history] == [0.0, 1.0]
    assert "mode_nll" not in posterior.history[0]


@final
@dataclass(frozen=True)
class Collapsed(Method):
    """The same point, whose last record says that it is no better than a constant."""

    slope: float

    def fit(self, target, data, **options):
        record = {"step": 0.0, "elbo": -9.0, "kl": 5.0, "nll": 1.2, "constant_nll": 1.2}
        posterior = Line(self.slope).fit(target, data)
        posterior.history = [record | {"nll_error": 0.1, "collapsed": 1.0}]
        return posterior


@pytest.mark.parametrize("names", [("low", "high"), ("high", "low")])
def test_a_component_that_collapsed_is_said_by_the_checks_of_the_mixture(names):
    """Whether it is the last component or not; its NLL is not that of the mixture."""
    methods = {"low": Collapsed(0.8), "high": Line(1.2)}
    posterior = fit({name: methods[name] for name in names})
    assert isinstance(posterior, Mixture)
    check = posterior.checks["collapse"]
    assert check.status == "warning"
    assert f"component {names.index('low') + 1} of the mixture" in check.text


def test_a_method_without_a_finite_score_is_left_out():
    posterior = fit({"low": Line(0.8), "nan": Line(float("nan")), "high": Line(1.2)})
    assert posterior.members == 2
    assert "nan failed: 40 of 40 held-out rows have no finite density" in posterior.choice
    assert posterior.predict(torch.ones(1, 1)).mean.isfinite().all()


def test_many_rows_are_held_out_once():
    methods = {"low": Line(0.8), "high": Line(1.2)}
    fit(methods, rows=SINGLE_FOLD_ROWS)
    assert methods["low"].rows == [400, 500]


def test_a_method_with_nearly_all_the_weight_is_fitted_alone():
    methods = {"far": Line(9.0), "right": Line(1.0)}
    posterior = fit(methods)
    assert isinstance(posterior, Empirical)
    assert posterior.choice.startswith("right was selected: it has nearly all the weight")
    assert posterior.plan == "right, chosen from 2 methods on held-out rows"


def test_most_limits_the_methods_that_are_fitted_again():
    methods = {"low": Line(0.8), "high": Line(1.2), "middle": Line(1.05)}
    assert fit(methods, most=2).members == 2
    assert isinstance(fit({name: Line(m.slope) for name, m in methods.items()}, most=1), Empirical)


@pytest.mark.parametrize(("call", "kind"), [(0, Empirical), (2, Empirical)])
def test_an_interruption_returns_the_posterior_so_far(call, kind):
    """In the search and in the first fit to all rows: what that fit had."""
    posterior = fit({"low": Line(0.8, interrupted=call), "high": Line(1.2)})
    assert isinstance(posterior, kind)
    assert posterior.stopped == "interrupted"


def test_an_interruption_of_the_last_fit_keeps_the_finished_ones():
    posterior = fit({"low": Line(0.8), "high": Line(1.2, interrupted=2)})
    assert isinstance(posterior, Mixture)
    assert posterior.members == 1
    assert posterior.stopped == "interrupted"


@final
@dataclass(frozen=True)
class Searched(Recipe):
    """A recipe of ``Line`` whose search for all rows ends by Ctrl-C; it notes its searches."""

    line: Line
    searches: list = field(default_factory=list, compare=False)
    batch_size: int = 128

    def make_plan(self, target, data, run):
        rows = as_data(data, 128)
        self.searches.append(rows.n)
        if rows.n == 100:
            raise stop_at_network(target)
        return Plan(target, self.line, rows, run.seed)


def test_an_interruption_of_a_search_of_all_rows_ends_the_fit():
    """Neither the searches of other methods follow, nor the fits of those before."""
    first = Line(0.8)
    second, third = Searched(Line(1.2)), Searched(Line(1.0))
    posterior = fit({"first": first, "second": second, "third": third})
    assert posterior.stopped == "interrupted"
    assert second.searches == [80, 80, 100]
    assert third.searches == [80, 80]
    assert first.rows == [80, 80]


@final
@dataclass(frozen=True)
class FailsAtLast(Recipe):
    """A recipe of ``Line`` that raises an error for all rows, in the search or in the fit."""

    line: Line
    in_search: bool
    error: type[BaseException] = FloatingPointError
    batch_size: int = 128

    def make_plan(self, target, data, run):
        rows = as_data(data, 128)
        if rows.n < 100:
            return Plan(target, self.line, rows, run.seed)
        if self.in_search:
            raise self.error("no more memory")
        return Plan(target, Raises(self.error), rows, run.seed)


@final
@dataclass(frozen=True)
class Raises(Method):
    error: type[BaseException]

    def fit(self, target, data, **options):
        raise self.error("no more memory")


@pytest.mark.parametrize("in_search", [True, False])
def test_a_method_whose_last_fit_fails_is_left_out(in_search):
    methods = {"low": Line(0.8), "middle": FailsAtLast(Line(1.0), in_search), "high": Line(1.2)}
    with pytest.warns(
        BayouWarning, match="middle was left out, .* FloatingPointError: no more mem"
    ):
        posterior = fit(methods, pull=1000.0)
    assert [type(component) for component in posterior.components] == [Empirical, Empirical]
    slopes = [float(component.stack["weight"]) for component in posterior.components]
    assert slopes == pytest.approx([0.8, 1.2])
    assert float(posterior.weights.sum()) == pytest.approx(1)
    assert "middle was left out" in posterior.choice
    assert posterior.stopped == "finished"


@pytest.mark.parametrize("in_search", [True, False])
def test_one_method_that_is_left_is_the_posterior(in_search):
    methods = {"low": FailsAtLast(Line(0.8), in_search), "high": Line(1.2)}
    with pytest.warns(BayouWarning, match="low was left out"):
        posterior = fit(methods)
    assert isinstance(posterior, Empirical)
    assert float(posterior.stack["weight"]) == pytest.approx(1.2)
    assert "low was left out" in posterior.choice


@pytest.mark.parametrize("in_search", [True, False])
def test_the_error_is_raised_where_nothing_is_left(in_search):
    with pytest.raises(FloatingPointError, match="no more memory"):
        fit({name: FailsAtLast(Line(slope), in_search) for name, slope in [("a", 0.8), ("b", 1.2)]})


@pytest.mark.parametrize("in_search", [True, False])
@pytest.mark.parametrize("error", [KeyboardInterrupt, TypeError])
def test_other_errors_and_interruptions_of_the_last_fit_end_it(in_search, error):
    last = Line(1.2)
    with pytest.raises(error):
        fit({"low": FailsAtLast(Line(0.8), in_search, error), "high": last})
    assert last.rows == [80, 80]


def test_one_row_cannot_be_held_out():
    with pytest.raises(ValueError, match="auto holds out some of the rows, and there is 1 row"):
        fit({"line": Line(1.0)}, rows=1)


def test_a_plan_of_a_mixture_says_what_it_is():
    x = torch.randn(60, 1)
    rows = (x, x + 0.3 * torch.randn(60, 1))
    target = bayou.fit(
        nn.Linear(1, 1, bias=False), rows, bayou.MAP(steps=1), likelihood=NOISE, progress=False
    ).target
    methods = {"low": Line(0.8), "high": Line(1.2)}
    selected = plan(Auto(methods), target, rows)
    assert "low + " in str(selected)
    assert selected.fit().members == 2
    other = target.copy()
    again = selected.method.fit(other, rows)
    assert all(component.target is other for component in again.components)


@pytest.mark.slow
def test_the_mixture_by_name_predicts_in_the_units_of_the_user(tmp_path):
    """Saved and loaded bit for bit, with the components' noise in units of y."""
    generator = torch.Generator().manual_seed(0)
    x = 100 + 20 * torch.rand(60, 2, generator=generator)
    y = 1000 + 5 * x[:, :1] + 8 * torch.randn(60, 1, generator=generator)
    net = nn.Sequential(nn.Linear(2, 5), nn.Tanh(), nn.Linear(5, 1))
    recipe = bayou.select.by_name("auto", effort=0.1)
    posterior = bayou.fit(net, (x, y), recipe, progress=False)
    predictive = posterior.predict(x)
    nll = -float(predictive.log_prob(y).mean())
    assert 3.2 < nll < 3.8  # ½ log 2πe·8² = 3.498
    posterior.save(tmp_path / "auto.bayou")
    loaded = bayou.load(tmp_path / "auto.bayou", net)
    assert torch.equal(loaded.predict(x).outputs, predictive.outputs)


@pytest.mark.parametrize(("settings", "message"), [({"pull": 0.0}, "pull"), ({"most": 0}, "most")])
def test_settings_are_checked(settings, message):
    with pytest.raises(ValueError, match=message):
        Auto({"map": bayou.MAP()}, **settings)


def test_a_method_that_does_not_suit_the_rows_is_not_tried():
    """``Wide`` is for numbers: classes are compared without it, and nothing failed."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(60, 2, generator=generator)
    y = (x[:, 0] > 0).long()
    methods = {"map": bayou.MAP(steps=5), "wide": bayou.methods.Wide()}
    posterior = bayou.fit(nn.Linear(2, 2), (x, y), Auto(methods), progress=False)
    assert "failed" not in posterior.choice
    assert [trial["method"] for trial in posterior.selection[0]["trials"]] == ["map"]


def test_ratings_have_no_noise_that_depends_on_x():
    """Rows that repeat with their y would have no noise, and an infinite density at one value."""
    x = torch.randn(200, 2, generator=torch.Generator().manual_seed(0))
    methods = bayou.select.by_name("auto")
    for y, expected in ((x[:, :1], True), ((2 * x[:, :1]).round(), False)):
        net = nn.Linear(2, 1)
        target = Target.build(net, bayou.Gaussian(0.5, learn=True), None, 200)
        suitable = methods._suitable_for(target, as_data((x, y), 50))
        assert ("wide-noise" in suitable.methods) == expected
        assert "wide" in suitable.methods
