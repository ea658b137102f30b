# %% [markdown]
# # A posterior with two modes
#
# The network sees only the energy of a linear map, f(x) = (w·x)², so w and −w explain the data equally well: the
# posterior has two modes of equal mass, and its evidence Z is known by quadrature. A Gaussian that covers one of them
# is short of log Z by log 2 = 0.693 nats at least, however well it fits. MNF with a mixture of two components under its
# flow finds both.

# %%
import math

import matplotlib.pyplot as plt
import torch
from torch import Tensor, nn

import bayou

NOISE, TRUE = 0.5, torch.tensor([0.9, 0.6], dtype=torch.float64)
generator = torch.Generator().manual_seed(0)
x = torch.randn(12, 2, generator=generator, dtype=torch.float64)
y = (x @ TRUE).square() + NOISE * torch.randn(12, generator=generator, dtype=torch.float64)


class Energy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 1, bias=False, dtype=torch.float64)
        nn.init.constant_(self.linear.weight, 0.4)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).square()


# %% [markdown]
# ## The exact posterior on a grid

# %%
line = torch.linspace(-2, 2, 401, dtype=torch.float64)
w = torch.cartesian_prod(line, line)
log_joint = torch.distributions.Normal(0.0, 1.0).log_prob(w).sum(-1)
log_joint += torch.distributions.Normal((w @ x.mT).square(), NOISE).log_prob(y).sum(-1)
log_z = float(log_joint.logsumexp(0)) + 2 * math.log(4 / 400)
density = (log_joint - log_z).exp().reshape(401, 401)
print(f"log evidence by quadrature: {log_z:.4f}; log 2 = {math.log(2):.4f}")

# %% [markdown]
# ## Three families
#
# `short` is log Z − ELBO = KL(q ‖ posterior); `right` the fraction of draws on the side of the true weights.

# %%
families = {
    "mean field": bayou.MeanField(std=0.1),
    "MNF, one component": bayou.MNF(std=0.05),
    "MNF, two components": bayou.MNF(std=0.05, components=2, z_std=2.0),  # z starts around −1 and 3
}
draws = {}
for name, family in families.items():
    method = bayou.VI(family, steps=800, samples=8, lr=1e-2, scale_lr=0.1)
    posterior = bayou.fit(
        Energy(), (x, y[:, None]), method, likelihood=bayou.Gaussian(NOISE), progress=False
    )
    elbo = bayou.elbo(posterior, (x, y[:, None]), samples=500, seed=1)
    draws[name] = posterior.sample(2000, seed=0)["linear.weight"][:, 0]
    right = float((draws[name] @ TRUE > 0).double().mean())
    short = log_z - elbo.value
    print(
        f"{name:20s} ELBO {elbo.value:.3f} ± {elbo.standard_error:.3f}, short {short:.3f}, right {right:.2f}"
    )

# %%
fig, axes = plt.subplots(
    1,
    3,
    figsize=(9.5, 3.3),
    sharey=True,
    layout="compressed",
    num="Draws of three families over the contours of a posterior with two modes",
)
for axis, (name, some) in zip(axes, draws.items(), strict=True):
    axis.scatter(*some[:500].T, s=7, color="#d9743c", alpha=0.5, linewidths=0)
    levels = [float(density.max()) * level for level in (0.02, 0.2, 0.6)]
    axis.contour(line, line, density.mT, levels=levels, colors="#3b5b92", linewidths=1.0)
    axis.set(title=name, xlabel="$w_1$", xlim=(-1.6, 1.6), ylim=(-1.6, 1.6), aspect="equal")
axes[0].set_ylabel("$w_2$")
plt.show()
