# %% [markdown]
# # Noise that depends on x, and outliers
#
# The likelihood says what noise is. A Gaussian with one scale (`Gaussian`), a scale that the network predicts
# (`HeteroscedasticGaussian`), or heavy tails (`StudentT`), for which an outlier is not a reason to bend the curve.

# %%
import matplotlib.pyplot as plt
import torch
from torch import nn

import bayou

torch.manual_seed(0)
x = torch.rand(200, 1) * 4 - 2
y = torch.sin(2 * x) + (0.05 + 0.15 * (x + 2)) * torch.randn(200, 1)
y[::17] += 2.5  # every 17th row is an outlier

# %% [markdown]
# ## Three likelihoods, one network
#
# The heteroscedastic network has two outputs, a mean and a log-variance. `learn=True` learns the scale.

# %%
likelihoods = {
    "Gaussian": (bayou.Gaussian(0.5, learn=True), 1),
    "heteroscedastic": (bayou.HeteroscedasticGaussian(), 2),
    "Student t": (bayou.likelihoods.StudentT(3.0, 0.5, learn=True), 1),
}
line = torch.linspace(-2.2, 2.2, 200)[:, None]
truth = torch.sin(2 * line)
bands = {}
for name, (likelihood, outputs) in likelihoods.items():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(1, 40), nn.Tanh(), nn.Linear(40, outputs))
    method = bayou.Ensemble(3, of=bayou.MAP(steps=500, lr=1e-2))
    posterior = bayou.fit(net, (x, y), method, likelihood=likelihood, progress=False)
    p = posterior.predict(line, seed=0)
    bands[name] = p
    inside = line[:, 0].abs() < 2
    error = (p.mean - truth)[inside].square().mean().sqrt()
    width = p.interval(0.9)[1] - p.interval(0.9)[0]
    left, right = width[line[:, 0] < -1.5].mean(), width[line[:, 0] > 1.5].mean()
    print(
        f"{name:16s} error of the curve {error:.2f}; width of 90 % intervals: left {left:.2f}, right {right:.2f}"
    )

# %% [markdown]
# ## What one sees
#
# One scale is too wide on the left and too narrow on the right. The heteroscedastic band grows with the noise; its mean
# is still drawn toward the outliers. Under a Student t the curve ignores them.

# %%
fig, axes = plt.subplots(
    1,
    3,
    figsize=(10.5, 3),
    sharey=True,
    layout="compressed",
    num="Bands under Gaussian, heteroscedastic and Student t noise, with outliers",
)
for axis, (name, p) in zip(axes, bands.items(), strict=True):
    low, high = p.interval(0.9)
    axis.fill_between(
        line[:, 0],
        low[:, 0],
        high[:, 0],
        color="#3b5b92",
        alpha=0.25,
        linewidth=0,
        label="90 % of y",
    )
    axis.plot(line, p.mean, color="#3b5b92", label="mean")
    axis.plot(line, truth, "k--", linewidth=0.8, label="truth")
    axis.scatter(x, y, s=5, color="#d9743c", linewidths=0)
    axis.set(title=name, xlabel="x", ylim=(-3, 4))
axes[0].set_ylabel("y")
axes[0].legend(frameon=False, fontsize=8, loc="upper left")
plt.show()
