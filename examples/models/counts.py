# %% [markdown]
# # Counts: a Poisson likelihood
#
# Visitors per hour, with no data at night. The network predicts the log of a rate; its noise is that of counting, and
# is known. The uncertainty about the rate comes on top.

# %%
import matplotlib.pyplot as plt
import torch
from torch import nn

import bayou

torch.manual_seed(0)
hour = 7 + 13 * torch.rand(90, 1)
rate = torch.exp(1.2 + 1.2 * torch.sin((hour - 9) / 12 * 2 * torch.pi))
visitors = torch.poisson(rate)

# %% [markdown]
# ## Fit
#
# The input is scaled to about −1 .. 1. Laplace gives the log-rate a Gaussian, and the counts a mixture of Poissons.

# %%
x = (hour - 12) / 6
net = nn.Sequential(nn.Linear(1, 30), nn.Tanh(), nn.Linear(30, 1))
method = bayou.Laplace("full", start=bayou.MAP(steps=800, lr=1e-2))
posterior = bayou.fit(
    net, (x, visitors), method, likelihood=bayou.Poisson(), prior=bayou.Normal(1.0), progress=False
)
line = torch.linspace(0, 24, 200)[:, None]
p = posterior.predict((line - 12) / 6, 200, seed=0)
inside = posterior.predict(x, 200, seed=0).interval(0.9)
covered = ((inside[0] <= visitors) & (visitors <= inside[1])).float().mean()
print(f"{covered:.1%} of the training counts lie in their 90 % intervals")
for clock in (3, 12, 18):
    k = (line[:, 0] - clock).abs().argmin()
    low, high = (float(side[k]) for side in p.interval(0.9))
    print(
        f"{clock:2d} o'clock: {p.mean[k].item():5.1f} visitors, 90 % between {low:.0f} and {high:.0f}"
    )

# %% [markdown]
# ## What one sees
#
# Intervals of counts have whole numbers as ends. By day their width is that of counting. At night, without data, the
# network continues its curve, and the doubt about the rate adds little to so small a number: a rate is positive, so
# that the doubt about its logarithm matters where it is large.

# %%
fig, axis = plt.subplots(
    figsize=(7.5, 3),
    layout="compressed",
    num="Visitors by hour with the predicted rate and 90 % intervals",
)
low, high = p.interval(0.9)
axis.fill_between(
    line[:, 0],
    low[:, 0],
    high[:, 0],
    step="mid",
    color="#3b5b92",
    alpha=0.2,
    linewidth=0,
    label="90 %",
)
axis.plot(line, p.mean, color="#3b5b92", label="mean")
clock = torch.linspace(7, 20, 100)
axis.plot(
    clock,
    torch.exp(1.2 + 1.2 * torch.sin((clock - 9) / 12 * 2 * torch.pi)),
    "k--",
    linewidth=0.8,
    label="true rate",
)
axis.scatter(hour, visitors, s=8, color="#d9743c", linewidths=0)
axis.set(xlabel="hour", ylabel="visitors", xlim=(0, 24), ylim=(0, 22), xticks=range(0, 25, 3))
axis.legend(frameon=False)
plt.show()
