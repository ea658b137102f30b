"""Methods by name on small data: none may explain a clear signal by noise, collapse or diverge."""

import math

import pytest
import torch
from torch import nn

import bayou
from bayou.core import progress
from bayou.network import Network
from bayou.network.target import Target
from bayou.posteriors import Empirical, GaussianPosterior
from bayou.select import by_name, folds, named, prior_scale, regression
from bayou.select.noise import correct_noise, has_noise_to_select
from bayou.select.noise_and_prior import GAIN_OF_NUMBERS, NoiseAndPrior
from bayou.select.recipes import MAX_FULL_WEIGHTS
from bayou.select.regularization_path import PathSearch
from bayou.training.data import Rows

F64 = torch.float64

NOISE = 0.4
BAD_EFFORTS = [0.0, -1.0, math.inf, math.nan]
PRIOR = bayou.Normal("fan_in", gain=GAIN_OF_NUMBERS)


def waves(n=100, noise=NOISE):
    """x, y and the true function: most of the variance of y is signal."""
    generator = torch.Generator().manual_seed(0)
    x = 3.4 * torch.rand(n, 1, generator=generator, dtype=F64) - 1.7
    f = math.sqrt(2) * torch.sin(2.5 * x)
    return x, f + noise * torch.randn(n, 1, generator=generator, dtype=F64), f


