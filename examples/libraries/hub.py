# %% [markdown]
# # Hugging Face Hub: share a posterior with its checks
#
# A posterior becomes three files: safetensors, JSON, and a model card that says how it was fitted and whether to believe
# it. `bayou.hub.push` uploads them; here they stay in a folder, which needs no account.

# %%
import tempfile
from pathlib import Path

import matplotlib.pyplot as plt
import torch
from torch import nn

import bayou

torch.manual_seed(0)
x = torch.cat([torch.rand(60, 1) * 2 - 3, torch.rand(60, 1) * 2 + 1])
y = torch.sin(x) + 0.1 * torch.randn_like(x)
x_test = torch.cat([torch.rand(50, 1) * 2 - 3, torch.rand(50, 1) * 2 + 1])
y_test = torch.sin(x_test) + 0.1 * torch.randn_like(x_test)


def build_network():
    return nn.Sequential(nn.Linear(1, 50), nn.Tanh(), nn.Linear(50, 1))


posterior = bayou.fit(build_network(), (x, y), "laplace", seed=0, progress=False)

# %% [markdown]
# ## Write and read
#
# `bayou.hub.push(posterior, "me/waves", ...)` takes the same scores and metadata. Nothing is pickled and nothing in the
# files is executed: the network is built by the reader.

# %%
nll = -posterior.predict(x_test).log_prob(y_test).mean()
folder = Path(tempfile.mkdtemp()) / "waves"
bayou.hub.save_folder(
    posterior,
    folder,
    repo_id="me/waves",
    scores={"test NLL": float(nll)},
    metadata={"license": "mit"},
)
for file in sorted(folder.iterdir()):
    print(f"{file.name}: {file.stat().st_size:,} bytes")
card = (folder / "README.md").read_text()
print(card[card.index("## Checks") : card.index("## Use")])

# %%
again = bayou.from_pretrained(folder, build_network())
grid = torch.linspace(-4, 4, 200).unsqueeze(1)
same = torch.equal(again.predict(grid).mean, posterior.predict(grid).mean)
print(f"the loaded posterior predicts the same: {same}")

# %% [markdown]
# ## What one sees
#
# The predictions of the loaded posterior: 90 % intervals that are wide where there were no data.

# %%
predictive = again.predict(grid)
lower, upper = predictive.interval(0.9)
fig, ax = plt.subplots(
    figsize=(7, 2.8), layout="compressed", num="A curve with its 90 % interval, wide in a gap"
)
ax.fill_between(grid[:, 0], lower[:, 0], upper[:, 0], color="#3b5b92", alpha=0.25, lw=0)
ax.plot(grid[:, 0], predictive.mean[:, 0], color="#3b5b92")
ax.scatter(x, y, s=6, color="#d9743c")
ax.set(xlabel="x", ylabel="y")
plt.show()
