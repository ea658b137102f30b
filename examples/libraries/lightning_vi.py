# %% [markdown]
# # Lightning: a posterior from a Trainer
#
# A module around `bayesianize` trains a variational posterior: the loss is −log p(y | x, w) + KL/N of a draw w.
# Or keep your own module and give it IVON as its optimizer: Lightning passes a closure to `optimizer.step`, which
# `IVONOptimizer` calls at a draw of the weights, and nothing else changes.

# %%
import logging
import warnings

import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule, Trainer
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import bayou
from bayou.methods import IVONOptimizer
from bayou.methods.vi import parameter_groups

warnings.simplefilter("ignore")  # of Lightning, about the number of workers
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
torch.manual_seed(0)
y = torch.arange(300) % 3
x = torch.tensor([[0.0, 1.5], [-1.5, -1.0], [1.5, -1.0]])[y] + 0.7 * torch.randn(300, 2)
loader = DataLoader(TensorDataset(x, y), 50, shuffle=True)
EPOCHS = 40


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 32), nn.ReLU(), nn.Linear(32, 3))


def trainer() -> Trainer:
    quiet = {"logger": False, "enable_checkpointing": False, "enable_model_summary": False}
    return Trainer(max_epochs=EPOCHS, accelerator="cpu", enable_progress_bar=False, **quiet)


# %% [markdown]
# ## Variational inference in a module


# %%
class Variational(LightningModule):
    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.bnn = bayou.bayesianize(net, bayou.MeanField(), example=x[:2])

    def training_step(self, batch, index):
        logits, kl = self.bnn(batch[0])
        return F.cross_entropy(logits, batch[1]) + kl / len(y)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(
            parameter_groups(self.bnn, lr=1e-2, scale_lr=1e-1)
        )  # log-stds learn faster


vi = Variational(network())
trainer().fit(vi, loader)

# %% [markdown]
# ## A plain module with another optimizer


# %%
class Classifier(LightningModule):
    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def training_step(self, batch, index):
        return F.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> IVONOptimizer:
        return IVONOptimizer(
            self.net.parameters(), lr=0.1, n=len(y), beta2=1 - 1 / (EPOCHS * len(loader))
        )


ivon = Classifier(network())
trainer().fit(ivon, loader)
optimizer = ivon.optimizers(use_pl_optimizer=False)
likelihood = bayou.Categorical()
posteriors = {
    "VI": vi.bnn.posterior(likelihood, len(y)),
    "IVON": optimizer.posterior(ivon.net, likelihood),
}

# %%
ticks = torch.linspace(-5, 5, 60)
fig, axes = plt.subplots(
    1,
    2,
    figsize=(8.5, 3.2),
    layout="compressed",
    num="Entropy of two posteriors that Lightning trained on clusters",
)
for axis, (name, posterior) in zip(axes, posteriors.items(), strict=True):
    p = posterior.predict(x, 50, seed=0)
    print(
        f"{name:5s} accuracy {bayou.metrics.accuracy(p, y):.1%}, NLL {bayou.metrics.nll(p, y):.3f}"
    )
    entropy = posterior.predict(torch.cartesian_prod(ticks, ticks), 50, seed=0).entropy.reshape(
        60, 60
    )
    shown = axis.contourf(ticks, ticks, entropy.T, levels=torch.linspace(0, 1.1, 12), cmap="BuPu")
    axis.scatter(
        *x.T, c=[("#d9743c", "black", "#4a8c5c")[k] for k in y.tolist()], s=5, linewidths=0
    )
    axis.set(title=name, xlabel="input 1", ylabel="input 2")
fig.colorbar(shown, ax=axes[1], label="entropy, nats")
plt.show()
