"""The weight of the KL: what is compared on held-out rows, and what is fitted then."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

import bayou
from bayou.network.target import Target
from bayou.select import NamedMethod, best_method, by_name, kl_weight, plan
from bayou.select.recipes import Standardized
from bayou.select.search_run import SearchRun
from bayou.training.data import as_data

METHOD = bayou.VI(beta="validation", steps=20, lr=1e-2)


def classes(n=100):
    x = torch.randn(n, 3, generator=torch.Generator().manual_seed(0))
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    return net, (x, (x[:, 0] > 0).long())


def few_weights(monkeypatch):
    monkeypatch.setattr(kl_weight, "KL_WEIGHTS", (1.0, 0.1))


def test_the_fit_is_that_of_the_selected_number():
    net, data = classes()
    posterior = bayou.fit(net, data, METHOD, seed=3, progress=False)
    (stage,) = posterior.selection
    assert stage["stage"] == "weight of the KL"
    assert [trial["beta"] for trial in stage["trials"]] == [1.0, 0.3, 0.1, 0.03, 0.01]
    selected = plan(METHOD, Target.build(net, bayou.Categorical(), None, 100), data, seed=3)
    beta = selected.method.beta
    assert f"β = {beta:g}, chosen from 5 on 20 held-out rows" in posterior.plan
    assert posterior.choice.startswith(f"β = {beta:g} was selected: ")
    given = bayou.VI(beta=beta, steps=20, lr=1e-2)
    same = bayou.fit(net, data, given, seed=3, progress=False)
    for name, value in posterior.mean().items():
        assert torch.equal(value, same.mean()[name])


def test_the_elbo_is_never_tempered(monkeypatch):
    monkeypatch.setattr(kl_weight, "KL_WEIGHTS", (0.01,))
    net, data = classes()
    posterior = bayou.fit(net, data, METHOD, progress=False)
    bound = bayou.elbo(posterior, data, 20, seed=0)
    assert bound.value == pytest.approx(bound.log_likelihood - bound.kl)
    record = posterior.history[-1]
    assert record["elbo"] == pytest.approx(record["log_likelihood"] - record["kl"])


def compare(losses, monkeypatch):
    """The comparison of fits with given −log p of 20 held-out rows, by β."""
    asked = {}

    def plan_of(beta, target, rows, run):
        asked[beta] = (target.n, rows)
        posterior = SimpleNamespace(stopped="finished", beta=beta)
        return SimpleNamespace(fit=lambda **options: posterior)

    def held_out_nll(posterior, held_out, seed):
        asked["held out"] = held_out
        return losses[posterior.beta]

    monkeypatch.setattr(best_method, "held_out_nll", held_out_nll)
    net, data = classes()
    target = Target.build(net, bayou.Categorical(), None, 100)
    rows = as_data(data, 10)
    return kl_weight.compare_kl_weights(plan_of, target, rows, SearchRun(progress=False)), asked


def test_trials_learn_from_other_rows_than_those_that_judge_them(monkeypatch):
    losses = dict.fromkeys(kl_weight.KL_WEIGHTS, torch.ones(20))
    comparison, asked = compare(losses, monkeypatch)
    assert comparison.best == "β = 1"  # of equal ones the ELBO
    held_out = set(asked.pop("held out").index.tolist())
    assert set(asked) == set(kl_weight.KL_WEIGHTS)
    for n, rows in asked.values():
        assert n == rows.n == 80
        assert not held_out & set(rows.index.tolist())


@pytest.mark.parametrize(("gain", "best"), [(0.02, "β = 1"), (0.5, "β = 0.1")])
def test_a_smaller_weight_must_be_better_by_more_than_chance(gain, best, monkeypatch):
    noise = torch.randn(20, generator=torch.Generator().manual_seed(0))
    noise -= noise.mean()  # with a standard error of about 0.2
    losses = dict.fromkeys(kl_weight.KL_WEIGHTS, torch.ones(20))
    losses[0.1] = 1 - gain + noise
    assert compare(losses, monkeypatch)[0].best == best


def test_a_name_selects_its_other_settings_for_every_weight(monkeypatch, short_search):
    few_weights(monkeypatch)
    net, data = classes()
    recipe = by_name("lowrank", beta="validation", steps=5)
    target = Target.build(net, bayou.Categorical(), None, 100)
    selected = plan(recipe, target, data, progress=False)
    assert [stage["stage"] for stage in selected.stages] == ["weight of the KL", "prior scale"]
    assert selected.method.beta in kl_weight.KL_WEIGHTS
    # Other rows of the same table do not search again.
    assert isinstance(selected.narrowed, NamedMethod)
    assert selected.narrowed.method.beta == selected.method.beta


def test_a_standardized_method_selects_too(monkeypatch):
    few_weights(monkeypatch)
    net, data = classes()
    posterior = bayou.fit(net, data, Standardized(METHOD), progress=False)
    assert "chosen from 2" in posterior.plan


def test_an_interrupted_search_returns_the_posterior_so_far(monkeypatch):
    net, data = classes()
    original = bayou.VI.fit

    def stopped(self, *args, **options):
        posterior = original(self, *args, **options)
        posterior.stopped = "interrupted"
        return posterior

    monkeypatch.setattr(bayou.VI, "fit", stopped)
    posterior = bayou.fit(net, data, METHOD, progress=False)
    assert posterior.stopped == "interrupted"


def test_a_checkpoint_has_files_of_the_trials_beside_it(monkeypatch, tmp_path):
    few_weights(monkeypatch)
    seen = []
    original = bayou.VI.fit

    def fit(self, *args, checkpoint=None, **options):
        seen.append((self.beta, checkpoint and checkpoint.name))
        return original(self, *args, checkpoint=checkpoint, **options)

    monkeypatch.setattr(bayou.VI, "fit", fit)
    net, data = classes()
    bayou.fit(net, data, METHOD, progress=False, checkpoint=tmp_path / "run")
    assert seen[:2] == [(1.0, "run.beta-1"), (0.1, "run.beta-0.1")]
    assert seen[2][1] == "run"


@pytest.mark.parametrize(
    ("run", "message"),
    [
        (lambda: bayou.VI(beta="cold"), r"in \[0, inf\), or 'validation' to select it .* 'cold'"),
        (lambda: bayou.VI(beta=-1.0), r"VI beta must be in \[0, inf\), got -1"),
        (lambda: by_name("mnf", beta="cold"), "beta must be at least 0, or validation, got 'cold'"),
        (lambda: by_name("mnf", beta=-1.0), "beta must be at least 0, or validation, got -1.0"),
        (lambda: by_name("annealed", beta="validation"), "not for annealed"),
    ],
)
def test_another_weight_is_an_error(run, message):
    with pytest.raises(ValueError, match=message):
        run()


def test_what_cannot_hold_out_rows_is_an_error():
    net, (x, y) = classes()
    with pytest.raises(ValueError, match=r"with 50 rows or more, got 40 rows; give beta a number"):
        bayou.fit(net, (x[:40], y[:40]), METHOD, progress=False)
    target = Target.build(net, bayou.Categorical(), None, 100)
    with pytest.raises(ValueError, match=r"use bayou\.fit or bayou\.select\.plan"):
        METHOD.fit(target, (x, y), progress=False)
    with pytest.raises(ValueError, match=r"inside another method, such as Ensemble"):
        bayou.fit(net, (x, y), bayou.Ensemble(2, of=METHOD), progress=False)
