"""States of laplace-torch, read into posteriors of bayou."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import bayou

X = torch.randn(40, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
NEW = 3 * torch.randn(9, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
TASKS = {"regression": X[:, :2] * 3, "classification": (X[:, 0] > 0).long()}


def trained_network(task: str) -> nn.Sequential:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2)).double()
    loss = nn.MSELoss() if task == "regression" else nn.CrossEntropyLoss()
    optimizer = torch.optim.Adam(net.parameters(), lr=0.05)
    for _ in range(40):
        optimizer.zero_grad()
        loss(net(X), TASKS[task]).backward()
        optimizer.step()
    return net


def state_by_hand(curvature: Any, **changes: Any) -> dict[str, Any]:
    """A state of y = w·x + noise with N(0, 1/4) and 40 rows, as laplace-torch writes it."""
    return {
        "cls_name": "FullLaplace",
        "mean": torch.tensor([2.0], dtype=torch.float64),
        "H": curvature,
        "prior_mean": 0.0,
        "prior_precision": torch.tensor([4.0], dtype=torch.float64),
        "sigma_noise": torch.tensor([0.5], dtype=torch.float64),
        "n_data": 40,
        "likelihood": "regression",
        "temperature": 1.0,
    } | changes


def line() -> nn.Linear:
    net = nn.Linear(1, 1, bias=False).double()
    nn.init.constant_(net.weight, 2.0)
    return net


@pytest.mark.parametrize(
    ("structure", "curvature"),
    [
        ("FullLaplace", torch.tensor([[10.0]], dtype=torch.float64)),
        ("DiagLLLaplace", torch.tensor([10.0], dtype=torch.float64)),
        ("KronLaplace", [[torch.tensor([[5.0]]).double(), torch.tensor([[2.0]]).double()]]),
    ],
)
def test_one_weight_has_its_closed_form(structure: str, curvature: Any, tmp_path: Path) -> None:
    """H = Σx² = 10, so the precision is 10/.5² + 4 = 44."""
    state = state_by_hand(curvature, cls_name=structure)
    torch.save(state, tmp_path / "la.pt")
    net = line()
    posterior = bayou.from_laplace(torch.load(tmp_path / "la.pt", weights_only=True), net)
    assert float(posterior.std()["weight"]) == pytest.approx(44**-0.5, rel=1e-12)
    x = torch.tensor([[3.0]], dtype=torch.float64)
    predictive = posterior.predict(x)
    assert float(predictive.mean) == pytest.approx(6.0, rel=1e-12)
    assert float(predictive.std) == pytest.approx(math.sqrt(9 / 44 + 0.25), rel=1e-12)
    posterior.save(tmp_path / "posterior.bayou")
    again = bayou.load(tmp_path / "posterior.bayou", net)
    assert torch.equal(again.predict(x).std, predictive.std)
    assert posterior.target.n == 40


def test_priors_of_single_weights_are_kept() -> None:
    net = nn.Linear(2, 1, bias=False).double()
    precision = torch.tensor([4.0, 9.0], dtype=torch.float64)
    changes = {"mean": net.weight.detach()[0], "prior_precision": precision, "prior_mean": 0.5}
    posterior = bayou.from_laplace(state_by_hand(torch.zeros(2, 2).double(), **changes), net)
    torch.testing.assert_close(posterior.std()["weight"][0], precision.rsqrt())
    w = torch.tensor([[0.5, 1.0]], dtype=torch.float64)
    expected = torch.distributions.Normal(0.5, precision.rsqrt()).log_prob(w).sum()
    torch.testing.assert_close(posterior.bound_priors()["weight"].log_prob(w), expected)


def test_other_states_are_refused() -> None:
    curvature = torch.tensor([[10.0]], dtype=torch.float64)
    cases: list[tuple[Any, str]] = [
        (state_by_hand(curvature, cls_name="LowRankLaplace"), "LowRankLaplace of laplace-torch"),
        ({"mean": 1}, "the state has no cls_name"),
        (7, r"expected a Laplace object of laplace-torch or its state_dict\(\), got int"),
        (state_by_hand(curvature, likelihood="reward_modeling"), "got 'reward_modeling'"),
        (state_by_hand(curvature, sigma_noise=0.0), "expected a positive number"),
        (state_by_hand(curvature, prior_precision=torch.ones(3)), "the state has 3 prior precis"),
        (state_by_hand(-100 * curvature), "not positive definite"),
        (state_by_hand(curvature, mean=torch.tensor([7.0])), "load the weights of the fit into"),
    ]
    for state, message in cases:
        with pytest.raises(ValueError, match=message):
            bayou.from_laplace(state, line())


@pytest.mark.peers
@pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning"
)
@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("subset", ["all", "last_layer"])
@pytest.mark.parametrize("structure", ["full", "diag", "kron"])
def test_predictions_are_those_of_laplace_torch(task: str, subset: str, structure: str) -> None:
    from laplace import Laplace
    from laplace.curvature import CurvlinopsGGN

    net = trained_network(task)
    noise = {"sigma_noise": 0.7} if task == "regression" else {}
    la = Laplace(
        net,
        task,
        subset_of_weights=subset,
        hessian_structure=structure,
        prior_precision=3.0,
        temperature=0.5,
        backend=CurvlinopsGGN,
        **noise,
    )
    la.fit(DataLoader(TensorDataset(X, TASKS[task]), batch_size=20))
    posterior = bayou.from_laplace(la, net)
    predictive = posterior.predict(NEW)
    if task == "classification":
        torch.testing.assert_close(predictive.mean, la(NEW), rtol=1e-8, atol=1e-10)
    else:
        mean, covariance = la(NEW)
        variance: Tensor = covariance.diagonal(dim1=-2, dim2=-1)
        torch.testing.assert_close(predictive.mean, mean, rtol=1e-8, atol=1e-10)
        torch.testing.assert_close(predictive.std.square() - 0.49, variance, rtol=1e-7, atol=1e-9)
    _, expected = la._glm_predictive_distribution(NEW)[:2]
    torch.testing.assert_close(posterior.function(NEW)[1], expected, rtol=1e-7, atol=1e-9)
