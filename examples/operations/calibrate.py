# %% [markdown]
# # Calibration: as sure as it is right
#
# A network that was trained to the end is too sure of its predictions. One number, a temperature fitted to held-out
# rows, repairs most of that (Guo 2017).

# %%
import matplotlib.pyplot as plt
import torch
from torch import nn

import bayou
from bayou import metrics
from bayou.data import load

data = load("digits")
x, y = data.train[0].flatten(1), data.train[1]
train, held, test = (
    (x[:200], y[:200]),
    (x[200:500], y[200:500]),
    (data.test[0].flatten(1), data.test[1]),
)

# %% [markdown]
# ## Fit, then calibrate
#
# `train=` makes sure that no training row is among the held-out ones. The temperature belongs to the posterior:
# `predict` applies it, and `save` stores it.

# %%
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
posterior = bayou.fit(net, train, method=bayou.MLE(steps=1000, lr=0.01), progress=False)
before = posterior.predict(test[0], seed=0)
found = bayou.calibrate(posterior, held, train=train)
after = posterior.predict(test[0], seed=0)
print(f"temperature {found.temperature:.2f}")
print(f"NLL of held-out rows: {found.before:.3f} before, {found.after:.3f} after")
print(
    f"NLL of test rows:     {metrics.nll(before, test[1]):.3f} before, {metrics.nll(after, test[1]):.3f} after"
)

# %% [markdown]
# ## What one sees
#
# Rows are divided into six groups by their confidence. Before, predictions with a confidence near 1 are right less
# often than that. Afterwards the points lie close to the diagonal. The predicted classes are the same: a temperature
# changes confidence, never the order of the classes.

# %%
fig, axes = plt.subplots(
    1,
    2,
    figsize=(8, 3.2),
    layout="compressed",
    num="Accuracy over confidence, and confidences, before and after calibration",
)
for (name, p), color in zip(
    (("before", before), ("after", after)), ("#d9743c", "#3b5b92"), strict=True
):
    sure, right = p.mean.max(-1).values, (p.mean.argmax(-1) == test[1]).float()
    groups = sure.argsort().tensor_split(6)
    axes[0].plot(
        [sure[k].mean() for k in groups],
        [right[k].mean() for k in groups],
        "o-",
        color=color,
        label=name,
    )
    axes[1].hist(sure, bins=25, range=(0.2, 1), color=color, alpha=0.6, label=name)
axes[0].plot([0.2, 1], [0.2, 1], color="0.6", linestyle=":")
axes[0].set(xlabel="confidence", ylabel="accuracy")
axes[1].set(xlabel="confidence", ylabel="test rows")
axes[0].legend(frameon=False)
plt.show()
