"""More observations for a BoTorch model: conditioning equals a fit to all rows where that is exact,
in batches, with gradients, and the knowledge gradient can use it.
"""

import math

import numpy as np
import pytest
import torch
from torch import nn

import bayou

NOISE = 0.3
DRAWS = 4000
GENERATOR = torch.Generator().manual_seed(0)
X = torch.rand(12, 1, generator=GENERATOR, dtype=torch.float64) * 2 - 1
Y = 1.5 * X - 0.5 + NOISE * torch.randn(12, 1, generator=GENERATOR, dtype=torch.float64)
NEW_X = torch.tensor([[0.9], [-0.4], [1.7]], dtype=torch.float64)
NEW_Y = torch.tensor([[2.0], [0.1], [1.1]], dtype=torch.float64)
POINTS = torch.linspace(-2, 2, 5, dtype=torch.float64)[:, None]

pytestmark = pytest.mark.peers


def linear_posterior():
    """Laplace of a linear model with known noise is its exact posterior."""
    torch.manual_seed(0)
    method = bayou.Laplace("full", start=bayou.MAP(steps=500, lr=0.05))
    return bayou.fit(
        nn.Linear(1, 1).double(),
        (X, Y),
        method,
        likelihood=bayou.Gaussian(NOISE),
        prior=bayou.Normal(1.0),
        progress=False,
    )


def wide_posterior():
    net = nn.Linear(1, 1).double()
    method = bayou.methods.Wide(units="erf", draws=1, passes=20)
    return bayou.fit(net, (X, Y), method, likelihood=bayou.Gaussian(NOISE), progress=False)


def linear_moments(x, y, points):
    """Mean and covariance of w·x + b for w, b ~ N(0, 1), by the normal equations."""
    design = np.concatenate([x, np.ones_like(x)], 1)
    covariance = np.linalg.inv(design.T @ design / NOISE**2 + np.eye(2))
    mean = covariance @ design.T @ y / NOISE**2
    at = np.concatenate([points, np.ones_like(points)], 1)
    return at @ mean, at @ covariance @ at.T


def wide_moments(posterior, x, y, points):
    """Mean and covariance of the Gaussian process with the arcsine kernel (Williams 1997)."""
    wide = posterior.wide
    input_scale, bias, output, noise = posterior.log_scales[0].exp().numpy()

    def kernel(a, b):
        def product(u, v):
            return bias**2 + input_scale**2 * u * v

        norms = np.sqrt((1 + 2 * product(a, a)) * (1 + 2 * product(b, b).T))
        return output**2 * 2 / math.pi * np.arcsin(2 * product(a, b.T) / norms)

    shift, scale = wide.input_shift.numpy(), wide.input_scale.numpy()
    a, b = (x - shift) / scale, (points - shift) / scale
    target_scale = wide.target_scale.numpy()
    # JITTER keeps the covariance of the fit invertible.
    inverse = np.linalg.inv(kernel(a, a) + (noise**2 + 1e-6) * np.eye(len(a)))
    standardized = (y - wide.target_shift.numpy()) / target_scale
    mean = kernel(b, a) @ inverse @ standardized
    covariance = kernel(b, b) - kernel(b, a) @ inverse @ kernel(a, b)
    return mean * target_scale + wide.target_shift.numpy(), covariance * target_scale**2


def check_moments(values, mean, covariance):
    """Values (S, q) have this mean and this covariance up to 5 standard errors."""
    variances = np.diag(covariance)
    values = values.detach().numpy()
    mean_error = np.sqrt(variances / len(values))
    assert (np.abs(values.mean(0) - mean[:, 0]) < 5 * mean_error).all()
    products = np.outer(variances, variances) + covariance**2
    assert (np.abs(np.cov(values.T) - covariance) < 5 * np.sqrt(products / len(values))).all()


@pytest.mark.parametrize("name", ["linear", "wide"])
def test_functions_in_batches_are_draws_given_the_rows_of_each_batch(name: str) -> None:
    from bayou.adapters.botorch import PosteriorModel

    posterior = linear_posterior() if name == "linear" else wide_posterior()
    model = PosteriorModel(posterior, X, DRAWS)
    outcomes = torch.stack([NEW_Y, NEW_Y + 1, -NEW_Y])
    batched = model.condition_on_observations(NEW_X, outcomes)
    assert batched.batch_shape == (3,)
    values = batched.posterior(POINTS).values  # (3, S, q, 1)
    # The same in two steps.
    first = model.condition_on_observations(NEW_X[:1], outcomes[:, :1])
    second = first.condition_on_observations(NEW_X[1:], outcomes[:, 1:])
    torch.testing.assert_close(second.posterior(POINTS).values, values, rtol=1e-8, atol=1e-8)
    all_x = torch.cat([X, NEW_X]).numpy()
    for batch, y in enumerate(outcomes):
        all_y = torch.cat([Y, y]).numpy()
        if name == "linear":
            mean, covariance = linear_moments(all_x, all_y, POINTS.numpy())
        else:
            mean, covariance = wide_moments(posterior, all_x, all_y, POINTS.numpy())
        check_moments(values[batch, ..., 0], mean, covariance)


