"""What a fit finds out about itself: no worse than its mode, no better than a constant; cold where
it is told to be.
"""

import math
import warnings

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import bayou
from bayou.inference import baseline_checks
from bayou.inference.baseline_checks import constant_nll
from bayou.likelihoods import Categorical
from bayou.methods.laplace import MIN_HELD_OUT_ROWS
from bayou.methods.laplace_run import SCALES
from bayou.network.target import Target
from bayou.training.data import BatchRange, as_data, last_batches

F64 = torch.float64

Rows = tuple[Tensor, Tensor]


def rows(n, seed):
    """Three classes."""
    x = torch.randn(n, 8, generator=torch.Generator().manual_seed(seed))
    return x, (x[:, 0] > 0).long() + (x[:, 1] > 0).long()


def trained(data):
    """A network of more weights than rows, with batch norm, fitted in the plain way."""
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Linear(8, 64),
        nn.BatchNorm1d(64),
        nn.ReLU(),
        nn.Linear(64, 64),
        nn.ReLU(),
        nn.Linear(64, 3),
    )
    optimizer = torch.optim.Adam(net.parameters(), lr=5e-3)
    for _ in range(80):
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(data[0]), data[1]).backward()
        optimizer.step()
    return net.eval()


def nll(p, y):
    return float(-p.log_prob(y).mean())


def laplace(net, data, **options):
    return bayou.fit(net, data, bayou.Laplace(start=None), **options)


@pytest.fixture(scope="module")
def problem():
    """Rows, a network that is trained on them, other rows, and their NLL by the network."""
    data, test = rows(300, 1), rows(500, 2)
    net = trained(data)
    with torch.no_grad():
        return data, net, test, float(nn.functional.cross_entropy(net(test[0]), test[1]))


def test_laplace_at_a_trained_network_is_no_worse_than_the_network(problem):
    data, net, test, mode = problem
    found = laplace(net, data)
    assert nll(found.predict(test[0]), test[1]) < mode + 0.02
    tried = [record["prior_scale"] for record in found.history if "prior_scale" in record]
    assert tried == pytest.approx(SCALES)
    assert found.checks["mode"].status == "ok"
    loader = DataLoader(TensorDataset(*data), batch_size=50)
    by_batches = laplace(
        net, loader
    )  # a DataLoader cannot be split by rows: its last batches are held out
    assert nll(by_batches.predict(test[0]), test[1]) < mode + 0.02


def test_a_prior_that_was_asked_for_stays_and_what_it_does_is_said(problem):
    data, net, test, mode = problem
    with pytest.warns(
        bayou.methods.WorseThanModeWarning,
        match="worse than its own mode: NLL .* 256 training rows",
    ):
        found = laplace(net, data, prior=bayou.Normal(1.0))
    assert nll(found.predict(test[0]), test[1]) > mode + 0.1
    assert not any("prior_scale" in record for record in found.history)
    assert found.checks["mode"].status == "failed"
    last = found.history[-1]
    assert last["nll"] - last["mode_nll"] == pytest.approx(last["worse_than_mode"])


@pytest.mark.parametrize(
    ("where", "remedy"),
    [("*", "or where='last'$"), ("last", "use prior='validation', or the mode$")],
)
def test_the_remedy_of_a_prior_that_is_too_wide_is_another_setting(where, remedy):
    data = rows(40, 1)
    method = bayou.Laplace("diagonal", where=where, start=None)
    options = {"prior": bayou.Normal(100.0)}
    with pytest.warns(bayou.methods.WorseThanModeWarning, match=remedy):
        bayou.fit(trained(data), data, method, **options)


def test_laplace_of_a_trained_network_takes_no_steps_that_could_be_too_few():
    net, data = nn.Linear(2, 1), (torch.randn(40, 2), torch.randn(40, 1))
    options = {"likelihood": bayou.Gaussian(1.0)}
    found = bayou.fit(net, data, bayou.Laplace("full", start=None), **options)
    assert "converged" not in found.checks
    short = bayou.Laplace("full", start=bayou.MAP(steps=5))
    assert (
        bayou.fit(net, data, short, **options)
        .checks["converged"]
        .text.startswith("5 steps are too few")
    )


