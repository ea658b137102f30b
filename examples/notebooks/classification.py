# %% [markdown]
# # A Bayesian classifier in five cells
#
# Two interleaved half moons, a small network, and a posterior over its weights. Run the cells one by one in an editor
# that knows the percent format (VS Code, PyCharm, Spyder, Jupyter with jupytext), or the whole file with Python.

# %%
import os

import torch
from matplotlib.figure import Figure
from torch import nn

import bayou
from bayou.data import load

STEPS = int(os.environ.get("BAYOU_EXAMPLE_STEPS", "2000"))  # the tests take fewer

# %% [markdown]
# ## Data and network
# Plain tensors and a plain `nn.Module`: nothing in them is Bayesian.

# %%
data = load("moons")
x, y = data.train
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(2, 50), nn.ReLU(), nn.Linear(50, 50), nn.ReLU(), nn.Linear(50, 2))
print(data)

# %% [markdown]
# ## The posterior
# `VI(MNF())` fits a multiplicative normalizing flow to p(w | data) by maximizing the evidence lower bound. The history
# holds the log-likelihood and the KL apart, in nats.

# %%
posterior = bayou.fit(net, (x, y), method=bayou.VI(bayou.MNF(), steps=STEPS, lr=3e-3), seed=0)
for record in posterior.history[:: max(1, len(posterior.history) // 5)]:
    print("step {step:5.0f}   log-likelihood {log_likelihood:8.1f}   KL {kl:8.1f}".format(**record))

# %% [markdown]
# ## What it says
# A prediction averages over functions drawn from the posterior. Entropy is all of the doubt; mutual information is the
# part on which the functions disagree, and which more data would take away.

# %%
p = posterior.predict(data.test[0], samples=100, seed=0)
accuracy = float((p.mean.argmax(-1) == data.test[1]).float().mean())
print(f"accuracy {accuracy:.1%}, negative log-likelihood {-float(p.log_prob(data.test[1]).mean()):.3f}")

line = torch.linspace(-4, 4, 80)
grid = posterior.predict(torch.cartesian_prod(line, line), samples=100, seed=0)
figure = Figure(figsize=(9, 3.8), layout="compressed")
for axis, name in zip(figure.subplots(1, 2), ("entropy", "mutual_information"), strict=True):
    shown = axis.contourf(line, line, getattr(grid, name).reshape(80, 80).mT, levels=20, cmap="magma")
    axis.scatter(*x.T, c=["#7fb2e5" if label else "#f6a97a" for label in y], s=5, linewidths=0)
    axis.set_title(name.replace("_", " "))
    figure.colorbar(shown)
figure  # noqa: B018  (a notebook shows it)

# %% [markdown]
# ## How tight is the bound?
# MNF has no closed-form entropy, so training uses a bound of the KL. The gap is measured, not assumed.

# %%
print(bayou.diagnostics.bound_gap(posterior, draws=50, samples=50, seed=0))
