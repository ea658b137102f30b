# %% [markdown]
# # A training loop of your own
#
# `bayou.bayesianize` turns a network into a module that holds a distribution over its weights; a draw of it carries its
# KL. The loss of a batch is −log-likelihood per row + KL(q ‖ p)/N. Nothing else changes in the loop. The KL is in nats
# and never rescaled: the one division by N is here, where the reader sees it.

# %%
import tempfile
from pathlib import Path

import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F
from torch import nn

import bayou
from bayou.data import load

data = load("moons")
(x, y), (x_test, y_test) = data.train, data.test


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(2, 50), nn.ReLU(), nn.Linear(50, 50), nn.ReLU(), nn.Linear(50, 2)
    )


# %% [markdown]
# ## Rules and loop
#
# Patterns of names select a family for each tensor; the first match wins.

# %%
rules = {"0.weight": bayou.MeanField(), "*.weight": bayou.MNF(), "*": bayou.Delta()}
bnn = bayou.bayesianize(network(), rules, prior=bayou.Normal(1.0), example=x[:2])
scales = [p for name, p in bnn.named_parameters() if name.endswith("log_std")]  # they start small
others = [p for name, p in bnn.named_parameters() if not name.endswith("log_std")]
optimizer = torch.optim.Adam([{"params": others, "lr": 5e-3}, {"params": scales, "lr": 5e-2}])
STEPS, history = 500, []
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
for _ in range(STEPS):
    batch = torch.randint(len(y), (128,))
    draw = bnn.draw()
    nll = F.cross_entropy(draw(x[batch]), y[batch])
    loss = nll + draw.kl / len(y)
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(bnn.parameters(), 10.0)  # whatever else a loop does
    optimizer.step()
    schedule.step()
    history.append((nll.item(), draw.kl.item() / len(y)))

# %% [markdown]
# ## A posterior like any other
#
# It predicts, has an ELBO, and is saved and loaded.

# %%
posterior = bnn.posterior(bayou.Categorical(), len(y))
p = posterior.predict(x_test, seed=0)
elbo = bayou.elbo(posterior, (x, y), samples=20, seed=0)
print(f"accuracy {bayou.metrics.accuracy(p, y_test):.1%}, ELBO {elbo.value:.1f} nats")
with tempfile.TemporaryDirectory() as folder:
    posterior.save(Path(folder) / "moons.bayou")
    again = bayou.load(Path(folder) / "moons.bayou", network()).predict(x_test, seed=0)
print(f"loaded from its file it predicts the same: {torch.equal(again.outputs, p.outputs)}")

# %%
fig, axes = plt.subplots(
    1,
    2,
    figsize=(9, 3.4),
    layout="compressed",
    num="Both parts of the loss over steps, and the entropy of the prediction on two moons",
)
for values, label, color in zip(
    zip(*history, strict=True), ("NLL of a batch", "KL/N"), ("#d9743c", "#3b5b92"), strict=True
):
    axes[0].plot(values, label=label, color=color, linewidth=0.8)
axes[0].set(xlabel="step", ylabel="nats per row", ylim=(0, 1.2))
axes[0].legend(frameon=False)
line = torch.linspace(-4, 4, 60)
entropy = posterior.predict(torch.cartesian_prod(line, line), seed=0).entropy.reshape(60, 60)
shown = axes[1].contourf(line, line, entropy.T, levels=14, cmap="BuPu")
axes[1].scatter(*x.T, c=["#d9743c" if label else "black" for label in y], s=4, linewidths=0)
axes[1].set(xlabel="input 1", ylabel="input 2")
fig.colorbar(shown, label="entropy, nats")
plt.show()
