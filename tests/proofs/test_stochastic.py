"""MC dropout against its published algorithm, on networks small enough to enumerate by hand."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import bayou
from bayou.posteriors import Masked

F64 = torch.float64
DRAWS = 1500
SIGMAS = 4.5  # a bound that a right answer misses once in 150,000 times


def data(rows: int) -> tuple[Tensor, Tensor]:
    x = torch.randn(rows, 2, generator=torch.Generator().manual_seed(5), dtype=F64)
    return x, x.sum(1, keepdim=True).sin()


def frozen(*layers: nn.Module) -> nn.Sequential:
    """A network with weights that stand for trained ones."""
    with torch.random.fork_rng():
        torch.manual_seed(2)
        net = nn.Sequential(*layers).to(F64)
        with torch.no_grad():
            for parameter in net.parameters():
                parameter.normal_()
        return net


def numbers(net: nn.Module) -> dict[str, np.ndarray]:
    return {name: value.numpy().copy() for name, value in net.state_dict().items()}


def pretrained(net: nn.Module, method: bayou.methods.Method, rows: int = 6) -> Any:
    """The posterior of a network as it is, which must not be touched."""
    before, modes = numbers(net), [module.training for module in net.modules()]
    posterior = bayou.fit(
        net, data(rows), method=method, likelihood=bayou.Gaussian(0.1), progress=False
    )
    for name, value in net.state_dict().items():
        assert value.numpy().tobytes() == before[name].tobytes(), name
    assert [module.training for module in net.modules()] == modes
    for name, parameter in net.named_parameters():
        assert torch.equal(posterior.template()[name], parameter)
    assert posterior.stopped == "finished"
    return posterior


def moments_agree(
    outputs: np.ndarray, values: np.ndarray, weights: np.ndarray, effective: float
) -> None:
    """Mean and variance of (draws, rows) against values (outcomes, rows) with probabilities, within
    their errors.
    """
    mean = weights @ values
    central = values - mean
    variance, fourth = weights @ central**2, weights @ central**4
    assert (variance > 1e-3).all()
    np.testing.assert_array_less(
        abs(outputs.mean(0) - mean), SIGMAS * np.sqrt(variance / effective)
    )
    error = np.sqrt((fourth - variance**2) / effective)
    np.testing.assert_array_less(
        abs(outputs.var(0) - variance), SIGMAS * error + variance / effective
    )


def nearest(outputs: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Which outcome each draw is, all rows at once; an error if it is none."""
    distance = abs(outputs[:, None] - values[None]).max(2)
    assert distance.min(1).max() < 1e-12
    return distance.argmin(1)


# --- dropout ---------------------------------------------------------------------------------------------------------


def dropout_network() -> nn.Sequential:
    return frozen(nn.Dropout(0.2), nn.Linear(2, 4), nn.Tanh(), nn.Dropout(0.4), nn.Linear(4, 1))


def by_hand(
    x: np.ndarray, rates: tuple[float, float] = (0.2, 0.4)
) -> tuple[np.ndarray, np.ndarray]:
    """The outputs for all 2⁶ masks over two inputs and four hidden units, (64, rows), and their
    probabilities.
    """
    w = numbers(dropout_network())
    values, weights = [], []
    for mask in itertools.product((0.0, 1.0), repeat=6):
        rate = np.repeat(rates, (2, 4))
        keep = np.array(mask)
        gain = keep / (1 - rate)
        hidden = np.tanh((x * gain[:2]) @ w["1.weight"].T + w["1.bias"])
        values.append(((hidden * gain[2:]) @ w["4.weight"].T + w["4.bias"])[:, 0])
        weights.append(np.prod(np.where(keep == 1, 1 - rate, rate)))
    return np.stack(values), np.array(weights)


def test_mc_dropout_is_the_sum_over_all_masks() -> None:
    """Gal & Ghahramani 2016: every draw is the network with one mask, and masks come as often as
    they should.
    """
    posterior = pretrained(dropout_network(), bayou.MCDropout(start=None))
    assert isinstance(posterior, Masked)
    x, _ = data(5)
    values, weights = by_hand(x.numpy())
    outputs = posterior.predict(x, samples=DRAWS, seed=0).outputs[..., 0].numpy()
    which = nearest(outputs, values)
    moments_agree(outputs, values, weights, DRAWS)
    dead = (
        np.arange(64) % 16 == 0
    )  # without any hidden unit the inputs do not matter: four masks, one outcome
    which[dead[which]] = 0
    weights = (
        np.where(dead, np.arange(64) == 0, 1) * weights
        + (np.arange(64) == 0) * weights[dead][1:].sum()
    )
    assert weights.sum() == pytest.approx(1, abs=1e-12)
    frequency = np.bincount(which, minlength=64) / DRAWS
    np.testing.assert_array_less(
        abs(frequency - weights), SIGMAS * np.sqrt(weights * (1 - weights) / DRAWS) + 1 / DRAWS
    )
    p = posterior.predict(x, samples=DRAWS, seed=0)
    np.testing.assert_allclose(p.mean[:, 0].numpy(), outputs.mean(0), rtol=1e-12)


@pytest.mark.slow
def test_another_rate_is_the_sum_over_all_masks_too() -> None:
    posterior = pretrained(dropout_network(), bayou.MCDropout(start=None, p=0.6))
    x, _ = data(5)
    values, weights = by_hand(x.numpy(), (0.6, 0.6))
    outputs = posterior.predict(x, samples=DRAWS, seed=0).outputs[..., 0].numpy()
    nearest(outputs, values)
    moments_agree(outputs, values, weights, DRAWS)


@pytest.mark.parametrize(
    ("layer", "shape", "outcomes"),
    [
        (nn.Dropout(0.5), (4,), 16),
        (nn.Dropout1d(0.5), (3, 2), 8),
        (nn.Dropout2d(0.5), (3, 2, 2), 8),
        (nn.Dropout3d(0.5), (3, 1, 2, 2), 8),
    ],
)
def test_every_dropout_layer_has_the_outcomes_that_torch_has(
    layer: nn.Module, shape: tuple[int, ...], outcomes: int
) -> None:
    """Torch's own layer in training mode, many times on one row, against the draws of the
    posterior.
    """
    count = int(np.prod(shape))
    net = nn.Sequential(
        nn.Unflatten(1, shape), layer, nn.Flatten(), nn.Linear(count, count, bias=False, dtype=F64)
    )
    with torch.no_grad():
        net[3].weight.copy_(torch.eye(count))
    x = torch.randn(2, count, generator=torch.Generator().manual_seed(0), dtype=F64)
    likelihood, method = bayou.Gaussian(0.1), bayou.MCDropout(start=None)
    posterior = bayou.fit(net, (x, x), method=method, likelihood=likelihood, progress=False)

    def distinct(outputs: Tensor) -> Tensor:
        return outputs.mul(1e9).round().unique(dim=0)

    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(0)
        theirs = distinct(torch.stack([net.train()(x[:1])[0] for _ in range(800)]))
    ours = distinct(posterior.predict(x[:1], samples=800, seed=0).outputs[:, 0])
    assert len(theirs) == outcomes
    assert torch.equal(ours, theirs)
