# %% [markdown]
# # Drift: forget what is no longer true
#
# A relation that changes slowly: the phase of a sine moves. A posterior that was fitted once becomes wrong without a
# sign of it. `posterior.update` learns each batch of new rows in milliseconds; it keeps all rows, so that it predicts a
# mean of old and new. `forget=0.7` multiplies the weight of all earlier rows by 0.7 with every batch (they count as
# about 67 rows then), and the uncertainty stays as wide as what is still known.

# %%
import math

import matplotlib.pyplot as plt
import torch
from torch import Tensor, nn

import bayou
from bayou import rng

NOISE, BATCH, BATCHES, FIXED = 0.2, 20, 60, 20  # the relation is fixed for the first 20 batches
WINDOW = 5  # batches in a running mean


def rows(batch: int) -> tuple[Tensor, Tensor]:
    """Return rows of a batch: y = sin(3·x + phase) + noise, whose phase moves."""
    like = torch.zeros(1).double()
    x = rng.uniform(BATCH, (1,), like, rng.fold(0, "x", batch)) * 4 - 2
    phase = 0.5 * math.pi * max(0, batch - FIXED) / (BATCHES - FIXED)
    return x, torch.sin(3 * x + phase) + NOISE * rng.normal(
        BATCH, (1,), like, rng.fold(0, "noise", batch)
    )


# %% [markdown]
# ## One fit
#
# To ten batches from before the drift: a network whose last layer is Gaussian. Its update with Gaussian noise is exact.

# %%
first = tuple(torch.cat(values) for values in zip(*(rows(-b - 1) for b in range(10)), strict=True))
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(1, 50), nn.Tanh(), nn.Linear(50, 50), nn.Tanh(), nn.Linear(50, 1))
method = bayou.Laplace(
    "full", where="last", start=bayou.MAP(steps=1000, lr=0.01), predictive="exact"
)
fitted = bayou.fit(
    net.double(),
    first,
    method,
    likelihood=bayou.Gaussian(NOISE),
    prior=bayou.Normal(1.0),
    progress=False,
)

# %% [markdown]
# ## Predict each batch, then learn it
#
# The scores are those of rows that were not learned yet.

# %%
rules = {
    "no update": None,
    "update": {"forget": None},
    "update, forget=0.7": {"forget": 0.7},
}
nll, coverage = {}, {}
for name, options in rules.items():
    posterior, scores, inside = fitted, [], []
    for batch in range(BATCHES):
        x, y = rows(batch)
        predictive = posterior.predict(x)
        low, high = predictive.interval(0.9)
        scores.append(-predictive.log_prob(y).mean())
        inside.append(((low <= y) & (y <= high)).double().mean())
        if options is not None:
            posterior = posterior.update((x, y), **options)
    nll[name], coverage[name] = torch.stack(scores), torch.stack(inside)
print(f"{'':20s} {'before the drift':>24s} {'the last 20 batches':>24s}")
for name in rules:
    numbers = [
        f"NLL {nll[name][part].mean():6.2f}, inside {coverage[name][part].mean():4.0%}"
        for part in (slice(0, FIXED), slice(-20, None))
    ]
    print(f"{name:20s} " + " ".join(f"{text:>24s}" for text in numbers))

# %%
fig, axes = plt.subplots(
    1,
    2,
    figsize=(8.5, 3),
    layout="compressed",
    num="Running NLL and coverage of 90 % intervals without updates, with them, and with forgetting",
)
for (name, color), axis_values in zip(
    zip(rules, ("0.5", "#d9743c", "#3b5b92"), strict=True),
    zip(nll.values(), coverage.values(), strict=True),
    strict=True,
):
    for axis, values in zip(axes, axis_values, strict=True):
        running = values.unfold(0, WINDOW, 1).mean(-1)
        axis.plot(range(WINDOW, BATCHES + 1), running, color=color, label=name)
for axis, label in zip(axes, ("NLL of the next rows", "in 90 % intervals"), strict=True):
    axis.axvline(FIXED, color="0.8", linewidth=1)
    axis.set(xlabel="batches of 20 rows", ylabel=label)
axes[0].set_yscale("symlog", linthresh=1)
axes[1].axhline(0.9, color="0.8", linewidth=1)
axes[0].legend(frameon=False)
plt.show()