def test_a_right_posterior_is_not_called_worse_than_its_mode():
    """Few data, many weights, a linear model: exact, and up to ½·log 2 behind its mode on the rows
    it learned from.
    """
    x = torch.randn(40, 60, dtype=F64)
    y = (x @ torch.randn(60, 1, dtype=F64)) + 0.5 * torch.randn(40, 1, dtype=F64)
    options = {
        "likelihood": bayou.Gaussian(0.5),
        "prior": bayou.Normal(1.0),
    }
    net = nn.Linear(60, 1, bias=False, dtype=F64)
    with torch.no_grad():
        precision = torch.eye(60, dtype=F64) + x.T @ x / 0.25
        net.weight.copy_(torch.linalg.solve(precision, x.T @ y / 0.25).T)
    # a warning is an error in these tests
    found = bayou.fit(net, (x, y), bayou.Laplace("full", start=None), **options)
    last, check = found.history[-1], found.checks["mode"]
    assert 0.1 < last["nll"] - last["mode_nll"] < 0.5 * math.log(2)
    assert (
        last["nll"] - last["mode_nll"] > 2.5 * last["nll_error"]
    )  # and ok all the same: so the limit is said
    assert last["mode_allowance"] == pytest.approx(0.5 * math.log(2) + 2 * last["nll_error"])
    assert check.status == "ok"
    assert check.text.endswith(f"; up to {last['mode_allowance']:+.3f} is not flagged)")


@pytest.mark.parametrize(
    ("options", "n", "held"),
    [
        ({}, 800, 80),  # more weights than data: the scale of the prior is a guess
        ({}, 150, 0),  # which a mode needs more than a guess of the scale
        ({"start": bayou.MAP(l2=1e-3)}, 300, 0),  # says which prior
        ({}, 4000, 0),
        ({"start": None}, 4000, 400),
        ({"start": None}, 20_000, 1000),
        ({"start": None}, 10 * MIN_HELD_OUT_ROWS - 1, 0),  # too few to judge by
        ({"start": None, "prior": "evidence"}, 300, 0),
    ],
)
def test_rows_are_held_out_where_the_prior_is_a_guess(options, n, held):
    net = nn.Sequential(nn.Linear(8, 100), nn.ReLU(), nn.Linear(100, 3))
    method, data = (
        bayou.Laplace(**options),
        as_data((torch.zeros(n, 8), torch.zeros(n, dtype=torch.long)), 128),
    )
    (rest, found), (_, of_given_prior) = (
        method._split(Target.build(net, Categorical(), prior, n), data, seed=0)
        for prior in (None, bayou.Normal(1.0))
    )
    assert (0 if found is None else found.n, rest.n) == (held, n - held)
    assert of_given_prior is None


def test_the_last_batches_of_a_loader():
    data = as_data(
        DataLoader(TensorDataset(torch.arange(50.0)[:, None], torch.arange(50)), batch_size=10), 128
    )
    rest, held = last_batches(data, 0.1)
    assert [int(y[0]) for _, y in rest.epoch()] == [0, 10, 20, 30]
    assert [int(y[0]) for _, y in held.epoch()] == [40]
    assert (rest.n, held.n, rest.batches, held.batches) == (40, 10, 4, 1)
    assert rest.fingerprint() != held.fingerprint()
    assert last_batches(BatchRange(data, 0, 1), 0.1)[1] is None


def test_the_best_constant_is_the_frequencies():
    y = torch.tensor([0, 0, 0, 1, 2, 2])
    each = constant_nll(Categorical().bind(), torch.zeros(6, 3, dtype=F64), [y[:4], y[4:]])
    share = torch.tensor([3, 1, 2], dtype=F64) / 6
    assert torch.allclose(each, -share.log()[y], atol=1e-4)


def deep():
    torch.manual_seed(0)
    hidden = (nn.Linear(50, 50), nn.ReLU(), nn.Linear(50, 50), nn.ReLU())
    return nn.Sequential(nn.Linear(8, 50), nn.ReLU(), *hidden, nn.Linear(50, 3))


