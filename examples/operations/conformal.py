# %% [markdown]
# # Conformal intervals: a guarantee for any posterior
#
# The noise grows with |x|, and the network assumes one noise for all x: its 90 % intervals are too narrow, most of all
# outside. Held-out rows widen them until 90 % of new rows are inside (CQR, Romano 2019), or until that is so within
# each group (Mondrian). The guarantee needs exchangeable rows and nothing of the model.

# %%
import matplotlib.pyplot as plt
import torch
from torch import nn

import bayou

torch.manual_seed(0)
x = torch.rand(2600, 1) * 6 - 3
y = torch.sin(2 * x) + 0.15 * x.abs() * torch.randn(2600, 1)
train, held, new, y_new = (x[:200], y[:200]), (x[200:600], y[200:600]), x[600:], y[600:]

net = nn.Sequential(nn.Linear(1, 50), nn.Tanh(), nn.Linear(50, 1))
method = bayou.Ensemble(3, bayou.MAP(steps=1000, lr=0.01))
noise = bayou.Gaussian(0.1)  # too small outside
posterior = bayou.fit(net, train, method, likelihood=noise, prior=bayou.Normal(1.0), progress=False)

# %% [markdown]
# ## Three kinds of intervals
#
# The group of a row is whether it lies beyond |x| = 1.5.


# %%
def far(rows: torch.Tensor) -> list[bool]:
    return (rows[:, 0].abs() > 1.5).tolist()


all_rows = bayou.conformal(posterior, held, level=0.9, train=train)
by_group = bayou.conformal(posterior, held, level=0.9, groups=far(held[0]))
intervals = {
    "posterior alone": posterior.predict(new, seed=0).interval(0.9),
    "conformal": all_rows.interval(new),
    "conformal, by group": by_group.interval(new, groups=far(new)),
}
outside = torch.tensor(far(new))
print(f"{'coverage of':20s} {'all rows':>9} {'middle':>8} {'outside':>8}")
coverage = {}
for name, (low, high) in intervals.items():
    inside = ((low <= y_new) & (y_new <= high))[:, 0].float()
    coverage[name] = float(inside.mean())
    print(
        f"{name:20s} {inside.mean():9.1%} {inside[~outside].mean():8.1%} {inside[outside].mean():8.1%}"
    )

# %% [markdown]
# ## What one sees
#
# CQR widens every interval by the same amount: right on average, too wide in the middle and too narrow outside. With
# groups the guarantee holds on both sides, and the width follows the noise in two steps.

# %%
fig, axes = plt.subplots(
    1,
    3,
    figsize=(10.5, 3),
    sharey=True,
    layout="compressed",
    num="90 % intervals of a posterior, conformal ones, and by group",
)
order = new[:, 0].argsort()
for axis, (name, (low, high)) in zip(axes, intervals.items(), strict=True):
    axis.scatter(new[::5], y_new[::5], s=2, color="0.4", linewidths=0)
    axis.fill_between(
        new[order, 0], low[order, 0], high[order, 0], color="#3b5b92", alpha=0.25, linewidth=0
    )
    axis.set(title=f"{name}: {coverage[name]:.1%}", xlabel="x")
axes[0].set_ylabel("y")
plt.show()
