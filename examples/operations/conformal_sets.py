# %% [markdown]
# # Conformal sets: classes with a guarantee
#
# For classes the counterpart of an interval is a set of classes that contains the right one with a given probability.
# Easy rows get one class, hard ones two or three. LAC (Sadinle 2019) has the smallest sets, APS (Romano 2020) larger
# sets for harder rows.

# %%
import matplotlib.pyplot as plt
import torch
from torch import nn

import bayou
from bayou.data import load

data = load("digits")
x, y = data.train[0].flatten(1), data.train[1]
train, held, (new, y_new) = (
    (x[:150], y[:150]),
    (x[150:450], y[150:450]),
    (data.test[0].flatten(1), data.test[1]),
)
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(64, 50), nn.ReLU(), nn.Linear(50, 10))
posterior = bayou.fit(net, train, "ensemble", progress=False)

# %% [markdown]
# ## Two scores at two levels

# %%
print(f"{'score':6s} {'level':>6} {'coverage':>9} {'classes in a set':>17}")
sets = {}
for score in ("lac", "aps"):
    for level in (0.9, 0.99):
        c = bayou.conformal(posterior, held, level=level, score=score, train=train)
        chosen = c.set(new, empty=False)  # (rows, 10), True where a class is in the set
        sets[score, level] = chosen
        hit = chosen[torch.arange(len(new)), y_new].float().mean()
        print(f"{score:6s} {level:6.0%} {hit:9.1%} {chosen.sum(-1).float().mean():17.2f}")

# %% [markdown]
# ## The hardest rows
#
# Test digits with the largest sets of APS at 90 %, and the classes in them. The right class is printed below each
# digit.

# %%
chosen = sets["aps", 0.9]
hardest = chosen.sum(-1).argsort(descending=True)[:8]
fig, axes = plt.subplots(
    1, 8, figsize=(10, 2), layout="compressed", num="Eight digits with the largest sets of classes"
)
for axis, k in zip(axes, hardest.tolist(), strict=True):
    axis.imshow(new[k].reshape(8, 8), cmap="gray_r")
    members = ", ".join(map(str, chosen[k].nonzero().flatten().tolist()))
    axis.set(xticks=[], yticks=[], title=f"{{{members}}}", xlabel=f"a {int(y_new[k])}")
    axis.title.set_size(7.5)
plt.show()

# %%
fig, axis = plt.subplots(
    figsize=(6, 2.6),
    layout="compressed",
    num="Number of test rows by the size of their set, for four rules",
)
for k, ((score, level), chosen) in enumerate(sets.items()):
    sizes = chosen.sum(-1).bincount(minlength=8)[1:8]
    axis.bar(torch.arange(1, 8) + 0.2 * k - 0.3, sizes, 0.18, label=f"{score}, {level:.0%}")
axis.set(xlabel="classes in the set", ylabel="test rows")
axis.legend(frameon=False)
plt.show()
