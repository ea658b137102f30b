# %% [markdown]
# # Intervals when the world shifts
#
# A conformal guarantee needs new rows that are like the held-out ones. Here they are not: first the inputs move to
# where the noise is large, then a series becomes noisier while it is observed. Weights and adaptive levels restore the
# coverage.

# %%
import matplotlib.pyplot as plt
import torch
from torch import nn

import bayou
from bayou.operations import OnlineConformal, density_ratio

torch.manual_seed(0)


def draw(rows: int, shift: float) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(rows, 1) + shift
    return x, torch.sin(2 * x) + (0.1 + 0.4 * x.abs()) * torch.randn(rows, 1)


train, held = draw(300, 0.0), draw(1500, 0.0)
new, y_new = draw(2000, 1.1)
net = nn.Sequential(nn.Linear(1, 50), nn.SiLU(), nn.Linear(50, 1))
noise = bayou.Gaussian(0.5)
posterior = bayou.fit(net, train, bayou.MAP(steps=600, lr=0.01), likelihood=noise, progress=False)

# %% [markdown]
# ## Other inputs: a covariate shift
#
# The weight of a held-out row is the density of new inputs over that of held-out inputs. A logistic regression or two
# normalizing flows estimate it from unlabeled new rows.

# %%
weights = {
    "plain": None,
    "logistic regression": density_ratio(held[0], new),
    "two flows": density_ratio(held[0], new, by="flows"),
}
intervals = {}
print(f"{'weights':20s} {'effective rows':>14} {'coverage':>9}")
for name, ratio in weights.items():
    c = bayou.conformal(posterior, held, level=0.9, weights=ratio)
    low, high = intervals[name] = c.interval(new)
    coverage = ((low <= y_new) & (y_new <= high)).float().mean()
    print(f"{name:20s} {c.effective_rows[0]:14.0f} {coverage:9.1%}")

# %%
fig, axes = plt.subplots(
    1,
    2,
    figsize=(10, 3.2),
    layout="compressed",
    num="Intervals with and without weights, and the weights of two estimates",
)
order = new[:, 0].argsort()
axes[0].scatter(held[0], held[1], s=2, color="0.75", label="held out")
axes[0].scatter(new[::4], y_new[::4], s=2, color="0.3", label="new")
for name, color in (("plain", "#c44e52"), ("two flows", "#3b5b92")):
    low, high = (end[order, 0] for end in intervals[name])
    axes[0].plot(new[order, 0], low, color=color, label=name)
    axes[0].plot(new[order, 0], high, color=color)
axes[0].set(xlabel="x", ylabel="y", xlim=(-3, 4), ylim=(-5, 5))
axes[0].legend(frameon=False, fontsize=7)
grid = torch.linspace(-3, 3.5, 200).unsqueeze(1)
for name, ratio in weights.items():
    if ratio is not None:
        axes[1].plot(grid, ratio(grid), label=name)
log_ratio = 1.1 * grid - 1.1**2 / 2
axes[1].plot(grid, log_ratio.exp(), color="0.5", ls="--", label="true ratio")
axes[1].set(xlabel="x", ylabel="weight", yscale="log", ylim=(1e-3, 60))
axes[1].legend(frameon=False, fontsize=7)
plt.show()

# %% [markdown]
# ## A stream that drifts: adaptive levels
#
# The noise of a series grows to four times. Fixed intervals miss ever more rows; an adaptive level widens them after
# each error. Its state can be saved and continues bit for bit.

# %%
steps = 1000
scale = torch.exp2(2 * torch.arange(steps) / steps).unsqueeze(1)
x = torch.zeros(1, 1)
p = posterior.predict(x)
series = p.mean + 0.5 * scale * torch.randn(steps, 1)
calibration = (x.expand(300, 1), p.mean + 0.5 * torch.randn(300, 1))
low, high = bayou.conformal(posterior, calibration, level=0.9).interval(x)
inside = {"fixed": ((low <= series) & (series <= high))[:, 0].float()}

online = OnlineConformal(level=0.9, step_size=0.05)
online.calibrate(posterior.predict(calibration[0]), calibration[1])
hits = []
for y in series.split(1):
    low, high = online.interval(p)
    hits.append(online.observe(y)[0, 0])
inside["adaptive"] = torch.stack(hits).float()
for name, hits in inside.items():
    print(f"{name:9s} {hits.mean():.1%} of all rows, {hits[-200:].mean():.1%} of the last 200")

# %%
fig, axis = plt.subplots(
    figsize=(7, 2.8),
    layout="compressed",
    num="Coverage of the last 100 rows of a stream that drifts",
)
for name, hits in inside.items():
    axis.plot(torch.arange(100, steps + 1), hits.unfold(0, 100, 1).mean(1), label=name)
axis.axhline(0.9, color="0.5", ls="--")
axis.set(xlabel="row", ylabel="coverage of the last 100 rows")
axis.legend(frameon=False)
plt.show()
