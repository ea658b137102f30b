# %% [markdown]
# # Monitoring: have inputs shifted, or has the relation changed?
#
# A model was fitted in spring. Each later month has new rows with their targets, and `bayou.diagnostics.watch`
# compares them with the training rows and with rows that were held out. In June one input is shifted, in July the noise
# doubles, in August a slope is another one. The probability of any false alarm is at most 1 % a month.

# %%
import matplotlib.pyplot as plt
import torch
from torch import nn

import bayou
from bayou.diagnostics import ReferenceRows, ShiftMartingale, watch

torch.manual_seed(0)
NAMES = ("price", "weekday", "stock", "rain")


def rows(count, shift=0.0, noise=0.3, slope=1.0):
    x = torch.randn(count, 4)
    x[:, 3] += shift
    y = slope * x[:, 0] - 0.5 * x[:, 2] + 0.3 * torch.sin(2 * x[:, 3])
    return x, (y + noise * torch.randn(count))[:, None]


train, held = rows(800), rows(300)
net = nn.Sequential(nn.Linear(4, 50), nn.Tanh(), nn.Linear(50, 1))
noise = bayou.Gaussian(0.3, learn=True)
method = bayou.Laplace(start=bayou.MAP(steps=1000, lr=0.01))
posterior = bayou.fit(net, train, method, likelihood=noise, progress=False)

# %% [markdown]
# ## One verdict for each month
#
# `ReferenceRows` keeps a sample of the training rows and of the held-out rows. Inputs are tested column by column and
# jointly. Targets are compared with held-out rows that have similar inputs: the shifted input of June alone is not taken
# for a changed relation.

# %%
reference = ReferenceRows.of(train[0], held, names=NAMES)
months = {
    "May": rows(300),
    "June": rows(300, shift=0.7),
    "July": rows(300, noise=0.6),
    "August": rows(300, slope=0.7),
}
for month, (x, y) in months.items():
    report = watch(posterior, reference, x, y)
    print(f"{month:7s} {report.verdict}")
    for test in report.significant:
        if test.family != "calibration":
            print(f"        {test.subject} ({test.name}): p = {test.adjusted_p:.1g}")

# %% [markdown]
# ## A stream of rows
#
# A test that is repeated every day raises a false alarm some day. The capital of a martingale may be read after every
# row: if nothing changes, it ever exceeds K/α with a probability of at most α, with K martingales in all. Here the noise
# grows after 150 rows.

# %%
x, y = (torch.cat(parts) for parts in zip(rows(150), rows(150, noise=0.6), strict=True))
stream = ShiftMartingale.start(posterior, reference)
capital = {name: [1.0] for name in stream.streams}
for start in range(0, 300, 10):
    stream = stream.update(posterior, x[start : start + 10], y[start : start + 10])
    for name, values in capital.items():
        values.append(stream.streams[name].bets.log_capital / 2.303)
    if stream.verdict != "as expected":
        print(f"after {stream.rows} rows: {stream.verdict}, by {', '.join(stream.significant)}")
        break

# %%
fig, (left, right) = plt.subplots(
    1,
    2,
    figsize=(9, 3),
    layout="compressed",
    num="P(Y ≤ y) of held-out rows and of each month, and the capital of the martingales",
)
for month, (x_new, y_new) in {"held out": held, **months}.items():
    pit = posterior.predict(x_new, seed=0).cdf(y_new)[:, 0]
    left.plot(pit.sort().values, torch.linspace(0, 1, len(pit)), label=month)
left.set(xlabel="P(Y ≤ y)", ylabel="fraction of rows")
left.legend(frameon=False)
for name, values in capital.items():
    is_found = name in stream.significant
    right.plot(
        range(0, 10 * len(values), 10),
        [0.0, *values[1:]],
        color="C3" if is_found else "0.7",
        label=name if is_found else None,
    )
threshold = torch.tensor(stream.threshold).log10()
right.axhline(threshold, color="k", linestyle=":", linewidth=1)
right.axvline(150, color="k", linewidth=0.5)
right.set(xlabel="rows", ylabel="log10 of the capital")
right.legend(frameon=False, loc="center left")
plt.show()
