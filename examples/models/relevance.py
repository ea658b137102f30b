# %% [markdown]
# # Which inputs matter: a prior that learns it
#
# With `learn="in"` every input has a prior scale of its own, which the evidence lower bound selects (automatic
# relevance determination, MacKay 1994, Neal 1996). Scales of inputs without effect shrink, and `posterior.relevance()`
# reports them.

# %%
import matplotlib.pyplot as plt
import torch
from torch import nn

import bayou

torch.manual_seed(0)
x = torch.randn(300, 8)  # of eight inputs the first three matter
y = torch.sin(2 * x[:, :1]) + 0.8 * x[:, 1:2] + 0.4 * x[:, 2:3] + 0.1 * torch.randn(300, 1)
train, test = (x[:200], y[:200]), (x[200:], y[200:])

# %% [markdown]
# ## With one scale, and with one for each input

# %%
priors = {
    "one scale": bayou.Normal("fan_in", gain=2.0),
    "one for each input": bayou.Normal("fan_in", gain=2.0, learn="in"),
}
found = {}
for name, prior in priors.items():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 50), nn.Tanh(), nn.Linear(50, 1))
    method = bayou.VI(bayou.MeanField(), steps=800, lr=1e-2, warmup=0.3)
    posterior = bayou.fit(
        net, train, method, likelihood=bayou.Gaussian(0.3, learn=True), prior=prior, progress=False
    )
    p = posterior.predict(test[0], 50, seed=0)
    found[name] = posterior
    print(
        f"{name:18s} test RMSE {bayou.metrics.rmse(p, test[1]):.3f}, NLL {bayou.metrics.nll(p, test[1]):.3f}"
    )

# %%
relevance = found["one for each input"].relevance()
scale = next(iter(relevance.values()))
weights = found["one for each input"].mean()["0.weight"].norm(dim=0)
plain = found["one scale"].mean()["0.weight"].norm(dim=0)
fig, axes = plt.subplots(
    1,
    2,
    figsize=(9, 2.9),
    layout="compressed",
    num="Relevance of eight inputs, and norms of their weights under two priors",
)
axes[0].bar(range(1, 9), scale / scale.max(), color=["#d9743c"] * 3 + ["#3b5b92"] * 5)
axes[0].set(xlabel="input", ylabel="prior scale, relative", title="learned relevance")
axes[1].bar(
    [k - 0.2 for k in range(1, 9)], plain / plain.max(), 0.38, color="0.7", label="one scale"
)
axes[1].bar(
    [k + 0.2 for k in range(1, 9)],
    weights / weights.max(),
    0.38,
    color="#3b5b92",
    label="one for each input",
)
axes[1].set(xlabel="input", ylabel="norm of weights, relative", title="weights of the first layer")
axes[1].legend(frameon=False)
plt.show()

# %% [markdown]
# The three inputs that matter (orange) keep their scale; the others are switched off, and their weights with them.
