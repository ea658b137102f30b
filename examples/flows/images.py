# %% [markdown]
# # Images: a Glow of handwritten digits
#
# 8×8 pixels in 17 levels of gray. A flow of real numbers has no mass on integers: dequantization adds noise within a
# level, uniform or learned, and makes log p of an image a bound. It is given in bits per dimension, what a pixel would
# cost in a file. A uniform density costs log₂ 17 = 4.09 bits per pixel.

# %%
import matplotlib.pyplot as plt
import torch
from torch.nn.functional import pad

from bayou.data import load
from bayou.flows import bits_per_dim, dequantizer, fit, glow_image, image_flow

SHAPE, LEVELS = (1, 8, 8), 17
data = load("digits")
train, test = (
    (16 * data.preprocessor.pixels(x)).round() for x in (data.train[0], data.test[0])
)  # integers 0 .. 16

# %% [markdown]
# ## Uniform and learned noise
#
# `samples=K` averages K importance weights, which tightens the bound.

# %%
print("bits per dimension of test digits")
for name in ("uniform", "learned"):
    torch.manual_seed(0)
    chain = glow_image(SHAPE, levels=2, steps=4, hidden=32)
    noise = dequantizer(SHAPE, LEVELS, steps=2, hidden=16) if name == "learned" else "uniform"
    flow = image_flow(chain, LEVELS, noise)
    fit(flow, train, steps=150, batch_size=64, lr=3e-3, progress=False)
    for samples in (1, 10):
        bits = bits_per_dim(flow, test, samples).mean().item()
        print(f"{name:8s} noise, {samples:2d} draws: {bits:.3f}")

# %% [markdown]
# ## Draws
#
# After so short a run the draws have strokes and curves; some are digits. Longer runs and MNIST are in the
# [results](../benchmarks/flows.md).

# %%
drawn = flow.sample(40, seed=0).clamp(0, LEVELS - 1)
fig, axes = plt.subplots(
    1,
    2,
    figsize=(7.5, 2.6),
    layout="compressed",
    num="Forty digits of the data, and forty draws of a Glow",
)
for axis, (title, rows) in zip(axes, (("data", test), ("drawn", drawn)), strict=True):
    framed = pad(rows[:40], (1, 1, 1, 1)).reshape(5, 8, 10, 10)
    axis.imshow(framed.permute(0, 2, 1, 3).reshape(50, 80), cmap="gray_r", vmin=0, vmax=LEVELS - 1)
    axis.set(title=title, xticks=[], yticks=[])
plt.show()
