# %% [markdown]
# # How a flow warps the plane, layer by layer
#
# A flow is a simple density pushed through a chain of bijections. This page shows the chain at work: a grid and draws
# of the standard normal, after none, some and all of the layers of a spline coupling flow that was fitted to two moons.

# %%
import matplotlib.pyplot as plt
import torch
from sklearn.datasets import make_moons

from bayou import flows

torch.manual_seed(0)
points = torch.tensor(make_moons(4000, noise=0.07, random_state=0)[0], dtype=torch.float32)
points = (points - points.mean(0)) / points.std(0)
flow = flows.Flow(flows.StandardNormal(2), flows.spline_coupling(2, layers=4))
print(flows.fit(flow, points, steps=400, progress=False))

# %% [markdown]
# ## From base to data
#
# `forward` of each link returns the moved points and the log of the change of volume; the logs are added up. A coupling
# layer changes one coordinate: vertical lines stay vertical in one layer, horizontal ones in the next.

# %%
line, many = torch.linspace(-2.5, 2.5, 21), torch.linspace(-2.5, 2.5, 121)
across = torch.stack(torch.meshgrid(line, many, indexing="ij"), -1)
grid = torch.cat([across, across.flip(-1)])  # 42 lines of 121 points
dots, volume = torch.randn(800, 2), torch.zeros(800)
angle = torch.atan2(dots[:, 1], dots[:, 0])  # the color of a dot, so that one can follow it
stages = [(grid, dots)]
with torch.no_grad():
    for link in flow.transform.transforms:
        (grid, _), (dots, moved) = link.forward(grid), link.forward(dots)
        volume = volume + moved
        stages.append((grid, dots))
print(
    f"{len(stages) - 1} links; log of the change of volume at the draws: {volume.min():.1f} to {volume.max():.1f}"
)

# %% [markdown]
# ## What one sees
#
# The colors of the dots are their directions in the base. The normal is bent and cut almost in two; where the lines of
# the grid are far apart, the density is low: the bridge between the moons consists of a few strongly stretched draws.

# %%
shown = torch.linspace(0, len(stages) - 1, 5).round().int().tolist()
num = "A grid and draws of a normal, moved by the layers of a spline flow to two moons"
fig, axes = plt.subplots(1, 5, figsize=(11, 2.5), layout="compressed", num=num)
for axis, k in zip(axes, shown, strict=True):
    grid, dots = stages[k]
    axis.plot(grid[..., 0].T, grid[..., 1].T, color="0.8", linewidth=0.4)
    axis.scatter(*dots.T, s=4, c=angle, cmap="twilight_shifted", linewidths=0)
    axis.set(
        title=f"after {k} of {len(stages) - 1}",
        xlim=(-3, 3),
        ylim=(-3, 3),
        aspect="equal",
        xticks=[],
        yticks=[],
    )
plt.show()