@pytest.mark.slow
def test_a_collapse_is_said_and_a_cold_posterior_learns():
    data, options = rows(60, 1), {"prior": bayou.Normal(1.0)}
    with pytest.warns(
        bayou.methods.CollapseWarning,
        match=r"no better than a constant: NLL 1\.\d+ on 60 training rows",
    ):
        flat = bayou.fit(deep(), data, bayou.VI(steps=1000, lr=0.02), **options)
    assert flat.checks["collapse"].status == "failed"
    cold = bayou.fit(deep(), data, bayou.VI(steps=1000, lr=0.02, cold=True), **options)
    assert cold.checks["collapse"].status == "ok"
    assert cold.history[-1]["cold"] == 60 / 5703
    assert cold.history[-1]["nll"] < 0.6 * cold.history[-1]["constant_nll"]


def test_the_kl_is_tempered_where_that_is_asked_for_alone():
    def tempering(method, n):
        return method.tempering(Target.build(deep(), Categorical(), None, n))

    assert tempering(bayou.VI(), 150) == tempering(bayou.IVON(), 150) == 1
    assert (
        tempering(bayou.VI(cold=True), 150) == tempering(bayou.IVON(cold=True), 150) == 150 / 5703
    )
    assert tempering(bayou.VI(cold=True), 10_000) == 1


@pytest.mark.slow
def test_ivon_and_vi_agree_on_what_cold_means():
    """One weight, y ~ N(w, σ²): the best tempered q has precision P + N/(β·σ²), and is what both
    find.
    """
    n, noise = 20, 1.0
    x = torch.zeros(n, 30, dtype=F64)  # 29 weights that the data say nothing about
    x[:, 0] = 1
    y = 0.7 + torch.randn(n, 1, dtype=F64)
    beta = n / 30
    precision = 1 + n / (beta * noise**2)
    mean = float(y.mean()) * (precision - 1) / precision
    for method, slack in (
        (bayou.VI(steps=1200, lr=0.02, samples=2, cold=True), 0.02),
        (bayou.IVON(steps=1200, lr=0.1, hessian=0.5, samples=4, local=True, cold=True), 0.03),
    ):
        net = nn.Linear(30, 1, bias=False, dtype=F64)
        options = {"likelihood": bayou.Gaussian(noise), "prior": bayou.Normal(1.0)}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", bayou.methods.CollapseWarning)
            q = bayou.fit(net, (x, y), method, **options)
        assert float(q.mean()["weight"][0, 0]) == pytest.approx(mean, abs=3 * slack)
        assert float(q.std()["weight"][0, 0]) == pytest.approx(precision**-0.5, abs=slack)


@pytest.mark.parametrize(("lr", "worse"), [(0.3, False), (2.0, True)])
def test_a_path_that_leaves_its_start_for_worse_says_so(lr, worse):
    x = torch.randn(120, 2)
    data = x, (x[:, 0] * x[:, 1] > 0).long()
    net = nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 2))
    method = bayou.SWAG(start=bayou.MAP(steps=400, lr=1e-2), lr=lr, steps=200, batch_size=30)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        posterior = bayou.fit(net, data, method, prior=bayou.Normal(3.0))
    assert any(one.category is bayou.methods.WorseThanModeWarning for one in caught) == worse
    assert ("worse_than_mode" in posterior.history[-1]) == worse
    assert (posterior.checks["mode"].status == "failed") == worse


def test_rows_with_many_outputs_are_checked_a_few_at_a_time(monkeypatch):
    """Outputs of 50 draws of all rows of a language model, S·B·T·C numbers, need not be held at
    once.
    """
    net, x = nn.Sequential(nn.Embedding(30, 8), nn.Linear(8, 30)), torch.randint(30, (20, 6))
    seen = []
    plain = bayou.posteriors.GaussianPosterior.predict

    def predict(self, x, *args, **options):
        seen.append(len(x[0]))
        return plain(self, x, *args, **options)

    monkeypatch.setattr(bayou.posteriors.GaussianPosterior, "predict", predict)
    found = []
    for most in (baseline_checks.MAX_OUTPUTS, baseline_checks.CHECK_DRAWS * 6 * 30 * 3):
        monkeypatch.setattr(baseline_checks, "MAX_OUTPUTS", most)
        method = bayou.Laplace("diagonal", where="last", start=None)
        options = {
            "likelihood": Categorical(shift=1),
            "prior": bayou.Normal(),
        }
        found.append(bayou.fit(net, (x, x), method, **options).history[-1])
    assert seen == [20] + [3] * 6 + [2]
    assert found[0] == pytest.approx(found[1], rel=1e-5)
