# %% [markdown]
# # BoTorch: Bayesian optimization with a network
#
# An experiment costs; fifteen are allowed. After each one an ensemble is fitted to what is known, its functions become
# a BoTorch model, and expected improvement selects the next point: where they promise much, or do not agree. Needs `pip
# install "bayou[botorch]"`.

# %%
import warnings

import matplotlib.pyplot as plt
import torch
from botorch.acquisition import qLogExpectedImprovement
from botorch.models.transforms import Standardize
from botorch.optim import optimize_acqf
from torch import Tensor, nn

import bayou
from bayou.adapters.botorch import PosteriorModel

warnings.simplefilter("ignore")  # of BoTorch, about its own optimizer


def experiment(x: Tensor) -> Tensor:
    """Unknown to the optimizer: Branin's function on the unit square, negated; its maximum is −0.398."""
    a, b = 15 * x[:, :1] - 5, 15 * x[:, 1:]
    return -((b - 0.1292 * a.square() + 1.5915 * a - 6).square() + 9.602 * torch.cos(a) + 10)


# %% [markdown]
# ## A posterior as a BoTorch model
#
# The network is fitted in standardized units; `outcome_transform` undoes that.


# %%
def fitted(x: Tensor, y: Tensor) -> PosteriorModel:
    scale = Standardize(1)
    standard, _ = scale(y)
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Linear(2, 30), nn.Tanh(), nn.Linear(30, 30), nn.Tanh(), nn.Linear(30, 1)
    ).double()
    method = bayou.Ensemble(5, bayou.MAP(steps=150, lr=0.02), parallel="vmap")
    prior = bayou.Normal("fan_in", gain=3.0)
    posterior = bayou.fit(
        net, (x, standard), method, likelihood=bayou.Gaussian(0.05), prior=prior, progress=False
    )
    return PosteriorModel(posterior, x, outcome_transform=scale.eval())


# %% [markdown]
# ## The loop

# %%
x = torch.rand(6, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
y = experiment(x)
bounds = torch.tensor([[0.0, 0.0], [1.0, 1.0]], dtype=torch.float64)
best = [float(y.max())]
for _ in range(9):
    torch.manual_seed(len(x))  # BoTorch draws its starting points
    acquisition = qLogExpectedImprovement(fitted(x, y), best_f=y.max())
    new, _ = optimize_acqf(
        acquisition, bounds, q=1, num_restarts=4, raw_samples=64, options={"maxiter": 30}
    )
    x, y = torch.cat([x, new]), torch.cat([y, experiment(new)])
    best.append(float(y.max()))
print("best value after 6, 7, ... experiments:", ", ".join(f"{value:.2f}" for value in best))

# %%
line = torch.linspace(0, 1, 60, dtype=torch.float64)
values = experiment(torch.cartesian_prod(line, line)).reshape(60, 60)
fig, axes = plt.subplots(
    1,
    2,
    figsize=(8.5, 3.2),
    layout="compressed",
    num="The function with the points that were tried, and the best value so far",
)
axes[0].contourf(line, line, values.T, levels=20, cmap="BuPu")
axes[0].scatter(*x[:6].T, color="white", edgecolors="black", s=25, label="given")
axes[0].scatter(*x[6:].T, color="#d9743c", edgecolors="black", s=25, label="selected")
axes[0].set(xlabel="$x_1$", ylabel="$x_2$")
axes[0].legend(loc="upper right", fontsize=8)
axes[1].plot(range(6, 16), best, "o-", color="#3b5b92")
axes[1].axhline(-0.398, color="0.5", linestyle=":", label="maximum")
axes[1].set(xlabel="experiments", ylabel="best value")
axes[1].legend(frameon=False)
plt.show()
