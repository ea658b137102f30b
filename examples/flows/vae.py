# %% [markdown]
# # A VAE whose posterior can be seen
#
# Digits with two latent numbers, so that the true posterior p(z | x) can be computed on a grid, and log p(x) by
# quadrature. What an encoder loses is KL(q(z | x) ‖ p(z | x)), the gap between log p(x) and its bound. A Gaussian
# encoder can only be an ellipse along the axes; a flow can bend.

# %%
import math

import matplotlib.pyplot as plt
import torch
from torch import Tensor, nn

from bayou.data import load
from bayou.flows import (
    VAE,
    AmortizedAffine,
    BernoulliDecoder,
    Chain,
    ConditionalFlow,
    Flow,
    StandardNormal,
    Sylvester,
)

EVENT, REACH, POINTS = (8, 8), 5.0, 81
data = load("digits", ood="none")
low, high = data.train[0].min(), data.train[0].max()
train, test = (
    ((x - low) / (high - low) > 0.5).float().reshape(-1, *EVENT)
    for x in (data.train[0], data.test[0])
)
line = torch.linspace(-REACH, REACH, POINTS)
grid = torch.cartesian_prod(line, line)


def on_grid(vae: VAE, x: Tensor) -> tuple[Tensor, Tensor]:
    """log p(x) by quadrature, (rows,), and p(z | x) at the points of the grid, (points, points, rows)."""
    with torch.no_grad():
        log_joint = vae.prior.log_prob(grid).unsqueeze(-1) + vae.map.decoder.log_prob(
            x, grid.unsqueeze(1), 1
        )
    log_p = log_joint.logsumexp(0) + 2 * math.log(2 * REACH / (POINTS - 1))
    return log_p, (log_joint - log_p).exp().reshape(POINTS, POINTS, -1)


# %% [markdown]
# ## Two encoders

# %%
models = {}
for name, layers in (("Gaussian", 0), ("Sylvester, 6", 6)):
    torch.manual_seed(0)
    back = nn.Sequential(
        nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64)
    )
    net = nn.Sequential(nn.Flatten(-2), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU())
    maps = [AmortizedAffine(2, 64)]
    if layers:
        maps.append(Sylvester(2, layers, "householder", reflections=2, context_dim=64))
    vae = VAE(
        BernoulliDecoder(EVENT, back), ConditionalFlow(Flow(StandardNormal(2), Chain(*maps)), net)
    )
    vae.fit(train, steps=300, lr=5e-3, warmup=0.2, seed=0, progress=False)
    with torch.no_grad():
        exact = torch.cat([on_grid(vae, x)[0] for x in test[:100].split(20)])
        bound, many = vae.elbo(test[:100], 50, seed=1), vae.log_prob(test[:100], 200, seed=2)
    models[name] = vae
    found = ", ".join(f"{value:.2f}" for value in (-bound.mean(), -many.mean(), -exact.mean()))
    print(f"{name:13s} −ELBO, −log p by importance samples and by quadrature: {found}")

# %% [markdown]
# ## True posteriors (purple) and draws of the encoders (orange)

# %%
fig, axes = plt.subplots(
    3,
    5,
    figsize=(9, 5.2),
    height_ratios=(0.6, 1, 1),
    layout="compressed",
    num="Five digits, their true posteriors, and draws of a Gaussian and a Sylvester encoder",
)
for axis, image in zip(axes[0], test[:5], strict=True):
    axis.imshow(image, cmap="gray_r")
    axis.axis("off")
for row, (name, vae) in zip(axes[1:], models.items(), strict=True):
    _, density = on_grid(vae, test[:5])
    draws = torch.stack([vae.encode(test[:5], seed=k) for k in range(200)])
    for column, axis in enumerate(row):
        dots, (left, down), (right, up) = draws[:, column], *(draws[:, column].aminmax(dim=0))
        axis.contourf(line, line, density[..., column].T, levels=6, cmap="BuPu")
        axis.scatter(*dots.T, s=3, color="#d9743c", alpha=0.6, linewidths=0)
        axis.set(xlim=(left - 0.4, right + 0.4), ylim=(down - 0.4, up + 0.4), xticks=[], yticks=[])
    row[0].set_ylabel(name)
plt.show()
