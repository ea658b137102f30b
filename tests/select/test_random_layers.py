"""Which layers are random, and which of several methods is selected, by held-out rows."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import pytest
import torch
from torch import Tensor, nn

import bayou
from bayou.inference.method import Method
from bayou.network.target import Target
from bayou.posteriors import Empirical, Posterior
from bayou.priors import BoundNormal
from bayou.select import NamedMethod, by_name, plan, regularization_path
from bayou.select.random_layers import LastLayer
from bayou.training.data import as_data


def several_classes() -> tuple[Tensor, Tensor, nn.Module]:
    """240 rows of four classes, and a network of 1,264 weights."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(240, 6, generator=generator)
    y = (x[:, :3].sum(1) > 0).long() + 2 * (x[:, 3] > 0).long()
    torch.manual_seed(0)
    return (
        x,
        y,
        nn.Sequential(nn.Linear(6, 30), nn.ReLU(), nn.Linear(30, 30), nn.ReLU(), nn.Linear(30, 4)),
    )


START = bayou.MAP(steps=100, lr=5e-3)


def fit_layers(
    method: Method,
    net: nn.Module,
    rows: tuple[Tensor, Tensor],
    prior: bayou.Prior | None = None,
    likelihood: bayou.Likelihood | None = None,
) -> Posterior:
    """Fit a method over the layers that held-out rows select, to rows as they are."""
    target = Target.build(
        net, likelihood or bayou.Categorical(), prior or bayou.Normal(1.0), len(rows[1])
    )
    recipe = NamedMethod(method, START, selects_layers=True)
    return plan(recipe, target, rows, progress=False).fit(progress=False)


@pytest.mark.parametrize(
    "name", ["ffg", "ivon", "sgld", pytest.param("mnf", marks=pytest.mark.slow)]
)
@pytest.mark.filterwarnings("ignore::bayou.inference.probe.MixingWarning")
def test_the_last_layer_is_random_where_all_layers_predict_worse(name: str, tmp_path: Path) -> None:
    """Forty rows for 1,264 weights: over all of them a family collapses, and chains lose what the
    mode has learned.
    """
    x, y, net = several_classes()
    named: Any = by_name(name, steps=80, chains=2)
    prior = bayou.Normal("fan_in", gain=3.0)
    posterior = fit_layers(named.method, net, (x[:40], y[:40]), prior)
    assert (posterior.choice or "").startswith("last layer")
    learned = ["last layer, without a prior of the others"] if name in ("ffg", "mnf") else []
    tried = ["last layer", *learned, "all layers", "mode"]  # and no wider prior than the given one
    assert [trial["method"] for trial in posterior.selection[0]["trials"]] == tried
    draws = posterior.sample(4, seed=0)
    assert {name for name, value in draws.items() if bool((value.std(0) > 0).any())} == {
        "4.weight",
        "4.bias",
    }
    if name in ("ivon", "sgld"):
        mode = bayou.fit(net, (x[:40], y[:40]), START, prior=prior, progress=False).sample(1)
        assert all(
            torch.equal(draws[name][:1], mode[name])
            for name in ("0.weight", "0.bias", "2.weight", "2.bias")
        )
    p = posterior.predict(x[40:], samples=50, seed=0)
    assert -float(p.log_prob(y[40:]).mean()) < math.log(4) - 0.3
    posterior.save(tmp_path / "p.bayou")
    again = bayou.load(tmp_path / "p.bayou", net)  # whose weights are the initial ones
    assert torch.equal(again.predict(x[40:], samples=50, seed=0).mean, p.mean)


def test_a_choice_of_layers_starts_at_the_mode_of_all_rows() -> None:
    """A family that does not move from its start."""
    x, y, net = several_classes()
    still = bayou.VI(bayou.MeanField(), steps=1, lr=1e-12, scale_lr=1e-12)
    posterior = fit_layers(still, net, (x[:40], y[:40]))
    mode = bayou.fit(net, (x[:40], y[:40]), START, progress=False).sample(1)
    for name, value in posterior.mean().items():
        assert torch.allclose(value, mode[name][0], atol=1e-6)
    numbers = fit_layers(still, net, (x[:40], x[:40, :4]), likelihood=bayou.Gaussian(0.3))
    assert not numbers.choice


def test_a_wider_prior_is_that_of_the_last_layer() -> None:
    x, y, net = several_classes()
    target = Target.build(net, bayou.Categorical(), bayou.Normal("fan_in", gain=3.0), 40)
    still = bayou.VI(bayou.MeanField(), start="network", steps=1)
    method, wider_target = LastLayer(("4.weight", "4.bias"), scale=2.0).restrict(still, target)
    posterior = method.fit(wider_target, (x[:40], y[:40]), progress=False)
    for name, prior in posterior.target.priors.items():
        assert isinstance(prior, BoundNormal)
        wider = prior.log_scale - target.priors[name].log_scale  # type: ignore[attr-defined]
        assert float(wider.detach()) == pytest.approx(
            math.log(2.0) if name[0] == "4" else 0.0, abs=1e-6
        )


