# %% [markdown]
# # Active learning: which rows to label next
#
# A pool of 500 digits without labels, and a person who labels ten at a time. BatchBALD (Kirsch 2019) asks for the rows
# whose labels together say most about the weights: two rows that are alike are not both chosen. Random rows are the
# baseline. The posterior is MC dropout (Gal 2017), and the network is fitted anew in every round.

# %%
import matplotlib.pyplot as plt
import torch
from torch import nn

import bayou
from bayou import rng
from bayou.data import load

data = load("digits")
x, y = data.train[0][:500].flatten(1), data.train[1][:500]
x_test, y_test = data.test[0].flatten(1), data.test[1]
method = bayou.MCDropout(bayou.MAP(steps=120, lr=3e-3))

# %% [markdown]
# ## The loop
#
# Label, fit, choose. Both runs start with the same twenty rows.

# %%
curves, asked_first = {}, {}
for score in ("random", "batchbald"):
    known = torch.zeros(len(y), dtype=torch.bool)
    known[rng.permutation(len(y), 0)[:20]] = True
    curve = []
    while True:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Dropout(0.5), nn.Linear(128, 10))
        posterior = bayou.fit(
            net, (x[known], y[known]), method, prior=bayou.Normal(1.0), progress=False
        )
        curve.append(bayou.metrics.accuracy(posterior.predict(x_test, 32, seed=0), y_test))
        if known.sum() >= 100:
            break
        pool = (~known).nonzero().flatten()
        chosen = bayou.acquire(posterior, x[pool], 10, score, samples=32, seed=int(known.sum()))
        asked_first.setdefault(score, pool[chosen.indices])
        known[pool[chosen.indices]] = True  # and here a person says what they are
    curves[score] = curve
    print(f"{score:10s} {curve[0]:.1%} with 20 labels, {curve[-1]:.1%} with {int(known.sum())}")

# %% [markdown]
# ## What one sees
#
# Up to fifty labels neither is always ahead; then BatchBALD gains, since random rows are mostly easy ones. On the
# right: the ten digits that it asked for first.

# %%
fig = plt.figure(
    figsize=(8, 3.4),
    layout="compressed",
    num="Test accuracy over labels for random rows and BatchBALD, and ten chosen digits",
)
left, right = fig.subfigures(1, 2, width_ratios=(1.4, 1))
axis = left.subplots()
for (score, curve), color in zip(curves.items(), ("0.5", "#3b5b92"), strict=True):
    axis.plot(
        [20 + 10 * k for k in range(len(curve))],
        [100 * value for value in curve],
        ".-",
        color=color,
        label=score,
    )
axis.set(xlabel="labels", ylabel="test accuracy, %")
axis.legend(frameon=False)
for axis, image in zip(right.subplots(2, 5).flat, x[asked_first["batchbald"]], strict=True):
    axis.imshow(image.reshape(8, 8), cmap="gray_r")
    axis.axis("off")
right.suptitle("asked for first", fontsize=10)
plt.show()
