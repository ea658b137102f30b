# %% [markdown]
# # Surjections: symmetric, sorted and rounded data
#
# Some maps lose information: |x|, sorting, rounding (SurVAE flows, Nielsen 2020). As a link of a flow each adds a term
# in place of the log-determinant, and the density of the whole is exact or a labeled bound. They build a known
# structure of the data into a flow.

# %%
import matplotlib.pyplot as plt
import torch

from bayou import flows

torch.manual_seed(0)
half = torch.stack([2 + 0.35 * torch.randn(3000), 1.2 * torch.randn(3000)], -1)
half[:, 1] = half[:, 1].abs() ** 1.3
points = half * torch.where(torch.rand(3000, 2) < 0.5, -1.0, 1.0)  # symmetric in both coordinates

# %% [markdown]
# ## A density that is symmetric by construction
#
# `Inverse(Abs)` adds random signs in the direction to data and removes them in the other: the flow before it sees only
# a quarter of the plane. Such a link is exact, if the density before it lives on positive numbers only; `InverseCDF`
# would be one way, here the exponential of a RealNVP.


# %%
class Exp(flows.Transform):
    """y = eˣ, to positive numbers; ladj = Σ x."""

    def __init__(self) -> None:
        super().__init__()
        self.event_shape = (2,)
        self.codomain = (0.0, float("inf"))

    def _forward(self, x, context):
        return x.exp(), x.sum(-1)

    def _inverse(self, y, context):
        return y.log(), -y.log().sum(-1)


signs = flows.Inverse(flows.Abs(2))
plain = flows.Flow(flows.StandardNormal(2), flows.realnvp(2))
symmetric = flows.Flow(flows.StandardNormal(2), flows.Chain(flows.realnvp(2), Exp(), signs))
for name, flow in {"plain": plain, "with signs": symmetric}.items():
    result = flows.fit(flow, points[:300], steps=300, progress=False)
    with torch.no_grad():
        score = -flow.log_prob(points[300:]).mean()
    print(f"{name:10s} −log p of 2,700 new points {score:.3f} nats; its log p is {flow.kind.name}")

# %% [markdown]
# ## Rounding: a bound
#
# `Dequantize` rounds in the direction to data. The inverse draws a number within the cell, so that log p is a bound,
# which more draws tighten.

# %%
counts = (points.abs() * 2).floor().clamp(max=9)
grainy = flows.Flow(
    flows.StandardNormal(2),
    flows.Chain(flows.realnvp(2), flows.Sigmoid((2,)), flows.Dequantize(2, levels=10)),
)
flows.fit(grainy, counts, steps=300, progress=False)
with torch.no_grad():
    for k in (1, 10, 100):
        print(
            f"−log p of counts with {k:3d} draws: {-grainy.log_prob(counts[:500], samples=k, seed=0).mean():.3f} nats"
        )

# %%
ticks = torch.linspace(-4, 4, 120)
grid = torch.cartesian_prod(ticks, ticks)
fig, axes = plt.subplots(
    1,
    3,
    figsize=(10, 3.2),
    layout="compressed",
    num="300 symmetric points, and densities of a plain and a symmetric flow",
)
axes[0].scatter(*points[:300].T, s=4, color="#3b5b92", linewidths=0)
for axis, flow, title in ((axes[1], plain, "plain"), (axes[2], symmetric, "with random signs")):
    with torch.no_grad():
        axis.imshow(
            flow.log_prob(grid).exp().reshape(120, 120).T,
            origin="lower",
            extent=(-4, 4, -4, 4),
            cmap="BuPu",
        )
    axis.set(title=title, xlabel="$y_1$")
axes[0].set(
    title="300 points", xlim=(-4, 4), ylim=(-4, 4), aspect="equal", xlabel="$y_1$", ylabel="$y_2$"
)
plt.show()
