# %% [markdown]
# # Export: one graph for a server
#
# A posterior becomes a single program that takes rows and returns mean, standard deviation and mutual information, with
# its draws inside: `torch.export` here, ONNX by `export_onnx`. It needs neither bayou nor Python code of yours to run.

# %%
import logging
import tempfile
import warnings
from pathlib import Path

import matplotlib.pyplot as plt
import torch
from torch import nn

import bayou
from bayou.operations.export import export

warnings.simplefilter("ignore", FutureWarning)  # of torch, about its own formats
logging.getLogger("torch._export").setLevel(logging.ERROR)
torch.manual_seed(0)
x = torch.cat([torch.rand(30, 1) * 1.2 - 2, torch.rand(30, 1) * 1.2 + 0.6])
y = torch.sin(2 * x) + 0.1 * torch.randn(60, 1)
net = nn.Sequential(nn.Linear(1, 50), nn.Tanh(), nn.Linear(50, 1))
posterior = bayou.fit(net, (x, y), "ensemble", progress=False)

# %% [markdown]
# ## Write and read
#
# The number of rows is free. The file holds tensors and a graph.

# %%
program = export(posterior, x[:2], answers=("mean", "std", "epistemic_std"))
with tempfile.TemporaryDirectory() as folder:
    path = Path(folder) / "curve.pt2"
    torch.export.save(program, path)
    size = path.stat().st_size
    loaded = torch.export.load(path).module()
line = torch.linspace(-3, 3, 200)[:, None]
answers = loaded(line)
p = posterior.predict(line, seed=0)
print(f"{size / 1024:.0f} KB with {posterior.members} networks; outputs: {', '.join(answers)}")
for name in answers:
    print(
        f"largest difference of {name} to predict: {(answers[name] - getattr(p, name)).abs().max():.1e}"
    )

# %% [markdown]
# ## The same band
#
# Drawn from the exported program alone; dashed: `posterior.predict`.

# %%
fig, axis = plt.subplots(
    figsize=(6.5, 3),
    layout="compressed",
    num="Band of an exported program, equal to that of predict",
)
mean, std = answers["mean"][:, 0].detach(), answers["std"][:, 0].detach()
axis.fill_between(
    line[:, 0],
    mean - 2 * std,
    mean + 2 * std,
    color="#3b5b92",
    alpha=0.25,
    linewidth=0,
    label="program",
)
axis.plot(line, p.mean - 2 * p.std, "k--", linewidth=0.8, label="predict")
axis.plot(line, p.mean + 2 * p.std, "k--", linewidth=0.8)
axis.scatter(x, y, s=8, color="#d9743c", zorder=3)
axis.set(xlabel="x", ylabel="y")
axis.legend(frameon=False)
plt.show()