def circles(n=300):
    """Two classes that no line divides."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(n, 2, generator=generator, dtype=F64)
    return x, (x.norm(dim=1) > 1.1).long()


def dense(inputs, outputs, width=50):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(inputs, width), nn.ReLU(), nn.Linear(width, outputs)).double()


def fit_numbers(name, x, y, steps=200, **options):
    net = named.find(name).prepare(dense(x.shape[1], y.shape[1]))
    method = by_name(name, steps=steps, **options)
    likelihood = bayou.Gaussian(0.5, learn=True)
    return bayou.fit(net, (x, y), method, likelihood=likelihood, prior=PRIOR)


def noise_of(posterior):
    return float(posterior.target.likelihood.log_scale.detach().exp())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "noise"),
    [("ffg", NOISE), ("mnf", NOISE), ("ivon", NOISE), ("ivon", 0.03), ("lowrank", 0.03)],
)
def test_noise_of_a_regression_is_recovered(name, noise):
    """The best ELBO over weights and noise together is a flat function in this problem.

    Gradients of a regression grow with 1/noise²: steps that do not follow them diverge.
    """
    x, y, f = waves(noise=noise)
    posterior = fit_numbers(name, x, y)
    p = posterior.predict(x, samples=50)
    if noise == NOISE:
        assert noise_of(posterior) == pytest.approx(NOISE, rel=0.25)
    assert (p.mean - f).square().mean().sqrt() < 0.5  # a constant is off by 1


@pytest.mark.parametrize("name", ["lowrank", "sparse", "jeffreys", "horseshoe"])
@pytest.mark.slow
def test_classes_that_no_line_divides(name):
    """Families that used to collapse to the prior, which leaves the share of the majority, 55 %."""
    x, y = circles()
    posterior = bayou.fit(dense(2, 2), (x, y), by_name(name, steps=250))
    p = posterior.predict(x, samples=50)
    assert (p.mean.argmax(1) == y).double().mean() > 0.93
    assert -p.log_prob(y).mean() < 0.35


def tilted(n, test=2000, noise=0.2):
    """A plane in ten dimensions under noise, standardized: what a network of 601 weights
    interpolates.
    """
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(n + test, 10, generator=generator, dtype=F64)
    y = x[:, :4].sum(1, keepdim=True) / 2 + noise * torch.randn(
        n + test, 1, generator=generator, dtype=F64
    )
    return x[:n], y[:n], x[n:], y[n:]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["map", "laplace", "ffg", "swag"])
def test_intervals_cover_what_they_promise_where_the_network_can_interpolate(name):
    """The noise of the largest evidence covers .69, .98, .81 and .67 here.

    By n = 200 residuals a noise is known to 1/√(2n) = 5 %, and a coverage of .9 by it to .34 times
    that, .017; the spread of a method is judged by the 40 rows of one fold, .038.
    """
    x, y, x_test, y_test = tilted(200)
    posterior = fit_numbers(name, x, y, steps=250)
    p = posterior.predict(x_test, samples=50 if posterior.draws is None else None)
    lower, upper = p.interval(0.9)
    error = 3 * 0.017 if name == "map" else 2 * 0.038
    assert float(((lower < y_test) & (y_test < upper)).double().mean()) == pytest.approx(
        0.9, abs=error
    )
    assert (p.mean - y_test).square().mean().sqrt() < 1.5 * 0.2


def test_modes_by_full_passes_and_by_minibatches_find_the_noise(monkeypatch):
    """120 held-out residuals determine a noise to 6.5 %, of a mode that is good.

    Dropout in training makes the loss random, so that its modes are found by minibatches.
    """
    monkeypatch.setattr(progress, "REDRAW", 0.0)
    x, y, _ = waves(600)
    for net in (dense(1, 1), nn.Sequential(*dense(1, 1), nn.Dropout(0.01))):
        titles = []
        posterior = bayou.fit(
            net,
            (x, y),
            by_name("map", steps=200, effort=0.25),
            likelihood=bayou.Gaussian(0.5, learn=True),
            prior=PRIOR,
            progress=lambda title, *rest, titles=titles: titles.append(title),
        )
        assert noise_of(posterior) == pytest.approx(NOISE, rel=3 * 0.065)
        follows_path = "1 of 2: choosing noise and prior" in titles
        assert follows_path == (not isinstance(net[-1], nn.Dropout))


def test_a_method_pays_for_its_own_spread():
    """Functions with variance v at every row, whose mean is right: with all rows, 0.64·v and the
    noise are σ².
    """
    generator = torch.Generator().manual_seed(0)
    y = torch.randn(20_000, 1, generator=generator, dtype=F64)
    rows = Rows((torch.zeros_like(y), y), torch.arange(len(y)), 4096)
    net = nn.Linear(1, 1).double()
    made = Target.build(net, bayou.Gaussian(1.0), bayou.Normal(1.0), len(y))
    spread = 0.8 * torch.tensor([[1.0], [-1.0]], dtype=F64)
    stack = {"weight": torch.zeros(2, 1, 1, dtype=F64), "bias": spread}
    settings = correct_noise(
        NoiseAndPrior(1.0, 2.0, fold_error=float(y.square().mean())),
        Empirical(made, Network(net), stack),
        rows,
        0,
    )
    assert settings.is_corrected
    assert settings.noise**2 == pytest.approx(1 / (1 + 0.64 * 0.8**2), rel=1e-3)
    assert settings.scale == pytest.approx(2 * settings.noise, rel=1e-12)


def target(likelihood, prior=PRIOR, width=5):
    return Target.build(dense(2, 2, width), likelihood, prior, 10)


def test_held_out_rows_are_for_a_learned_gaussian_noise():
    learned = bayou.Gaussian(0.5, learn=True)
    assert has_noise_to_select(target(learned))
    assert not has_noise_to_select(target(bayou.Categorical()))
    assert not has_noise_to_select(target(bayou.Gaussian(0.5)))
    assert not has_noise_to_select(target(learned, bayou.priors.StudentT()))
    assert not has_noise_to_select(target(learned, bayou.Normal(1.0, learn=True)))


def overlapping(n, distance):
    """Two classes of ten-dimensional Gaussians whose means are so far apart, along the diagonal."""
    generator = torch.Generator().manual_seed(2)
    y = torch.arange(n) % 2
    x = torch.randn(n, 10, generator=generator, dtype=F64)
    return x + distance / math.sqrt(10) * (y.double().unsqueeze(1) - 0.5), y


@pytest.mark.parametrize(("distance", "wider"), [(1.0, False), (8.0, True)])
def test_held_out_rows_narrow_the_prior_where_classes_overlap_and_widen_it_where_not(
    distance, wider, tmp_path
):
    rows, net, prior = overlapping(60, distance), dense(10, 2, 20), bayou.Normal("fan_in", gain=3.0)
    method = by_name("map", steps=100)
    posterior = bayou.fit(net, rows, method, checkpoint=tmp_path / "c")
    first = posterior.target.priors["0.weight"]
    step = math.log(float(first.log_scale.exp().mean()) / (3 / math.sqrt(10))) / math.log(
        prior_scale.SCALE_FACTOR
    )
    assert step == pytest.approx(round(step))
    assert step >= 1 if wider else step <= -1
    kept = bayou.fit(net, rows, method, prior=prior)
    assert kept.target.prior == prior
    test = overlapping(2060, distance)
    new = [p.predict(test[0][60:]).log_prob(test[1][60:]).mean() for p in (posterior, kept)]
    assert new[0] > new[1]
    again = bayou.fit(net, rows, method, checkpoint=tmp_path / "c")
    torch.testing.assert_close(again.sample(1), posterior.sample(1), rtol=0, atol=0)


@pytest.mark.parametrize(("name", "steps"), [("swag", 2), ("ffg", 1), ("sghmc", 2), ("lowrank", 1)])
def test_what_draws_all_weights_has_a_prior_one_step_wider_at_most(name, steps, monkeypatch):
    def wider_is_better(*args):
        trials = {(number, 0): float(-number) for number in range(len(args[3]))}
        return PathSearch(len(trials) - 1, 0, torch.zeros(1), {}, trials)

    monkeypatch.setattr(prior_scale, "search_paths", wider_is_better)

    method = by_name(name, steps=10)
    rows = overlapping(30, 1.0)
    posterior = bayou.fit(dense(10, 2, 5), rows, method)
    scale = posterior.target.priors["0.weight"].log_scale.exp().mean()
    assert float(scale) == pytest.approx(3 / math.sqrt(10) * prior_scale.SCALE_FACTOR**steps)


def test_data_without_noise_still_have_a_fit():
    """No noise suits them: the method learns it as it would alone."""
    x = torch.linspace(-1, 1, 30, dtype=F64).unsqueeze(1)
    posterior = fit_numbers("ffg", x, 0 * x, steps=30)
    assert posterior.predict(x, samples=5).mean.isfinite().all()


def test_ctrl_c_before_the_method_gives_the_mode(monkeypatch):
    x, y, _ = waves(40)
    original = bayou.MAP.fit

    def stopped(self, *args, **options):
        posterior = original(self, *args, **options)
        posterior.stopped = "interrupted"
        return posterior

    monkeypatch.setattr(bayou.MAP, "fit", stopped)
    posterior = fit_numbers("ffg", x, y, steps=20, effort=0.1)
    assert isinstance(posterior, Empirical)
    assert posterior.stopped == "interrupted"


def test_members_of_an_ensemble_start_anew_and_not_at_the_mode():
    x, y, _ = waves(40)
    posterior = fit_numbers("ensemble", x, y, steps=20, members=2, effort=0.1)
    first, second = posterior.sample(2, seed=0)["0.weight"]
    assert not torch.allclose(first, second, atol=0.1)


def test_laplace_by_name_is_of_all_weights_of_a_small_network_and_of_the_last_layer_of_a_large_one():
    x, y = circles(60)
    for width, small in ((10, True), (MAX_FULL_WEIGHTS // 5 + 1, False)):
        net = dense(2, 2, width)
        count = sum(p.numel() for p in net.parameters())
        assert (count <= MAX_FULL_WEIGHTS) is small
        method = by_name("laplace", steps=5)
        posterior = bayou.fit(net, (x, y), method, prior=PRIOR)
        assert isinstance(posterior, GaussianPosterior)
        assert posterior.covariance.size == (count if small else 2 * width + 2)


def test_settings_reach_the_method_and_its_start():
    method = by_name("mnf", steps=7, batch_size=9, lr=0.3, beta=0.5, warmup=0.25)
    assert method.selects_layers
    assert method.batch_size == 9
    family = method.method
    assert (family.steps, family.lr, family.beta, family.warmup) == (7, 0.3, 0.5, 0.25)
    assert (method.start.steps, method.start.batch_size) == (7, 9)


@pytest.mark.parametrize("effort", [0.1, 10.0])
def test_effort_multiplies_the_length_that_a_method_has_by_default(effort):
    rows = Rows(
        torch.utils.data.TensorDataset(torch.zeros(640, 1), torch.zeros(640, 1)),
        torch.arange(640),
        2,
    )
    mnf, sgld, nuts, annealed, swag = (
        by_name(n, effort=effort) for n in ("mnf", "sgld", "nuts", "annealed", "swag")
    )
    for part in (mnf.start, mnf.method, annealed.method.of):
        assert part.total_steps(rows) == effort * 10 * 320
    few, many = sgld.large, sgld.method
    assert [(one.chains, one._plan(rows)[0]) for one in (few, many)] == [
        (2, effort * 10_000),
        (8, effort * 5000),
    ]
    assert by_name("sgld", chains=3).method.chains == 3
    assert nuts.method.draws == nuts.method.warmup == effort * 250
    assert annealed.method.temperatures == effort * 40
    assert swag.method.total_steps(rows) == max(effort, 0.2) * 3200
    assert by_name("mnf", effort=effort, steps=7).start.total_steps(rows) == 7
    short = Rows(rows.source, torch.arange(100), 2)
    assert [len(folds.split_folds(one, 0, effort)) for one in (short, rows)] == [
        1 if effort < 1 else 5,
        1,
    ]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: bayou.fit(dense(2, 2), circles(20), "laplase"), "did you mean 'laplace'"),
        (lambda: by_name("map", step=3), "did you mean 'steps'"),
        (lambda: by_name("map", steps=0), "steps must be at least 1, got 0"),
        (lambda: bayou.select.Auto({}), "Auto needs a dict"),
        (
            lambda: bayou.select.with_dropout(nn.Linear(2, 1)),
            r"Linear has no layer like nn\.ReLU .* put nn\.Dropout\(p\)",
        ),
        *[(lambda value=value: by_name("map", effort=value), "effort") for value in BAD_EFFORTS],
        *[(lambda value=value: bayou.SGLD(effort=value), "effort") for value in BAD_EFFORTS],
    ],
)
def test_wrong_names_and_settings_raise(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_every_name_has_a_label_and_a_summary_of_one_line():
    assert all(entry.label and len(entry.summary) < 90 for entry in named.METHODS.values())
    assert list(bayou.list_methods()) == list(named.METHODS)


def test_straight_priors_are_narrow_in_the_first_layer_and_wide_behind():
    made = target(bayou.Gaussian(0.5, learn=True))
    scales = [
        {name: float(p.log_scale.exp()) for name, p in one.priors.items()}
        for one in (made, NoiseAndPrior(0.3, 3.0, 5.0, 2.0).apply(made))
    ]
    factors = {name: scales[1][name] / scales[0][name] for name in made.free}
    assert factors == pytest.approx(
        {"0.weight": 1.5, "0.bias": 7.5, "2.weight": 6.0, "2.bias": 30.0}
    )


class Residual(nn.Module):
    """A block whose activation is one layer that is called twice, as in many networks for
    images.
    """

    def __init__(self):
        super().__init__()
        self.first, self.second, self.relu = nn.Linear(4, 4), nn.Linear(4, 4), nn.ReLU(inplace=True)

    def forward(self, x):
        out = self.relu(x + self.second(self.relu(self.first(x))))
        return out


def test_dropout_is_added_to_any_network_with_activation_layers():
    block = Residual()
    net = nn.ModuleDict({"body": nn.ModuleList([block, block])})
    thin = bayou.select.with_dropout(net, 0.4)
    assert list(thin.state_dict()) == list(net.state_dict())
    assert isinstance(block.relu, nn.ReLU), "the network that was given is changed"
    assert [module.p for module in thin.modules() if isinstance(module, nn.Dropout)] == [
        0.4
    ]  # a shared block: once

    x, y = torch.randn(30, 4), torch.randint(4, (30,))
    method = bayou.MCDropout(bayou.MAP(steps=5))
    posterior = bayou.fit(bayou.select.with_dropout(block), (x, y), method)
    outputs = posterior.predict(x, 500).outputs
    assert (outputs == 0).double().mean(0).min() > 0.1  # the last activation is dropped too
    with torch.no_grad():
        assert torch.equal(bayou.select.with_dropout(block).eval()(x), block(x))


SHARED = nn.Tanh()


@pytest.mark.parametrize(
    ("net", "names"),
    [
        (nn.Sequential(nn.Linear(2, 4), nn.Tanh(), Residual(), nn.Linear(4, 1)), ["1.1"]),
        (nn.Sequential(Residual(), nn.Linear(4, 1)), ["0.relu.1"]),
        (nn.Sequential(nn.Linear(2, 4), SHARED, nn.Linear(4, 4), SHARED), ["1.1", "3.1"]),
    ],
    ids=["own activations", "nested", "one layer twice"],
)
def test_dropout_follows_the_activations_of_a_sequential(net, names):
    thin = bayou.select.with_dropout(net, 0.1)
    modules = thin.named_modules()
    assert [name for name, module in modules if isinstance(module, nn.Dropout)] == names
    assert list(thin.state_dict()) == list(net.state_dict())
    assert bayou.select.with_dropout(thin) is thin


def test_dropout_by_name_refuses_a_network_without_dropout_before_the_search(monkeypatch):
    trained = list[str]()
    monkeypatch.setattr(bayou.MAP, "fit", lambda self, *args, **kwargs: trained.append("MAP"))
    for name in ("select_ratio_and_shape", "select_noise_of_modes"):
        monkeypatch.setattr(regression, name, lambda *args, name=name: trained.append(name))
    net = nn.Sequential(nn.Linear(2, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 1))
    x = torch.randn(40, 2, generator=torch.Generator().manual_seed(0))
    with pytest.raises(
        ValueError, match=r"Sequential calls no dropout in eval mode; put nn.Dropout"
    ):
        bayou.fit(net, (x, x[:, :1]), "dropout")
    assert not trained
