# %% [markdown]
# # Distance awareness: SNGP and DDU
#
# A network with a random last layer is uncertain where its features are unusual, and far from the data the features
# of ReLU units are usual in most directions. Two remedies need no ensemble: random features of a body that keeps
# distances, so that the last layer is a Gaussian process (SNGP, Liu 2020), and a density of the features of the
# trained network (DDU, Mukhoti 2023).

# %%
import matplotlib.pyplot as plt
import torch
from sklearn.datasets import make_moons
from torch import Tensor, nn

import bayou
from bayou.operations import feature_density, random_feature_head, spectral_normalized

torch.manual_seed(0)
inputs, labels = map(torch.tensor, make_moons(300, noise=0.15, random_state=0))
inputs = (inputs.float() - inputs.float().mean(0)) / inputs.float().std(0)
data = (inputs, labels)
away = 3 * torch.nn.functional.normalize(torch.randn(300, 2), dim=-1)  # a circle around the moons


# %% [markdown]
# ## Three networks
#
# The body of SNGP is residual: with bounded weights x + g(x) can neither merge inputs nor tear them apart.


# %%
class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.g = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.g(x)


fit = bayou.MAP(steps=600, lr=5e-3)
body = nn.Sequential(nn.Linear(2, 32), Residual(), Residual(), nn.Linear(32, 2))
last = bayou.fit(
    body,
    data,
    bayou.Laplace(where="last", start=fit),
    prior=bayou.Normal(1.0),
    seed=0,
    progress=False,
)
net = random_feature_head(spectral_normalized(body, 0.95), features=1024, length_scale=0.7)
sngp = bayou.fit(
    net,
    data,
    bayou.Laplace(where="last", start=fit),
    prior=bayou.Normal(3.0),
    seed=0,
    progress=False,
)
density = feature_density(last, data, jitter=1e-3)

# %% [markdown]
# ## Who recognizes the circle?

# %%
scores = {
    "Laplace, last layer": lambda x: last.predict(x, seed=0).mutual_information,
    "SNGP": lambda x: sngp.predict(x, seed=0).mutual_information,
    "DDU": lambda x: -density(x),
}
for name, score in scores.items():
    print(f"{name:19s} AUROC of the circle {bayou.metrics.auroc(score(inputs), score(away)):.3f}")

# %% [markdown]
# ## What one sees
#
# The last layer of the plain network doubts along the boundary of the classes, and the doubt is a cone that the data
# do not close. SNGP doubts wherever there are no data. The density of DDU falls in all directions too, without a
# second network or a draw; its scale is that of log p, not of a probability.

# %%
ticks = torch.linspace(-4, 4, 60)
plane = torch.cartesian_prod(ticks, ticks)
fig, axes = plt.subplots(
    1,
    3,
    figsize=(10.5, 3),
    layout="compressed",
    num="Uncertainty around two moons: last-layer Laplace, SNGP and DDU",
)
for axis, (name, score) in zip(axes, scores.items(), strict=True):
    values = score(plane).reshape(60, 60).T
    top = float(values.quantile(0.95))
    low = float(values.min())
    shown = axis.contourf(
        ticks, ticks, values.clamp(low, top), levels=torch.linspace(low, top, 15), cmap="BuPu"
    )
    for k, color, marker in ((0, "#d9743c", "o"), (1, "black", "^")):
        axis.scatter(*inputs[labels == k].T, s=5, color=color, marker=marker, linewidths=0)
    axis.set(xlabel="input 1", ylabel="input 2", title=name)
    fig.colorbar(shown, ax=axis)
plt.show()
