# %% [markdown]
# # Continual learning: yesterday's posterior is today's prior
#
# Three tasks one after another: the same digits with their pixels in another order each time. Fine-tuning overwrites
# the weights that served the first order. With the posterior of one task as the prior of the next, weights that the
# first task determined stay, and the others learn (VCL, Nguyen 2018; online Laplace, Ritter 2018).

# %%
import warnings

import matplotlib.pyplot as plt
import torch
from torch import nn

import bayou
from bayou import rng
from bayou.data import load

# Draws of the Laplace approximation are worse than its mode here; what counts is its use as a prior.
warnings.simplefilter("ignore", bayou.methods.WorseThanModeWarning)
EPOCHS, TASKS, PRIOR = 25, 3, bayou.Normal(1.0)
data = load("digits")
orders = [torch.arange(64), *(rng.permutation(64, task) for task in range(1, TASKS))]
(x, y), (x_test, y_test) = ((x.flatten(1), y) for x, y in (data.train, data.test))
train, test = [(x[:, order], y) for order in orders], [x_test[:, order] for order in orders]


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 100), nn.ReLU(), nn.Linear(100, 10))


def accuracies(predictors) -> list[float]:
    """Of each task so far."""
    said = [f(inputs).argmax(-1) for f, inputs in zip(predictors, test, strict=False)]
    return [float((one == y_test).float().mean()) for one in said]


# %% [markdown]
# ## Fine-tuning
#
# The next task starts where the last one ended.

# %%
point = bayou.MAP(epochs=EPOCHS, lr=3e-3)
net, curves = network(), {"fine-tuning": []}
for task, rows in enumerate(train):
    net = bayou.fit(net, rows, point, prior=PRIOR, progress=False).to_module()
    curves["fine-tuning"].append(accuracies([net] * (task + 1)))

# %% [markdown]
# ## VCL and online Laplace
#
# `after(t)` has the posteriors for tasks 0 .. t as they were after task t.

# %%
methods = {
    "VCL": bayou.VI(bayou.MeanField(1e-3), epochs=EPOCHS, lr=3e-3, start="network"),
    "online Laplace": bayou.Laplace("kronecker", start=point),
}
for name, method in methods.items():
    done = bayou.continual(network(), train, method, prior=PRIOR, progress=False)
    curves[name] = [
        accuracies([lambda rows, q=q: q.predict(rows, 30, seed=0).mean for q in done.after(task)])
        for task in range(TASKS)
    ]
print(
    f"{'accuracy at the end':20s}" + "".join(f"  task {task}" for task in range(TASKS)) + "    mean"
)
for name, curve in curves.items():
    last = curve[-1]
    print(f"{name:20s}" + "".join(f"  {value:6.1%}" for value in [*last, sum(last) / len(last)]))

# %%
fig, axes = plt.subplots(
    1,
    2,
    figsize=(8.5, 3),
    layout="compressed",
    num="Mean accuracy over tasks, and accuracy of the first task, for three methods",
)
for (name, curve), color in zip(curves.items(), ("0.5", "#3b5b92", "#d9743c"), strict=True):
    axes[0].plot(
        range(1, TASKS + 1),
        [100 * sum(now) / len(now) for now in curve],
        "o-",
        color=color,
        label=name,
    )
    axes[1].plot(range(1, TASKS + 1), [100 * now[0] for now in curve], "o-", color=color)
axes[0].set(
    xlabel="tasks learned",
    ylabel="mean accuracy, %",
    xticks=range(1, TASKS + 1),
    title="all tasks so far",
)
axes[1].set(
    xlabel="tasks learned", ylabel="accuracy, %", xticks=range(1, TASKS + 1), title="the first task"
)
axes[0].legend(frameon=False)
plt.show()
