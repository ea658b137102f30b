# %% [markdown]
# # A vision transformer: its last layer under five methods
#
# `where="last"` freezes everything below the last layer: it is shared with the network, never copied, and no file has
# it. The encoder runs once for all draws. The network is made from a config and trained for a moment; one of timm or
# `from_pretrained` works the same.

# %%
import matplotlib.pyplot as plt
import torch
from transformers import ViTConfig, ViTForImageClassification

import bayou

labels = torch.arange(96) % 3  # a bright stripe in one of three places, and noise
pixels = 0.3 * torch.randn(96, 1, 16, 16, generator=torch.Generator().manual_seed(0))
for row, label in zip(pixels, labels, strict=True):
    row[:, 5 * label : 5 * label + 4] += 1.0
noise = torch.randn(96, 1, 16, 16, generator=torch.Generator().manual_seed(1))  # no stripe at all

torch.manual_seed(0)
sizes = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 128,
}
net = ViTForImageClassification(
    ViTConfig(image_size=16, patch_size=4, num_channels=1, num_labels=3, **sizes)
)
batch = {"pixel_values": pixels, "labels": labels}
net = bayou.fit(net, batch, bayou.MAP(steps=40, lr=1e-3), progress=False).to_module()

# %% [markdown]
# ## Five posteriors of one layer

# %%
methods = {
    "Laplace": bayou.Laplace(start=None),
    "VI": bayou.VI(bayou.MeanField(), steps=40),
    "SGLD": bayou.SGLD(steps=40, draws=10, start=None),
    "SWAG": bayou.SWAG(steps=40, start=bayou.MAP(steps=1)),
    "Ensemble": bayou.Ensemble(5, bayou.MAP(steps=40), init="reset"),
}
entropies = {}
for name, method in methods.items():
    posterior = bayou.fit(net, batch, method, where="last", progress=False)
    p, q = (posterior.predict({"pixel_values": images}, seed=0) for images in (pixels, noise))
    entropies[name] = p.entropy, q.entropy
    area = bayou.metrics.auroc(p.entropy, q.entropy)
    print(
        f"{name:9s} accuracy {bayou.metrics.accuracy(p, labels):.1%}, AUROC of noise by entropy {area:.3f}"
    )

# %% [markdown]
# ## Entropy of images and of noise
#
# Each box is the middle half of the rows. Images without a stripe should have the larger entropy.

# %%
fig, axes = plt.subplots(
    1,
    2,
    figsize=(9, 3),
    width_ratios=(1, 2),
    layout="constrained",
    num="Three images with a stripe, and entropies of images and noise for five methods",
)
axes[0].imshow(torch.cat([pixels[k, 0] for k in range(3)], 1), cmap="gray")
axes[0].set(title="three classes", xticks=[], yticks=[])
for shift, color, k in ((-0.18, "#3b5b92", 0), (0.18, "#d9743c", 1)):
    boxes = axes[1].boxplot(
        [both[k].numpy() for both in entropies.values()],
        positions=[place + shift for place in range(5)], widths=0.3, showfliers=False, patch_artist=True,
        medianprops={"color": "black"}, boxprops={"facecolor": color, "alpha": 0.6}, manage_ticks=False,
    )  # fmt: skip
axes[1].set(
    xticks=range(5),
    xticklabels=list(entropies),
    ylabel="entropy, nats",
    title="images (blue) and noise (orange)",
)
plt.show()
