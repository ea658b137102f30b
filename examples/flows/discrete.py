# %% [markdown]
# # Discrete flows: probabilities that move
#
# A bijection of integers has no volume to change: it only moves probabilities from one value to another. The task of a
# discrete flow is to move them to where its base can describe them. An integer coupling (Hoogeboom 2019) adds a rounded
# function of one half of the coordinates to the other.

# %%
import matplotlib.pyplot as plt
import torch

from bayou import flows

torch.manual_seed(0)
LEVELS = 24
first = torch.randint(0, LEVELS, (6000,))
wave = LEVELS / 2 + 7 * torch.sin(2 * torch.pi * first / LEVELS)
second = (wave + 1.2 * torch.randn(6000)).round().clamp(0, LEVELS - 1)
pairs = torch.stack([first.float(), second], -1)  # integers, stored as floats

# %% [markdown]
# ## A base alone, and with couplings
#
# The base is a product of two discretized logistics: it has no dependence between the coordinates. The flow learns it
# as a shift of the second coordinate by a function of the first.

# %%
fitted = {}
for name, layers in {"base alone": 0, "4 couplings": 4}.items():
    torch.manual_seed(0)
    shift = flows.integer(2, LEVELS, layers=layers) if layers else flows.IntegerIdentity(2, LEVELS)
    flow = flows.Flow(flows.DiscretizedLogistic(2, LEVELS, components=3), shift)
    result = flows.fit(flow, pairs, steps=800, progress=False)
    fitted[name] = flow
    print(f"{name:12s} {result.best / torch.log(torch.tensor(2.0)):.3f} bits per pair")
print(f"raw: {2 * torch.log2(torch.tensor(float(LEVELS))):.3f} bits per pair")

# %% [markdown]
# ## Probabilities are bits
#
# −log₂ p is the length of a code, and `compress` reaches it.

# %%
flow = fitted["4 couplings"]
data = flow.compress(pairs[:2000])
assert torch.equal(flow.decompress(data), pairs[:2000])
print(
    f"2,000 pairs in {len(data)} bytes, {8 * len(data) / 2000:.3f} bits per pair; decompressed without loss"
)

# %%
cells = torch.cartesian_prod(torch.arange(LEVELS), torch.arange(LEVELS)).float()
counts = torch.histogramdd(pairs, bins=[LEVELS, LEVELS], range=[-0.5, LEVELS - 0.5] * 2).hist / len(
    pairs
)
fig, axes = plt.subplots(
    1,
    3,
    figsize=(10, 3.2),
    layout="compressed",
    num="Frequencies of pairs of integers, and probabilities without and with couplings",
)
shown = {"data": counts}
for name, flow in fitted.items():
    with torch.no_grad():
        shown[name] = flow.log_prob(cells).exp().reshape(LEVELS, LEVELS)
for axis, (name, table) in zip(axes, shown.items(), strict=True):
    axis.imshow(table.T, origin="lower", cmap="BuPu", vmax=float(counts.max()))
    axis.set(title=name, xlabel="first")
axes[0].set_ylabel("second")
plt.show()
