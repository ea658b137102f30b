# %% [markdown]
# # Letters to a network that knows only digits
#
# A network trained on digits has to call every letter a digit. The entropy of an averaged prediction tells the two
# apart; how well is the area under the ROC curve (AUROC): the probability that a letter has a higher entropy than a
# digit. Mutual information asks only whether the networks disagree.

# %%
import math

import matplotlib.pyplot as plt
import torch
from torch import nn

import bayou
from bayou import metrics
from bayou.data import load

data = load("digits-few")
digits, labels, letters = *data.test, data.ood

# %% [markdown]
# ## Three methods

# %%
torch.manual_seed(0)
net = nn.Sequential(nn.Flatten(), nn.Linear(64, 100), nn.ReLU(), nn.Linear(100, 10))
methods = {
    "MLE": bayou.MLE(steps=1500),
    "Ensemble": bayou.Ensemble(5, of=bayou.MAP(steps=400), parallel="vmap"),
    "Node flow": bayou.VI(bayou.NodeFlow(where="both"), steps=400),
}
entropies, away = {}, {}
for name, method in methods.items():
    posterior = bayou.fit(net, data.train, method, progress=False)
    p, q = posterior.predict(digits, seed=0), posterior.predict(letters, seed=0)
    entropies[name], away[name] = (p.entropy, q.entropy), q
    sure = (q.mean.amax(-1) > 0.9).float().mean()
    error, area = 1 - metrics.accuracy(p, labels), metrics.auroc(p.entropy, q.entropy)
    print(
        f"{name:9s} error {error:.2%}, AUROC {area:.3f}; {sure:.0%} of the letters are a digit with over 90 %"
    )

# %% [markdown]
# ## What one sees
#
# The plain network, trained for long on 179 digits, is certain of many letters. Averages over networks, or over noise
# on units, are less so. Below: the letters of which the plain network is most certain.

# %%
fig, axes = plt.subplots(
    1,
    3,
    figsize=(10.5, 2.8),
    sharey=True,
    layout="compressed",
    num="Histograms of the entropy of digits and letters for three methods",
)
for axis, (name, (inside, outside)) in zip(axes, entropies.items(), strict=True):
    for values, label, color in ((inside, "digits", "#3b5b92"), (outside, "letters", "#d9743c")):
        axis.hist(
            values,
            bins=24,
            range=(0, math.log(10)),
            density=True,
            alpha=0.6,
            label=label,
            color=color,
        )
    axis.set(title=name, xlabel="entropy, nats")
axes[0].set_ylabel("density")
axes[0].legend(frameon=False)
plt.show()

# %%
fig, axes = plt.subplots(
    1,
    8,
    figsize=(10, 1.7),
    layout="compressed",
    num="Eight letters and the digit that the plain network calls them",
)
surest = away["MLE"].mean.amax(-1).argsort(descending=True)[:8]
for axis, k in zip(axes, surest.tolist(), strict=True):
    said = away["MLE"].mean[k]
    axis.imshow(letters[k, 0], cmap="gray_r")
    axis.set(xticks=[], yticks=[], title=f"a {int(said.argmax())}: {said.max():.0%}")
plt.show()
