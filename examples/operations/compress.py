# %% [markdown]
# # Compression: the network that the data need
#
# y = 10·sin(π·x1·x2) + 20·(x3 − ½)² + 10·x4 + 5·x5 + noise (Friedman 1991), and five more inputs without effect. Priors
# that prune ask every weight (`SparseVD`, Molchanov 2017), or every unit with all of its weights (`NormalJeffreys`,
# Louizos 2017), whether the data need it. What they do not need becomes noise, E[w]²/Var[w] → 0, and `bayou.compress`
# builds the network without it: plain torch, smaller layers, and numbers with as few bits as the posterior determines.

# %%
import matplotlib.pyplot as plt
import torch
from torch import nn

import bayou


def make_data(rows: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs around 0, and y in units of its own standard deviation, 5; the noise is .2 of it."""
    generator = torch.Generator().manual_seed(seed)
    x, noise = torch.rand(rows, 10, generator=generator), torch.randn(rows, generator=generator)
    y = (
        10 * torch.sin(torch.pi * x[:, 0] * x[:, 1])
        + 20 * (x[:, 2] - 0.5) ** 2
        + 10 * x[:, 3]
        + 5 * x[:, 4]
        + noise
    )
    return 4 * x - 2, (y.unsqueeze(1) - 14.4) / 5


train, (x, y) = make_data(2000, 0), make_data(1000, 1)
families = {
    "SparseVD": bayou.SparseVD(),
    "NormalJeffreys": bayou.guides.NormalJeffreys(z="example"),
}

# %% [markdown]
# ## Fit and compress
#
# A weight stays if it is at least as large as its noise (`threshold` 1).

# %%
print(
    f"{'posterior':<15} {'RMSE':>6} {'small':>6} {'rounded':>8} {'inputs, units':>14} {'bytes':>15}"
)
found = {}
for name, family in families.items():
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Linear(10, 100), nn.SiLU(), nn.Linear(100, 50), nn.SiLU(), nn.Linear(50, 1)
    )
    method = bayou.VI(family, steps=800, lr=5e-3)
    posterior = bayou.fit(
        net, train, method, likelihood=bayou.Gaussian(0.2, learn=True), progress=False
    )
    small = bayou.compress(posterior, 1.0)
    rounded = bayou.compress(posterior, 1.0, bits=True, example_x=x[:1])
    with torch.no_grad():
        errors = [
            5 * (one(x) - y).square().mean().sqrt().item()
            for one in (posterior.to_module(), small, rounded)
        ]
    units = [int((small[0].weight != 0).any(0).sum()), small[0].out_features, small[2].out_features]
    before, after = rounded.compression.bytes
    shape = "-".join(map(str, units))
    print(
        f"{name:<15} {errors[0]:6.3f} {errors[1]:6.3f} {errors[2]:8.3f} {shape:>14} {before:>7,} → {after:,}"
    )
    found[name] = units, small[0].weight.detach().norm(dim=0)

# %% [markdown]
# ## What one sees
#
# Of 10 inputs, 100 and 50 units few remain. The right picture shows how strongly each input is read: the last five,
# which have no effect on y, are gone or nearly so.

# %%
fig, axes = plt.subplots(
    1,
    2,
    figsize=(9, 3),
    layout="compressed",
    num="Units that remain, and the strength of each input, for two families",
)
axes[0].bar(range(3), (10, 100, 50), color="0.9", label="before")
for k, ((name, (units, read)), color) in enumerate(
    zip(found.items(), ("#3b5b92", "#d9743c"), strict=True)
):
    axes[0].bar(
        [place - 0.15 + 0.3 * k for place in range(3)], units, 0.28, color=color, label=name
    )
    axes[1].bar(
        [place - 0.15 + 0.3 * k for place in range(10)], read / read.max(), 0.28, color=color
    )
axes[0].set(xticks=range(3), xticklabels=["inputs", "layer 1", "layer 2"], ylabel="units")
axes[1].set(
    xticks=range(10),
    xticklabels=[f"$x_{{{k}}}$" for k in range(1, 11)],
    ylabel="norm of its weights, relative",
)
axes[0].legend(frameon=False, fontsize=8)
plt.show()
