# %% [markdown]
# # Unusual inputs: ten scores and one p-value
#
# An ensemble learns small digits and meets letters, digits upside down and stripes. `bayou.ood.fit` fits scores of
# predictions and of features in one pass over the training rows; the held-out rows turn each score, and all of them
# together, into a p-value.

# %%
import matplotlib.pyplot as plt
import torch
from torch import nn

import bayou
from bayou.data import load

data = load("digits")
order = bayou.rng.permutation(len(data.train[0]), 0)
x, y = (item[order] for item in data.train)
train, held = (x[:900], y[:900]), (x[900:], y[900:])
test = data.test[0]
torch.manual_seed(0)
stripes = (torch.arange(8) % 2).expand(200, 1, 8, 8) * test.max() * (0.5 + torch.rand(200, 1, 1, 1))
far = {"letters": data.ood, "upside down": test.flip(2), "stripes": stripes}

net = nn.Sequential(
    nn.Conv2d(1, 16, 3), nn.ReLU(), nn.Conv2d(16, 32, 3), nn.ReLU(), nn.MaxPool2d(2),
    nn.Flatten(), nn.Linear(128, 50), nn.ReLU(), nn.Linear(50, 10),
)  # fmt: skip
method = bayou.Ensemble(3, bayou.MAP(epochs=20, lr=0.005))
posterior = bayou.fit(net, train, method, seed=0, progress=False)

# %% [markdown]
# ## One pass over the training rows

# %%
detector = bayou.ood.fit(posterior, train, held_out=held)
inside = detector.score(test)
outside = {name: detector.score(rows) for name, rows in far.items()}

print(f"{'AUROC':24s}" + "".join(f"{name:>13s}" for name in far))
for score in detector.names:
    values = [
        bayou.metrics.auroc(inside.scores[score], rows.scores[score]) for rows in outside.values()
    ]
    print(f"{score:24s}" + "".join(f"{value:13.3f}" for value in values))
values = [bayou.metrics.auroc(-inside.p_value, -rows.p_value) for rows in outside.values()]
print(f"{'all (Fisher)':24s}" + "".join(f"{value:13.3f}" for value in values))

# %% [markdown]
# ## What a p-value means
#
# Of test digits a fraction u has a p-value of u at most, whatever the scores are and however much they depend on each
# other: the combination is ranked among the held-out rows like a single score.

# %%
for level in (0.01, 0.05, 0.1):
    parts = [
        f"{float(rows.is_unusual(level).float().mean()):6.1%} of {name}"
        for name, rows in outside.items()
    ]
    print(
        f"p ≤ {level:4.2f}: {float(inside.is_unusual(level).float().mean()):5.1%} of test digits, "
        + ", ".join(parts)
    )

# %%
fig, axes = plt.subplots(
    1, 2, figsize=(9, 3), layout="compressed",
    num="P-values of test digits, which are uniform, and of letters, which are small",
)  # fmt: skip
bins = torch.linspace(0, 1, 21)
for axis, (name, rows) in zip(
    axes, {"test digits": inside, "letters": outside["letters"]}.items(), strict=True
):
    axis.hist(rows.p_value, bins, density=True, color="tab:blue", alpha=0.7)
    axis.axhline(1, color="gray", lw=1)
    axis.set(title=name, xlabel="p-value")
plt.show()

# %% [markdown]
# ## The least usual test digits

# %%
order = inside.p_value.argsort()[:8]
fig, axes = plt.subplots(
    1, 8, figsize=(10, 1.7), layout="compressed", num="Eight test digits with the smallest p-values"
)
for axis, k in zip(axes, order.tolist(), strict=True):
    axis.imshow(test[k, 0], cmap="gray_r")
    axis.set(
        xticks=[],
        yticks=[],
        title=f"p = {float(inside.p_value[k]):.3f}",
        xlabel=f"a {int(data.test[1][k])}",
    )
    axis.title.set_size(8)
plt.show()