def test_chains_of_classes_have_half_the_length(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of a mode have a third of 10,000 steps: half of that where layers are selected, in all
    three fits.
    """
    x, y, net = several_classes()
    steps: list[int | None] = []

    def still(self: bayou.SGLD, target: Target, data: Any, **options: Any) -> Posterior:
        steps.append(self.steps)
        return Empirical(
            target,
            target.network,
            {name: value.unsqueeze(0) for name, value in target.start().items()},
        )

    monkeypatch.setattr(bayou.SGLD, "fit", still)
    posterior = fit_layers(bayou.SGLD(start=None), net, (x, y))
    assert steps == [1666, 1666, 1666]
    assert len(posterior.sample(1)) == 6  # with the points below


@pytest.mark.parametrize("family", [bayou.VI, bayou.IVON])
def test_fits_that_are_compared_have_half_of_the_steps(
    family: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From a mode a default run plans 300 steps over all rows, and more until it has converged.

    A comparison of layers has 150 for each candidate.
    """
    x, y, net = several_classes()
    steps: list[tuple[int, bool]] = []

    def still(self: Any, target: Target, data: Any, **options: Any) -> Posterior:
        steps.append((self.total_steps(as_data(data, self.batch_size)), self.open_ended))
        return Empirical(
            target,
            target.network,
            {name: value.unsqueeze(0) for name, value in target.start().items()},
        )

    monkeypatch.setattr(family, "fit", still)
    fit_layers(family(), net, (x, y))
    assert steps == [(150, False)] * (3 if family is bayou.VI else 2) + [(300, True)]
    steps.clear()
    fit_layers(family(steps=60), net, (x, y))
    assert set(steps) == {(60, False)}  # a number that was given is kept


def test_annealing_that_is_compared_has_half_of_the_temperatures(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    x, y, net = several_classes()
    tried: list[tuple[int, int, bool]] = []

    def still(self: bayou.Annealed, target: Target, data: Any, **options: Any) -> Posterior:
        start: Any = self.of
        tried.append(
            (
                self.temperatures,
                start.total_steps(as_data(data, start.batch_size)),
                start.open_ended,
            )
        )
        return Empirical(
            target,
            target.network,
            {name: value.unsqueeze(0) for name, value in target.start().items()},
        )

    monkeypatch.setattr(bayou.Annealed, "fit", still)
    fit_layers(bayou.Annealed(temperatures=30), net, (x, y))
    assert tried == [(15, 150, False), (15, 150, False), (30, 300, True)]


def test_all_prior_scales_and_folds_are_one_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """The price of a search, by count: 120 evaluations of five scales in five folds, and as many of
    the mode.
    """
    x, y, _ = several_classes()
    net = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4))
    made: list[regularization_path.Modes] = []
    plain = regularization_path.Modes.__init__

    def recorded(self: regularization_path.Modes, *args: Any) -> None:
        plain(self, *args)
        made.append(self)

    monkeypatch.setattr(regularization_path.Modes, "__init__", recorded)
    posterior = bayou.fit(net, (x, y), "map", progress=False)
    assert [len(modes.masks) for modes in made] == [25, 1]
    assert all(modes.optimizer.passes <= regularization_path.LOG_PROB_PASSES for modes in made)
    assert [trial["scale"] for trial in posterior.selection[0]["trials"]] == pytest.approx(
        [3 ** (k / 2) for k in range(-2, 3)]
    )


@pytest.mark.parametrize(("name", "modes"), [("map", 1), ("laplace", 1), ("ffg", 2), ("ivon", 2)])
def test_modes_of_classes_are_found_by_full_passes(
    name: str, modes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The price of a selection, by count: 30 passes for each of five gains and for each further
    mode, no steps.
    """
    x, y, _ = several_classes()
    net = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4))
    walked: list[regularization_path.Path] = []
    plain = regularization_path.Path.__init__

    def recorded(self: regularization_path.Path, *args: Any, **options: Any) -> None:
        plain(self, *args, **options)
        walked.append(self)

    monkeypatch.setattr(regularization_path.Path, "__init__", recorded)
    monkeypatch.setattr(bayou.MAP, "fit", None)
    monkeypatch.setattr(bayou.VI, "total_steps", lambda *args: 20)
    monkeypatch.setattr(bayou.IVON, "total_steps", lambda *args: 20)
    posterior = bayou.fit(net, (x[:60], y[:60]), by_name(name, effort=0.1), progress=False)
    assert len(walked) == 1 + modes
    tried = [trial.get("method") for stage in posterior.selection[1:] for trial in stage["trials"]]
    assert ("last layer, with a wider prior" in tried) == (modes == 2)  # no prior was given
    assert (
        sum(path.passes for path in walked) <= (5 + modes) * regularization_path.LOG_PROB_PASSES / 4
    )


@final
@dataclass(frozen=True)
class Sure(Method):
    """A network whose second class has the given logits in even and in odd rows, x = ±1."""

    even: float
    odd: float

    def fit(self, target: Target, data: Any, **options: Any) -> Posterior:
        half, middle = (self.even - self.odd) / 2, (self.even + self.odd) / 2
        stack = {"weight": torch.tensor([[[0.0], [half]]]), "bias": torch.tensor([[0.0, middle]])}
        return Empirical(target, target.network, stack)


def test_the_first_method_within_the_standard_errors_is_selected() -> None:
    """Both rows have class 1; the second method is better in even rows and worse in odd ones."""
    x = torch.tensor([1.0, -1.0]).repeat(50).unsqueeze(1)
    rows = (x, torch.ones(100, dtype=torch.long))
    methods = {
        "equal": Sure(1.0, 1.0),
        "better on average": Sure(5.0, 0.8),
        "bad": Sure(-9.0, -9.0),
    }

    def choice(errors: float) -> str:
        auto = bayou.select.Auto(methods, errors=errors)
        return (bayou.fit(nn.Linear(1, 2), rows, auto, progress=False).choice or "").partition(
            " was"
        )[0]

    assert choice(0.0) == "better on average"
    assert choice(1.0) == "better on average"  # by .12 ± .04 nats, with as many even as odd rows
    assert choice(100.0) == "equal"
    # "varied" has the lowest NLL and large errors; "better" is better than "equal" in every row, by
    # as much
    methods = {"equal": Sure(1.0, 1.0), "better": Sure(1.2, 1.2), "varied": Sure(9.0, 0.4)}
    assert choice(2.0) == "better"
