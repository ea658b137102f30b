# %% [markdown]
# # Is this fit any good? Checks and baselines
#
# A posterior can be confident and wrong. `diagnostics.check` compares it with a constant, with a linear model and with
# its own mode, and its intervals with the rows that fall into them, with tolerances for chance. Here a good fit, one
# with a noise that is too small, and one that was stopped too early.

# %%
import matplotlib.pyplot as plt
import torch
from torch import nn

import bayou

torch.manual_seed(0)
x = torch.rand(500, 1) * 4 - 2
y = torch.sin(2 * x) + 0.3 * torch.randn(500, 1)
train, held = (x[:250], y[:250]), (x[250:], y[250:])

# %% [markdown]
# ## Three fits

# %%
fits = {
    "good": (bayou.MAP(steps=800, lr=1e-2), 0.3),
    "noise too small": (bayou.MAP(steps=800, lr=1e-2), 0.1),
    "stopped early": (bayou.MAP(steps=5, lr=1e-3), 0.3),
}
posteriors = {}
for name, (method, noise) in fits.items():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(1, 40), nn.Tanh(), nn.Linear(40, 1))
    posterior = bayou.fit(
        net,
        train,
        method,
        likelihood=bayou.Gaussian(noise),
        prior=bayou.Normal(1.0),
        progress=False,
    )
    posteriors[name] = posterior
    print(f"--- {name}\n{bayou.diagnostics.check(posterior, train, held)}\n")

# %% [markdown]
# ## The same as a picture
#
# For every row the probability that the posterior gives to values below y. If the posterior is right, these numbers are
# uniform: the histogram is flat. A noise that is too small piles them up at both ends.

# %%
fig, axes = plt.subplots(
    1,
    3,
    figsize=(10.5, 2.8),
    sharey=True,
    layout="compressed",
    num="Histograms of the probability integral transform for three fits",
)
for axis, (name, posterior) in zip(axes, posteriors.items(), strict=True):
    below = posterior.predict(held[0], seed=0).cdf(held[1])
    axis.hist(below[:, 0], bins=15, range=(0, 1), color="#3b5b92", alpha=0.7)
    axis.axhline(250 / 15, color="#d9743c", linestyle="--")
    axis.set(title=name, xlabel="P(y' < y)")
axes[0].set_ylabel("held-out rows")
plt.show()