@pytest.mark.parametrize("name", ["linear", "wide"])
def test_the_gain_of_an_observation_is_that_of_a_refit(name: str) -> None:
    from bayou.adapters.botorch import PosteriorModel

    posterior = linear_posterior() if name == "linear" else wide_posterior()
    model = PosteriorModel(posterior, X, 3)
    outcomes = torch.stack([NEW_Y, NEW_Y + torch.tensor([[1.0], [0.0], [0.0]])])
    values = model.condition_on_observations(NEW_X, outcomes).posterior(POINTS).values
    # An observation without batches, by the update of the posterior, before those in batches.
    first = model.condition_on_observations(NEW_X[2:], NEW_Y[2:])
    after_update = first.condition_on_observations(NEW_X[:2], outcomes[:, :2])
    values_after = after_update.posterior(POINTS).values
    all_x = torch.cat([X, NEW_X]).numpy()
    means = []
    for y in outcomes:
        all_y = torch.cat([Y, y]).numpy()
        if name == "linear":
            means.append(linear_moments(all_x, all_y, POINTS.numpy())[0])
        else:
            means.append(wide_moments(posterior, all_x, all_y, POINTS.numpy())[0])
    gain = torch.from_numpy(means[1] - means[0])
    # A fit of Wide adds 1e-6 of the variance of y to the noise of its rows.
    rtol = 1e-4 if name == "wide" else 1e-6
    for difference in (values[1] - values[0], values_after[1] - values_after[0]):
        torch.testing.assert_close(difference, gain.expand(3, -1, -1), rtol=rtol, atol=1e-6)


@pytest.mark.parametrize("name", ["linear", "wide"])
def test_fantasies_have_the_predictive_distribution_and_gradients(name: str) -> None:
    from botorch.sampling import SobolQMCNormalSampler

    from bayou.adapters.botorch import PosteriorModel

    posterior = linear_posterior() if name == "linear" else wide_posterior()
    model = PosteriorModel(posterior, X, 300)
    sampler = SobolQMCNormalSampler(torch.Size([2000]), seed=0)
    at = torch.tensor([[[0.3]], [[-1.2]]], dtype=torch.float64)
    fantasies = model.fantasize(at, sampler)
    assert fantasies.batch_shape == (2000, 2)
    predicted = posterior.predict(at[:, 0], samples=300, seed=0)
    outcomes = fantasies.observations.y[..., 0, 0]
    error = predicted.std[:, 0] / math.sqrt(len(outcomes))
    assert ((outcomes.mean(0) - predicted.mean[:, 0]).abs() < 5 * error).all()
    relative = outcomes.std(0) / predicted.std[:, 0] - 1
    assert (relative.abs() < 5 / math.sqrt(2 * len(outcomes))).all()

    few = SobolQMCNormalSampler(torch.Size([3]), seed=0)
    points = torch.tensor([[[0.2]], [[0.8]]], dtype=torch.float64)

    def means(x: torch.Tensor, points: torch.Tensor) -> torch.Tensor:
        return model.fantasize(x, few).posterior(points).mean

    inputs = (at.clone().requires_grad_(), points.requires_grad_())
    assert means(*inputs).shape == (3, 2, 1, 1)
    assert torch.autograd.gradcheck(means, inputs, atol=1e-6)


@pytest.mark.parametrize("name", ["linear", "wide"])
def test_the_model_of_observations_without_batches_is_that_of_the_update(name: str) -> None:
    from botorch.models.transforms import Standardize

    from bayou.adapters.botorch import PosteriorModel

    posterior = linear_posterior() if name == "linear" else wide_posterior()
    model = PosteriorModel(posterior, X, 5, seed=3)
    updated = model.condition_on_observations(NEW_X, NEW_Y)
    assert updated.batch_shape == ()
    expected = PosteriorModel(posterior.update((NEW_X, NEW_Y)), X, 5, seed=3)
    assert torch.equal(updated.posterior(POINTS).values, expected.posterior(POINTS).values)
    all_x = torch.cat([X, NEW_X]).numpy()
    all_y = torch.cat([Y, NEW_Y]).numpy()
    if name == "linear":
        mean, covariance = linear_moments(all_x, all_y, POINTS.numpy())
    else:
        mean, covariance = wide_moments(posterior, all_x, all_y, POINTS.numpy())
    got, variance = updated.fitted.function(POINTS)
    tolerance = {"rtol": 1e-4, "atol": 1e-5}
    torch.testing.assert_close(got.reshape(-1, 1), torch.from_numpy(mean), **tolerance)
    variances = torch.from_numpy(np.diag(covariance).copy())
    torch.testing.assert_close(variance.flatten(), variances, **tolerance)

    scale = Standardize(1)
    scale(100 + 10 * Y)
    in_units = PosteriorModel(posterior, X, 5, seed=3, outcome_transform=scale.eval())
    new_units = scale.untransform(NEW_Y)[0]
    values = in_units.condition_on_observations(NEW_X, new_units).posterior(POINTS).values
    torch.testing.assert_close(values, scale.untransform(updated.posterior(POINTS).values)[0])
    batches = in_units.condition_on_observations(NEW_X, new_units[None]).posterior(POINTS).values
    plain = model.condition_on_observations(NEW_X, NEW_Y[None]).posterior(POINTS).values
    torch.testing.assert_close(batches, scale.untransform(plain)[0])


