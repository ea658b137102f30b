# %% [markdown]
# # A trained network, made Bayesian afterwards
#
# Two methods that need only the weights and some rows, each with `start=None`, "the network as it is". Laplace of the
# last layer puts a Gaussian around the trained weights. MC dropout leaves the dropout on that the network was trained
# with. No weight of the network changes.

# %%
import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F
from torch import nn

import bayou
from bayou import metrics
from bayou.data import load

data = load("digits-few")  # 179 rows to learn from
(x, y), letters = data.test, data.ood
unseen = torch.arange(len(data.train[1])) % 5 == 0
seen, held = (tuple(part[rows] for part in data.train) for rows in (~unseen, unseen))

# %% [markdown]
# ## A network from elsewhere
#
# Trained by a plain loop that knows nothing of bayou. It has few rows, and is too sure of itself afterwards: its
# predictions of new digits have a high negative log-likelihood (NLL), and letters, which it never saw, have a low
# entropy.

# %%
torch.manual_seed(0)
net = nn.Sequential(
    *(nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2)),
    *(
        nn.Flatten(),
        nn.Dropout(0.2),
        nn.Linear(256, 64),
        nn.ReLU(),
        nn.Dropout(0.2),
        nn.Linear(64, 10),
    ),
)
optimizer = torch.optim.Adam(net.parameters(), 2e-3)
for _ in range(1000):
    batch = torch.randint(len(seen[1]), (64,))
    optimizer.zero_grad()
    F.cross_entropy(net(seen[0][batch]), seen[1][batch]).backward()
    optimizer.step()
net.eval()

# %% [markdown]
# ## Two posteriors
#
# The width of a Laplace posterior depends on the prior, which the network came without. Rows that it never saw select
# it; rows that it was trained on would prefer the narrowest.

# %%
laplace = bayou.Laplace(start=None, where="last", structure="full")
tried = {}
for std in (0.03, 0.06, 0.1, 0.15):
    posterior = bayou.fit(net, seen, laplace, prior=bayou.Normal(std), progress=False)
    tried[std] = metrics.nll(posterior.predict(held[0], 50, seed=0), held[1]), posterior
best = min(tried, key=lambda std: tried[std][0])
print(
    "NLL of unseen rows by prior:",
    ", ".join(f"{std}: {nll:.4f}" for std, (nll, _) in tried.items()),
)
posteriors = {
    f"Laplace, N(0, {best}²)": tried[best][1],
    "dropout": bayou.fit(net, seen, bayou.MCDropout(start=None), progress=False),
}


def plain(images: torch.Tensor) -> bayou.Predictive:
    """The prediction of the network as it was."""
    with torch.no_grad():
        return bayou.Predictive(bayou.Categorical().bind(), net(images).unsqueeze(0))


found = {"as it was": (plain(x), plain(letters))}
found |= {
    name: (q.predict(x, 50, seed=0), q.predict(letters, 50, seed=0))
    for name, q in posteriors.items()
}
print(f"\n{'network':<20} {'error':>7} {'NLL':>7} {'AUROC of letters':>17}")
for name, (p, q) in found.items():
    row = metrics.summary(p, y, q)
    print(f"{name:<20} {1 - row['accuracy']:7.2%} {row['nll']:7.4f} {row['auroc_entropy']:17.3f}")

# %% [markdown]
# ## What has changed
#
# The network is right as often as before, and less sure where it is wrong: both posteriors lower the NLL of new digits,
# and both are less sure of letters (a curve further to the right has more entropy).

# %%
fig, axis = plt.subplots(
    figsize=(7.2, 2.4),
    layout="compressed",
    num="Distribution of the entropy of letters for the network and two posteriors",
)
for (name, (_, away)), color in zip(found.items(), ("0.5", "#3b5b92", "#d9743c"), strict=True):
    axis.ecdf(away.entropy.numpy(), label=name, color=color)
axis.set(xlabel="entropy of letters, nats", ylabel="fraction below")
axis.legend(frameon=False)
plt.show()
