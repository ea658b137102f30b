"""One task after another: METHODS number 8 in closed form, heads, coresets."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import bayou
from bayou.operations.continual import k_center
from bayou.posteriors import GaussianPosterior, Guided
from bayou.posteriors.empirical import Empirical

F64 = torch.float64
X = np.linspace(-1, 1, 21)
PHI, Y = np.stack([X**k for k in range(4)], 1), np.sin(3 * X)
ONLINE = bayou.Laplace(structure="diagonal", start=bayou.MAP())
SHORT = bayou.Laplace(structure="diagonal", start=bayou.MAP(steps=20))
FAMILY = bayou.MeanField(0.1)
VI = bayou.VI(FAMILY, steps=5, start=None)
LINE = {"likelihood": bayou.Gaussian(0.1), "prior": bayou.Normal(1.0), "progress": False}


def rows(which):
    return torch.from_numpy(PHI[which]), torch.from_numpy(Y[which])[:, None]


def line():
    return nn.Linear(4, 1, bias=False, dtype=F64)


def reference(*parts):
    """Mean field over a sequence of rows: a Gaussian keeps the exact mean and the diagonal of the
    precision.
    """
    mean, precision = np.zeros(4), np.eye(4)
    for which in parts:
        phi, full = PHI[which], precision + PHI[which].T @ PHI[which] / 0.01
        mean = np.linalg.solve(full, precision @ mean + phi.T @ Y[which] / 0.01)
        precision = np.diag(np.diag(full))
    return mean, np.diag(precision)


@pytest.mark.slow
def test_two_tasks_end_at_the_mean_field_of_methods():
    """Number 8. In a linear model the mode and the diagonal of the curvature are the best
    factorized Gaussian.
    """
    first, second = slice(0, 11), slice(11, 21)
    found = bayou.continual(line(), [rows(first), rows(second)], ONLINE, **LINE)
    last = found.posteriors[-1]
    assert isinstance(last, GaussianPosterior)
    assert found.final == [last, last]
    np.testing.assert_allclose(
        last.mean()["weight"][0].numpy(),
        [-0.116412, 2.298160, 0.451637, -2.101316],
        rtol=0,
        atol=1e-6,
    )
    mean, precision = reference(first, second)
    np.testing.assert_allclose(last.mean()["weight"][0].numpy(), mean, atol=1e-7)
    np.testing.assert_allclose(last.std()["weight"][0].numpy() ** -2, precision, rtol=1e-7)


@pytest.mark.slow
def test_coresets_are_fitted_after_all_tasks():
    tasks = [rows(slice(0, 11)), rows(slice(11, 21))]
    found = bayou.continual(line(), tasks, ONLINE, coreset=3, seed=1, **LINE)
    held = [
        [int(np.flatnonzero(PHI[:, 1] == float(row[1]))[0]) for row in x] for x, _ in found.coresets
    ]
    assert [len(part) for part in held] == [3, 3]
    rest = [
        [i for i in part if i not in held[t]] for t, part in enumerate((range(11), range(11, 21)))
    ]
    mean, _ = reference(*rest)
    np.testing.assert_allclose(found.posteriors[-1].mean()["weight"][0].numpy(), mean, atol=1e-6)
    mean, precision = reference(*rest, held[0] + held[1])
    assert found.final[0] is found.final[1] is not found.posteriors[-1]
    np.testing.assert_allclose(found.final[0].mean()["weight"][0].numpy(), mean, atol=1e-6)
    np.testing.assert_allclose(
        found.final[0].std()["weight"][0].numpy() ** -2, precision, rtol=1e-6
    )


def test_k_center_selects_the_farthest_rows():
    x = torch.tensor([0.0, 0.1, 10.0, 5.0, 4.9, 0.0]).unsqueeze(1)
    for seed in range(4):
        found = k_center(x, 3, seed)
        gaps = (x[found] - x.T).abs().min(0).values
        assert gaps.max() <= 2 * 0.1 + 1e-6  # {0.1 or 0, 10, 5}: at most twice the best radius
    assert sorted(k_center(x, 6).tolist()) == list(range(6))
    with_two = bayou.continual(
        line(), [rows(slice(0, 21))], SHORT, coreset=2, selection="k-center", **LINE
    ).coresets[0][0]
    assert -1.0 in with_two[:, 1] or 1.0 in with_two[:, 1]


X2 = torch.randn(40, 2, dtype=F64, generator=torch.Generator().manual_seed(0))
TASKS = [(X2, (X2[:, 0] > 0).long()), (X2, (X2[:, 1] > 0).long() + (X2[:, 0] > 1).long())]


def two_heads():
    """Two classes in one task, three in the other."""
    torch.manual_seed(0)
    return [nn.Sequential(nn.Linear(2, 5), nn.Tanh(), nn.Linear(5, k)).double() for k in (2, 3)]


def by_heads(method, **options):
    options = {"heads": "2.*", "progress": False} | options
    return bayou.continual(two_heads(), TASKS, method, **options)


@pytest.mark.parametrize("method", [VI, SHORT], ids=["MeanField", "Laplace"])
def test_heads_are_those_of_their_task(method):
    found = by_heads(method, prior=bayou.Normal(0.7))
    first, last = found.posteriors
    priors = last.bound_priors()
    assert torch.equal(priors["0.weight"].mean, first.mean()["0.weight"])
    torch.testing.assert_close(priors["0.weight"].log_scale.exp(), first.std()["0.weight"])
    torch.testing.assert_close(priors["2.weight"].log_scale.exp(), torch.tensor(0.7, dtype=F64))
    again, same = found.final
    assert same is last
    if isinstance(first, Guided):  # draws of both
        assert isinstance(again, Empirical)
        expected = last.sample(100, seed=0) | {
            k: v for k, v in first.sample(100, seed=1).items() if k[0] == "2"
        }
        assert all(torch.equal(value, expected[name]) for name, value in again.stack.items())
    else:
        assert torch.equal(again.mean()["0.bias"], last.mean()["0.bias"])
        assert torch.equal(again.std()["2.bias"], first.std()["2.bias"])
    assert [q.predict(X2, seed=0).mean.shape[-1] for q in found.final] == [2, 3]


def test_coresets_of_heads_are_fitted_separately():
    found = by_heads(VI, heads=["2.*"], coreset=4, selection="k-center")
    (first, last), (again, _) = found.posteriors, found.final
    priors = again.bound_priors()
    assert torch.equal(priors["0.weight"].mean, last.mean()["0.weight"])
    assert torch.equal(priors["2.weight"].mean, first.mean()["2.weight"])
    assert [
        (len(x), q.target.n) for (x, _), q in zip(found.coresets, found.final, strict=True)
    ] == [(4, 4), (4, 4)]


def test_interrupted_sequence_continues_from_its_checkpoints(tmp_path):
    found, again = (by_heads(VI, coreset=4, checkpoint=tmp_path / "run") for _ in range(2))
    assert {path.name for path in tmp_path.iterdir()} >= {
        "run.task0",
        "run.task1",
        "run.coreset0",
        "run.coreset1",
    }
    for a, b in zip(found.final, again.final, strict=True):
        assert all(torch.equal(value, b.mean()[name]) for name, value in a.mean().items())


GOOD = rows(slice(0, 11))
ONES = torch.ones(5, 3, dtype=F64)


@pytest.mark.parametrize(
    ("tasks", "options", "message"),
    [
        ([], {}, "tasks must be a list of data sets"),
        ([GOOD, (ONES, ONES[:, :1])], {}, "task 1: the network cannot take x"),
        ([GOOD, (GOOD[0], GOOD[1][:, 0])], {}, "task 1: y has shape"),
        ([GOOD], {"heads": "head.*"}, r"'head\.\*' matches no name"),
        ([GOOD], {"heads": "*"}, "tasks would share no parameters"),
        ([GOOD, GOOD], {"coreset": 11}, "task 0 has 11 rows, too few for a coreset of 11"),
        ([GOOD], {"coreset": 2, "selection": "best"}, "'random' or 'k-center', got 'best'"),
        ([DataLoader(TensorDataset(*GOOD, GOOD[0]))], {}, "pairs"),
        ([DataLoader(TensorDataset(*GOOD))], {"coreset": 2}, "split its data yourself"),
    ],
)
def test_invalid_tasks_raise_before_the_first_fit(tasks, options, message):
    with pytest.raises(ValueError, match=message):
        bayou.continual(line(), tasks, bayou.VI(steps=100_000_000), **LINE, **options)


def test_networks_that_do_not_belong_together_raise():
    with pytest.raises(ValueError, match="1 networks for 2 tasks"):
        bayou.continual([line()], [GOOD, GOOD], SHORT, **LINE)
    message = r"'2\.bias' is \(2,\) in the network of task 0 and \(3,\) in that of task 1"
    with pytest.raises(ValueError, match=message):
        by_heads(SHORT, heads="2.weight")


def test_ctrl_c_ends_with_the_tasks_so_far(monkeypatch):
    whole, runs = bayou.VI.fit, 0

    def interrupted(self, *arguments, **options):
        nonlocal runs
        runs += 1
        posterior = whole(self, *arguments, **options)
        posterior.stopped = "interrupted" if runs == 2 else "finished"
        return posterior

    monkeypatch.setattr(bayou.VI, "fit", interrupted)
    found = bayou.continual(two_heads()[0], [TASKS[0]] * 3, VI, coreset=4, progress=False)
    assert (runs, len(found.posteriors), len(found.final), len(found.coresets)) == (2, 2, 2, 2)
    assert found.final[0] is found.posteriors[-1]


def test_heads_of_one_network_start_at_permuted_values():
    """With one start for all heads a second task is learned by the features of the first, which is
    then forgotten.
    """
    net = two_heads()[0]
    still = bayou.VI(FAMILY, steps=1, lr=1e-300, start="network")
    found = bayou.continual(net, [TASKS[0]] * 3, still, heads="2.*", seed=1, progress=False)
    first, second, third = (q.mean() for q in found.posteriors)
    assert torch.equal(first["2.weight"], net[2].weight)
    for name in ("2.weight", "2.bias"):
        assert torch.equal(
            second[name].flatten().sort().values, first[name].flatten().sort().values
        )
    assert len({tuple(q["2.weight"].flatten().tolist()) for q in (first, second, third)}) == 3
    assert torch.equal(second["0.weight"], first["0.weight"])
