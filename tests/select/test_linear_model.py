"""The recipe of one linear layer."""

import pytest
import torch
from torch import nn

import bayou
from bayou.likelihoods import Gaussian
from bayou.network.target import Target
from bayou.networks import TableLayout, TableNetwork
from bayou.select.named import by_name
from bayou.training.blocks import Blocks
from bayou.training.data import as_data


def linear_rows(rows, noise=0.5, seed=0):
    """Return rows of a linear function in units of their own, in float64."""
    generator = torch.Generator().manual_seed(seed)
    x = 3 + 20 * torch.randn(rows, 3, generator=generator, dtype=torch.float64)
    error = noise * torch.randn(rows, 1, generator=generator, dtype=torch.float64)
    return x, 100 + x @ torch.tensor([[2.0], [-1.0], [0.0]], dtype=torch.float64) + error


def network(outputs=1):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, outputs)).double()


@pytest.fixture(scope="module")
def posterior():
    return bayou.fit(network(), linear_rows(200), "linear", seed=0, progress=False)


def test_it_is_least_squares_where_the_prior_is_wide(posterior):
    """Mean and variance of 200 rows are those of least squares, up to the prior's share."""
    x, y = linear_rows(200)
    rows = torch.cat([torch.ones_like(x[:, :1]), x], 1)
    weights = torch.linalg.lstsq(rows, y).solution
    fresh, _ = linear_rows(50, seed=1)
    fresh_rows = torch.cat([torch.ones_like(fresh[:, :1]), fresh], 1)
    prediction = posterior.predict(fresh, samples=4000)
    residuals = y - rows @ weights
    noise = float((residuals.square().sum() / (200 - 4)).sqrt())
    leverage = (fresh_rows @ torch.linalg.inv(rows.T @ rows) * fresh_rows).sum(1, keepdim=True)
    spread = noise * leverage.sqrt()
    # five standard errors of 4,000 draws, and a prior of some standard deviations of y
    assert torch.all((prediction.mean - fresh_rows @ weights).abs() < 0.25 * spread + 0.02 * noise)
    assert torch.allclose(prediction.epistemic_std, spread, rtol=0.15)


def test_its_file_takes_any_network(posterior, tmp_path):
    posterior.save(tmp_path / "linear.bayou")
    loaded = bayou.load(tmp_path / "linear.bayou", nn.Linear(3, 1).double())
    x, _ = linear_rows(20, seed=2)
    assert torch.equal(loaded.predict(x).outputs, posterior.predict(x).outputs)
    assert "one linear layer" in posterior.plan


def test_it_is_for_classes_too():
    x, y = linear_rows(200)
    labels = (y[:, 0] > 100).long()
    posterior = bayou.fit(network(2), (x, labels), "linear", seed=0, progress=False)
    probabilities = posterior.predict(x).mean
    assert float((probabilities.argmax(1) == labels).double().mean()) > 0.95


def test_codes_of_categories_stay_categories():
    """A function that no linear function of the codes is."""
    codes = torch.arange(120) % 4
    x = torch.cat([torch.linspace(-1, 1, 120)[:, None], codes[:, None].float()], 1)
    y = torch.tensor([0.0, 5.0, -5.0, 1.0])[codes][:, None] + 0.1 * x[:, :1]
    net = TableNetwork(TableLayout.fit(x, levels={1: 4}), 1, hidden=(4,))
    posterior = bayou.fit(net, (x, y), "linear", seed=0, progress=False)
    assert float((posterior.predict(x).mean - y).square().mean().sqrt()) < 0.5


@pytest.mark.parametrize(
    ("column", "is_tried"), [(None, False), ("groups", False), ("times", True)]
)
def test_auto_tries_it_where_rows_have_times(column, is_tried):
    x, y = linear_rows(100)
    target = Target.build(network(), Gaussian(0.5, learn=True), None, 100)
    rows = as_data((x, y), 50)
    if column is not None:
        rows = rows.with_blocks(Blocks.of(100, **{column: list(range(100))}))
    suitable = by_name("auto")._suitable_for(target, rows)
    assert ("linear" in suitable.methods) == is_tried


def test_images_are_refused():
    rows = torch.zeros(10, 1, 4, 4), torch.zeros(10, 1)
    net = nn.Sequential(nn.Flatten(), nn.Linear(16, 1))
    with pytest.raises(ValueError, match="linear is for tables"):
        bayou.fit(net, rows, "linear", progress=False)
