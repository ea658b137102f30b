# %% [markdown]
# # Calibration maps: which one, and whether any
#
# A temperature makes all predictions of a network less sure by one factor. If some classes are predicted too often, or
# the distribution of a number has the wrong shape, a map with more parameters does better, and with few rows worse.
# `map="auto"` decides by cross-validation.

# %%
import matplotlib.pyplot as plt
import torch
from torch import nn

import bayou
from bayou import metrics
from bayou.data import load

data = load("digits")
x, y = data.train[0].flatten(1), data.train[1]
rare = (y[:400] < 5) | (torch.arange(400) % 4 == 0)  # the classes 5 to 9 are rare in training
varies = x[:400][rare].std(0) > 0.1  # leave out pixels that are almost always empty
train = x[:400, varies][rare], y[:400][rare]
held = x[400:1000, varies], y[400:1000]
test = data.test[0].flatten(1)[:, varies], data.test[1]

# %% [markdown]
# ## Classes
#
# The network has seen few of the digits 5 to 9, and predicts them too rarely. A vector map has a factor and a shift for
# each class. The change on "fresh" rows is that of a map fitted to the other held-out rows.

# %%
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(int(varies.sum()), 64), nn.ReLU(), nn.Linear(64, 10))
posterior = bayou.fit(net, train, method=bayou.MLE(steps=300, lr=0.01), progress=False)
names = ("none", "temperature", "vector", "matrix", "dirichlet", "isotonic", "spline")
print("map          test NLL  classwise ECE  accuracy")
for name in names:
    bayou.calibrate(posterior, held, map=name)
    p = posterior.predict(test[0])
    error = metrics.classwise_ece(p, test[1], draws=20)
    print(
        f"{name:<12} {metrics.nll(p, test[1]):.3f}     {error.value:.4f}         {metrics.accuracy(p, test[1]):.3f}"
    )
print(bayou.calibrate(posterior, held, map="auto").describe())

# %% [markdown]
# ## Numbers
#
# The noise of this curve is skewed, and the likelihood is Gaussian. A temperature scales the noise; the map of quantiles
# also gives it the right shape. The levels P(Y ≤ y) of new rows are then uniform.

# %%
generator = torch.Generator().manual_seed(0)
inputs = torch.rand(1500, 1, generator=generator) * 6 - 3
noise = torch.empty(1500, 1).exponential_(generator=generator) - 1
targets = torch.sin(inputs) + 0.5 * noise
net = nn.Sequential(nn.Linear(1, 50), nn.SiLU(), nn.Linear(50, 1))
numbers = bayou.fit(
    net,
    (inputs[:300], targets[:300]),
    method=bayou.MAP(steps=500),
    likelihood=bayou.Gaussian(0.3, learn=True),
    progress=False,
)
held, new = (inputs[300:700], targets[300:700]), (inputs[700:], targets[700:])
fig, axes = plt.subplots(
    1,
    3,
    figsize=(9, 2.8),
    sharey=True,
    layout="compressed",
    num="Histograms of the levels of new rows without a map, with a temperature and with a map of quantiles",
)
for name, axis in zip(("none", "temperature", "auto"), axes, strict=True):
    result = bayou.calibrate(numbers, held, map=name)
    p = numbers.predict(new[0])
    histogram = metrics.pit_histogram(p, new[1])
    print(
        f"{result.map:<12} NLL {metrics.nll(p, new[1]):.3f}  90 % intervals cover {metrics.coverage(p, new[1]):.3f}, "
        f"score {metrics.interval_score(p, new[1]):.2f}  uniform: p = {histogram.p_value:.2g}"
    )
    axis.stairs(histogram.density, histogram.edges, fill=True, color="#3b5b92", alpha=0.7)
    axis.axhline(1, color="0.4", linestyle=":")
    axis.set(title=result.map, xlabel="level of y")
axes[0].set_ylabel("density")
plt.show()
