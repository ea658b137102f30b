# %% [markdown]
# # A first posterior: what is noise, and what is not known
#
# Var[y] = E_s Var[y | f_s] + Var_s E[y | f_s]: the noise, which stays, and the uncertainty about the function, which
# grows where there are no data and would shrink with more of them. A single network has no second part: it is as sure
# in a gap as it is at the data.

# %%
import matplotlib.pyplot as plt
import torch
from torch import nn

import bayou

torch.manual_seed(0)
x = torch.cat(
    [torch.rand(30, 1) * 1.2 - 2, torch.rand(30, 1) * 1.2 + 0.6]
)  # no points between -0.8 and 0.6
y = torch.sin(2 * x) + 0.1 * torch.randn(60, 1)

# %% [markdown]
# ## One line a posterior
#
# The network is a plain `nn.Module`, and stays one. The name of a method selects the noise and the prior on held-out
# rows; every method returns the same kind of object.

# %%
net = nn.Sequential(nn.Linear(1, 50), nn.Tanh(), nn.Linear(50, 1))
line = torch.linspace(-3.2, 3.2, 200)[:, None]
bands = {}
for name in ("map", "ensemble", "laplace"):
    posterior = bayou.fit(net, (x, y), name, progress=False)
    p = (
        posterior.predict(line, 100, seed=0)
        if name == "laplace"
        else posterior.predict(line, seed=0)
    )
    bands[name] = p
    here, gap = (
        p.epistemic_std[(line[:, 0] - 1).abs().argmin()],
        p.epistemic_std[line[:, 0].abs().argmin()],
    )
    print(
        f"{name:9s} noise {p.aleatoric_std.mean():.2f}; f: {here.item():.2f} at the data, {gap.item():.2f} in the gap"
    )

# %% [markdown]
# ## What one sees
#
# Light: 90 % of y. Dark: two standard deviations of the function alone. `posterior.checks` says whether a fit can be
# trusted, here that of the Laplace approximation.

# %%
fig, axes = plt.subplots(
    1,
    3,
    figsize=(7.8, 2.6),
    sharey=True,
    layout="compressed",
    num="Bands of MAP, an ensemble and Laplace on a curve with a gap",
)
for axis, (name, p) in zip(axes, bands.items(), strict=True):
    low, high = p.interval(0.9)
    mean, doubt = p.mean[:, 0], p.epistemic_std[:, 0]
    axis.fill_between(
        line[:, 0],
        low[:, 0],
        high[:, 0],
        color="#3b5b92",
        alpha=0.2,
        linewidth=0,
        label="90 % of y",
    )
    axis.fill_between(
        line[:, 0],
        mean - 2 * doubt,
        mean + 2 * doubt,
        color="#3b5b92",
        alpha=0.3,
        linewidth=0,
        label="f",
    )
    axis.plot(line, mean, color="#3b5b92")
    axis.scatter(x, y, s=8, color="#d9743c", linewidths=0)
    axis.set(title=name, xlabel="x", xlim=(-3.2, 3.2), ylim=(-3, 3))
axes[0].set_ylabel("y")
axes[0].legend(frameon=False, loc="lower left")
plt.show()

# %%
print(posterior)
print(posterior.checks)