@pytest.mark.filterwarnings("ignore::Warning:botorch")
@pytest.mark.filterwarnings("ignore::Warning:linear_operator")
@pytest.mark.parametrize("name", ["last layer", "wide"])
def test_the_knowledge_gradient_of_a_curve(name: str) -> None:
    from botorch.acquisition.knowledge_gradient import qKnowledgeGradient
    from botorch.optim import optimize_acqf

    from bayou.adapters.botorch import PosteriorModel

    x = torch.linspace(0, 0.6, 7, dtype=torch.float64)[:, None]
    y = torch.sin(5 * x)
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(1, 20), nn.Tanh(), nn.Linear(20, 1)).double()
    methods = {
        "last layer": bayou.Laplace("full", where="last", start=bayou.MAP(steps=200)),
        "wide": bayou.methods.Wide(units="erf", draws=1, passes=20),
    }
    posterior = bayou.fit(
        net, (x, y), methods[name], likelihood=bayou.Gaussian(0.05), progress=False
    )
    model = PosteriorModel(posterior, x, 64)
    grid = torch.linspace(0, 1, 101, dtype=torch.float64)[:, None]
    best = model.posterior(grid).mean.max()
    acquisition = qKnowledgeGradient(model, num_fantasies=8, current_value=best)
    bounds = torch.tensor([[0.0], [1.0]], dtype=torch.float64)
    torch.manual_seed(0)
    point, value = optimize_acqf(
        acquisition, bounds, q=1, num_restarts=2, raw_samples=64, options={"maxiter": 50}
    )
    assert point.shape == (1, 1)
    assert bool(((point >= 0) & (point <= 1)).all())

    def gains(x: torch.Tensor) -> torch.Tensor:
        """The same gradient by the maxima on the grid, at points (B, 1)."""
        fantasies = model.fantasize(x[:, None], acquisition.sampler)
        return (fantasies.posterior(grid).mean.amax((-2, -1)) - best).mean(0)

    assert float(value) == pytest.approx(float(gains(point)), rel=0.1, abs=1e-3)
    on_grid = gains(grid[::5])
    assert float(value) > 0.8 * float(on_grid.max())


def test_posteriors_that_cannot_be_conditioned_say_so() -> None:
    from bayou.adapters.botorch import PosteriorModel

    def fitted(method, likelihood, outputs=1):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(1, 4), nn.Tanh(), nn.Linear(4, outputs)).double()
        return bayou.fit(net, (X, Y), method, likelihood=likelihood, progress=False)

    point = bayou.MAP(steps=5)
    model = PosteriorModel(fitted(point, bayou.Gaussian(NOISE)), X)
    with pytest.raises(ValueError, match="no joint Gaussian distribution"):
        model.condition_on_observations(NEW_X, NEW_Y[None])
    with pytest.raises(ValueError, match="cannot be updated"):
        model.condition_on_observations(NEW_X, NEW_Y)
    sampled = fitted(bayou.Laplace("full", start=point), bayou.Gaussian(NOISE)).using("sampled")
    with pytest.raises(ValueError, match="linearized"):
        PosteriorModel(sampled, X).condition_on_observations(NEW_X, NEW_Y[None])
    noise = fitted(bayou.Laplace("full", start=point), bayou.HeteroscedasticGaussian(), 2)
    with pytest.raises(ValueError, match="Gaussian noise"):
        PosteriorModel(noise, X).condition_on_observations(NEW_X, NEW_Y[None])
    model = PosteriorModel(linear_posterior(), X)
    with pytest.raises(ValueError, match=r"Y \(\*batch, n, 1\)"):
        model.condition_on_observations(NEW_X, NEW_Y[:2])
    with pytest.raises(ValueError, match="takes no noise"):
        model.condition_on_observations(NEW_X, NEW_Y[None], noise=NEW_Y)
