# %% [markdown]
# # Digits, and which of them a network is unsure of
#
# A posterior averages over networks, p(y | x) = 1/S Σ_s softmax(f(x; w_s)). Its `entropy` is all of the uncertainty,
# `mutual_information` the part on which the networks disagree. Both rank the rows that a person should look at.

# %%
import matplotlib.pyplot as plt
import torch
from torch import nn

import bayou
from bayou import metrics
from bayou.data import load

data = load("digits")
x, y = data.test
print(data)

# %% [markdown]
# ## A plain network and two posteriors
#
# The same network, trained for the same number of steps; Laplace makes its last layer random.

# %%
torch.manual_seed(0)
net = nn.Sequential(nn.Flatten(), nn.Linear(64, 100), nn.ReLU(), nn.Linear(100, 10))
methods = {
    "MAP": bayou.MAP(steps=400),
    "Ensemble": bayou.Ensemble(5, of=bayou.MAP(steps=400), parallel="vmap"),
    "Laplace": bayou.Laplace(where="last", start=bayou.MAP(steps=400)),
}
predictions = {}
print(f"{'method':<13} {'error':>7} {'NLL':>7} {'ECE':>7}")
for name, method in methods.items():
    p = bayou.fit(net, data.train, method, progress=False).predict(x, seed=0)
    print(
        f"{name:<13} {1 - metrics.accuracy(p, y):7.2%} {metrics.nll(p, y):7.4f} {metrics.ece(p, y):7.4f}"
    )
    predictions[name] = p

# %% [markdown]
# ## Leave out the hard ones
#
# If a person looks at the rows with the largest entropy, how many of the others are wrong?

# %%
fig, axis = plt.subplots(
    figsize=(6, 3),
    layout="compressed",
    num="Error of the rows that are kept, over the share of rows that are rejected",
)
for (name, p), color in zip(predictions.items(), ("0.5", "#d9743c", "#3b5b92"), strict=True):
    wrong = (p.mean.argmax(-1) != y).float()[p.entropy.argsort()]
    kept = wrong.cumsum(0) / torch.arange(1, len(y) + 1)
    axis.plot(100 * (1 - torch.arange(1, len(y) + 1) / len(y)), 100 * kept, color=color, label=name)
axis.set(xlabel="rejected, % of rows", ylabel="error of the rest, %", xlim=(0, 40), ylim=(0, None))
axis.legend(frameon=False)
plt.show()

# %% [markdown]
# ## The digits with the largest entropy
#
# Orange is the right class.

# %%
p = predictions["Ensemble"]
order = p.entropy.argsort(descending=True)[:8]
fig, axes = plt.subplots(
    2,
    8,
    figsize=(10, 2.6),
    layout="compressed",
    num="Eight digits of large entropy and the probabilities of their classes",
)
for (above, below), k in zip(axes.T, order.tolist(), strict=True):
    above.imshow(x[k, 0], cmap="gray_r")
    above.set(title=f"a {int(y[k])}", xticks=[], yticks=[])
    below.bar(
        range(10), p.mean[k], color=["#d9743c" if c == y[k] else "#3b5b92" for c in range(10)]
    )
    below.set(ylim=(0, 1), xticks=range(0, 10, 3), yticks=[])
plt.show()
