# %% [markdown]
# # Lossless compression of digits by a flow
#
# An integer discrete flow maps integers to integers, so that −log₂ p(y) bits are enough to store y. `flow.compress`
# stores them, `flow.decompress` restores them exactly. The flow has learned 1,437 of scikit-learn's 8×8 digits with
# levels 0 to 16 and encodes 100 others; gzip, xz and PNG know nothing about digits. The weights of the flow are not in
# the file.

# %%
import gzip
import lzma
import math
import zlib

import matplotlib.pyplot as plt
import torch
from sklearn.datasets import load_digits

from bayou import rng
from bayou.flows import DiscretizedLogistic, Flow, Groups, fit, integer, quincunx
from bayou.flows.discrete.bijections import cnn

EVENT, LEVELS, COMPONENTS = (1, 8, 8), 17, 3
digits = torch.from_numpy(load_digits().images).float().unsqueeze(1)
order = rng.permutation(len(digits), 0)
test, train = digits[order[:100]], digits[order[360:]]

# %% [markdown]
# ## A base that goes from coarse to fine
#
# Five groups of pixels, each given those before it, and two integer couplings.

# %%
torch.manual_seed(0)
nets = [cnn(2, (24, 24), 3 * COMPONENTS) for _ in range(5)]
base = DiscretizedLogistic(EVENT, LEVELS, COMPONENTS, Groups(quincunx(EVENT, 2), nets))
flow = Flow(base, integer(EVENT, LEVELS, layers=2, hidden=(16, 16)))
print(fit(flow, train, steps=90, batch_size=128, lr=5e-3, seed=0, progress=False))

# %% [markdown]
# ## Compress, and compare

# %%
stream = flow.compress(test)
print("restored exactly:", torch.equal(flow.decompress(stream), test))
with torch.no_grad():
    ideal = -flow.log_prob(test).sum().item() / math.log(2) / 8
raw = bytes(test.flatten().byte().tolist())
sheet = test.reshape(-1, 20, 8, 8).transpose(1, 2).reshape(-1, 160)
png = zlib.compress(b"".join(b"\0" + bytes(row) for row in sheet.int().tolist()), 9)
sizes = {
    "raw, 5 bits": test.numel() * 5 // 8,
    "PNG": len(png) + 57,  # and the signature, the header and the end
    "gzip": len(gzip.compress(raw, 9)),
    "xz": len(lzma.compress(raw, preset=9 | lzma.PRESET_EXTREME)),
    "flow": len(stream),
}
for name, size in sizes.items():
    print(f"{name:12s} {size:>7,} bytes {8 * size / test.numel():6.3f} bits per pixel")
print(f"{'−log₂ p(y)':12s} {ideal:>7,.0f} bytes {8 * ideal / test.numel():6.3f} bits per pixel")

# %%
fig, axes = plt.subplots(
    1,
    3,
    figsize=(10, 2.8),
    layout="compressed",
    num="Digits that were encoded, draws of the flow, and sizes of the files",
)
for axis, rows, title in ((axes[0], test, "encoded"), (axes[1], flow.sample(40, seed=0), "drawn")):
    axis.imshow(
        rows[:40].clamp(0, 16).reshape(5, 8, 8, 8).transpose(1, 2).reshape(40, 64),
        cmap="gray_r",
        vmin=0,
        vmax=16,
    )
    axis.set(title=title, xticks=[], yticks=[])
axes[2].barh(list(sizes), list(sizes.values()), color=["0.75"] * 4 + ["#3b5b92"])
axes[2].set(title="bytes")
axes[2].invert_yaxis()
plt.show()
