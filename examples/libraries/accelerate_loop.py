# %% [markdown]
# # accelerate: the loop stays as it is
#
# A training loop of Hugging Face accelerate with a posterior: the loss has KL/N, and the end is a posterior.
# `accelerator.accumulate` makes one step of two batches; `accelerate launch` runs the same file on several devices.

# %%
import tempfile

import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import bayou

torch.manual_seed(0)
y = torch.arange(300) % 3
x = torch.tensor([[0.0, 3.0], [-3.0, -2.0], [3.0, -2.0]])[y] + torch.randn(300, 2)
loader = DataLoader(TensorDataset(x, y), 25, shuffle=True)


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 32), nn.ReLU(), nn.Linear(32, 3))


# %% [markdown]
# ## The loop

# %%
accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
bnn = bayou.bayesianize(network(), bayou.MNF(), prior=bayou.Normal("fan_in"), example=x[:2])
optimizer = torch.optim.Adam(bnn.parameters(), 1e-2)
model, optimizer, loader = accelerator.prepare(bnn, optimizer, loader)
history = []
for _ in range(20):
    for inputs, labels in loader:
        with accelerator.accumulate(model):
            logits, kl = model(inputs)  # forward of one draw, which DistributedDataParallel wraps
            nll = F.cross_entropy(logits, labels)
            accelerator.backward(nll + kl / len(y))
            optimizer.step()
            optimizer.zero_grad()
        history.append((nll.item(), kl.item() / len(y)))

# %% [markdown]
# ## The posterior

# %%
posterior = accelerator.unwrap_model(model).posterior(bayou.Categorical(), len(y))
with tempfile.TemporaryDirectory() as folder:
    posterior.save(f"{folder}/blobs.bayou")
    posterior = bayou.load(f"{folder}/blobs.bayou", network())
p, away = posterior.predict(x, seed=0), posterior.predict(torch.tensor([[0.0, -30.0]]), seed=0)
print(
    f"accuracy {bayou.metrics.accuracy(p, y):.1%}, mutual information {p.mutual_information.mean():.3f} nats"
)
print(f"far away, between two classes: {away.mutual_information.item():.3f} nats")

# %%
ticks = torch.linspace(-12, 12, 60)
plane = posterior.predict(torch.cartesian_prod(ticks, ticks), seed=0).mutual_information.reshape(
    60, 60
)
fig, axes = plt.subplots(
    1,
    2,
    figsize=(8.5, 3.2),
    layout="compressed",
    num="Both parts of the loss over batches, and mutual information around three clusters",
)
for values, label, color in zip(
    zip(*history, strict=True), ("NLL", "KL/N"), ("#d9743c", "#3b5b92"), strict=True
):
    axes[0].plot(values, label=label, color=color, linewidth=0.8)
axes[0].set(xlabel="batch", ylabel="nats per row")
axes[0].legend(frameon=False)
shown = axes[1].contourf(ticks, ticks, plane.T, levels=12, cmap="BuPu")
axes[1].scatter(*x.T, c=[("#d9743c", "black", "#4a8c5c")[k] for k in y.tolist()], s=4, linewidths=0)
axes[1].set(xlabel="input 1", ylabel="input 2")
fig.colorbar(shown, label="mutual information, nats")
plt.show()
