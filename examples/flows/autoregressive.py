# %% [markdown]
# # Autoregressive flows: MAF, IAF, neural and recurrent
#
# In an autoregressive flow the map of coordinate d depends on coordinates 1 .. d − 1: log p(y) = Σ log p(y_d | y_1 ..
# y_{d−1}). All of them can be evaluated in one pass in one direction, and need one step per coordinate in the other.
# MAF (Papamakarios 2017) is fast from data to base: maximum likelihood. IAF (Kingma 2016) is its mirror image, fast
# from base to data: variational inference. NAF (Huang 2018) replaces the affine map by a small monotone network, TAN
# (Oliva 2018) uses a recurrent network.

# %%
import time

import matplotlib.pyplot as plt
import torch

from bayou import flows

torch.manual_seed(0)
angle, radius = 2 * torch.pi * torch.rand(4000), 1 + torch.randint(0, 2, (4000,))
rings = radius[:, None] * torch.stack([angle.cos(), angle.sin()], -1) + 0.1 * torch.randn(4000, 2)

# %% [markdown]
# ## Two rings by maximum likelihood

# %%
fitted = {}
for name, build, steps in (("MAF", flows.maf, 300), ("spline", flows.spline_autoregressive, 250)):
    torch.manual_seed(0)
    flow = flows.Flow(flows.StandardNormal(2), build(2))
    result = flows.fit(flow, rings, steps=steps, progress=False)
    fitted[f"{name}, maximum likelihood"] = flow
    print(f"{name:8s} −log p of held-out points {result.best:.3f} nats")

# %% [markdown]
# ## One ring by reverse KL
#
# Here only an unnormalized density is known, and the flow is fitted to it by its own draws: KL(q ‖ p). IAF and NAF draw
# in one pass. The bound E[log p̃ − log q] is at most log Z.


# %%
def log_ring(z: torch.Tensor) -> torch.Tensor:
    return -0.5 * ((z.norm(dim=-1) - 2) / 0.3) ** 2 + z[..., 0]


for name, build, steps in (("IAF", flows.iaf, 300), ("NAF", flows.naf, 150)):
    torch.manual_seed(0)
    flow = flows.Flow(flows.StandardNormal(2), build(2))
    result = flows.fit(flow, log_ring, steps=steps, progress=False)
    fitted[f"{name}, reverse KL"] = flow
    begun = time.perf_counter()
    flow.sample_and_log_prob(2000)
    print(
        f"{name:8s} bound of log Z {result.bound:.3f}; 2,000 draws in {1000 * (time.perf_counter() - begun):.0f} ms"
    )

# %% [markdown]
# An affine map of each coordinate (MAF, IAF) bends the base but cannot cut it: the rings stay connected where the flow
# folds. Splines and neural maps can have several steep parts per layer and leave less in between.

# %%
ticks = torch.linspace(-3.2, 3.2, 110)
grid = torch.cartesian_prod(ticks, ticks)
fig, axes = plt.subplots(
    1,
    4,
    figsize=(11, 2.9),
    layout="compressed",
    num="Densities of autoregressive flows fitted to two rings and to one ring",
)
for axis, (name, flow) in zip(axes, fitted.items(), strict=True):
    if "KL" in name:  # draws are cheap, densities are not
        axis.hist2d(
            *flow.sample(40_000, seed=0).T.numpy(),
            bins=80,
            range=((-3.2, 3.2), (-3.2, 3.2)),
            cmap="BuPu",
        )
        axis.set_aspect("equal")
    else:
        with torch.no_grad():
            density = flow.log_prob(grid).exp().reshape(110, 110).T
        axis.imshow(density, origin="lower", extent=(-3.2, 3.2, -3.2, 3.2), cmap="BuPu")
    axis.set(title=name, xlabel="$y_1$")
axes[0].set_ylabel("$y_2$")
plt.show()
