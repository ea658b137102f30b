# %% [markdown]
# # Conditional flows: a regression with any noise
#
# A flow with a context is a conditional density p(y | x). It needs no assumption on the noise: here the noise has one
# mode on the left, two in the middle and is skewed on the right, and no Gaussian with a mean and a variance would fit.

# %%
import matplotlib.pyplot as plt
import torch

from bayou import flows

torch.manual_seed(0)
x = torch.rand(5000, 1) * 6 - 3
fork = torch.where(torch.rand(5000, 1) < 0.5, -1.0, 1.0) * (x.clamp(min=-1) + 1).clamp(max=2) * 0.7
skew = torch.distributions.Exponential(1 + 1.5 * (3 - x)).sample()
y = torch.sin(x) + fork + 0.12 * torch.randn(5000, 1) + skew - 0.5

# %% [markdown]
# ## Fit
#
# One number y, so an autoregressive spline; `context_dim=1` makes its parameters functions of x.

# %%
flow = flows.Flow(flows.StandardNormal(1), flows.spline_autoregressive(1, layers=2, context_dim=1))
print(flows.fit(flow, y, context=x, steps=500, progress=False))
draws = flow.sample(2000, torch.tensor([[-2.0], [0.0], [2.0]]), seed=0)  # (2000, 3, 1)
for at, column in zip((-2, 0, 2), draws.unbind(1), strict=True):
    low, high = column.quantile(torch.tensor([0.05, 0.95])).tolist()
    print(f"x = {at:+d}: 90 % of y in {low:.2f} .. {high:.2f}")

# %% [markdown]
# ## What one sees
#
# The learned density at every x (each column integrates to one), with the data on the left for comparison, and three
# slices.

# %%
columns, rows = torch.linspace(-3, 3, 120), torch.linspace(-3.2, 4.5, 140)
both = torch.cartesian_prod(columns, rows)
with torch.no_grad():
    density = flow.log_prob(both[:, 1:], both[:, :1]).exp().reshape(120, 140).T
fig, axes = plt.subplots(
    1,
    3,
    figsize=(10.5, 3.2),
    layout="compressed",
    num="Data that fork, the learned conditional density, and three slices of it",
)
axes[0].scatter(x[:2500], y[:2500], s=1, color="#3b5b92")
axes[0].set(title="data", xlabel="x", ylabel="y", xlim=(-3, 3), ylim=(-3.2, 4.5))
axes[1].imshow(
    density, origin="lower", extent=(-3, 3, -3.2, 4.5), cmap="BuPu", vmax=1.2, aspect="auto"
)
axes[1].set(title="p(y | x)", xlabel="x")
for at, color in zip((-2, 0, 2), ("#3b5b92", "#d9743c", "#4a8c5c"), strict=True):
    axes[2].plot(rows, density[:, (columns - at).abs().argmin()], color=color, label=f"x = {at:+d}")
axes[2].set(title="slices", xlabel="y", ylabel="density")
axes[2].legend(frameon=False)
plt.show()
