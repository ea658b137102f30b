# %% [markdown]
# # Continuous flows: paths from noise to data
#
# A continuous flow integrates ż = v(t, z) from t = 0 to 1; the change of log-density along a path is −∫ tr ∂v/∂z dt
# (Chen 2018). Flow matching (Lipman 2023) fits the field v without solving the equation: v(t, z) regresses on the
# direction from a draw of the base to a row of the data, at a random point between them. The fitted flow still has a
# density.

# %%
import matplotlib.pyplot as plt
import torch

from bayou import flows

torch.manual_seed(0)
arm, turn = torch.randint(0, 3, (6000,)), torch.rand(6000).sqrt()
angle = 2 * torch.pi * arm / 3 + 2 * turn
points = 2.5 * turn[:, None] * torch.stack([angle.cos(), angle.sin()], -1) + 0.1 * torch.randn(
    6000, 2
)

# %% [markdown]
# ## Flow matching
#
# A step costs one pass of the field. Afterwards `log_prob` integrates it in 16 steps of RK4.

# %%
flow = flows.Flow(flows.StandardNormal(2), flows.continuous(2, steps=16))
result = flows.fit(flow, points, matching=True, steps=1200, progress=False)
print(result)
with torch.no_grad():
    print(f"−log p of the data: {-flow.log_prob(points[:1000]).mean():.3f} nats")

# %% [markdown]
# ## Paths
#
# Points of the base, and where the field takes them. Paths do not cross, since an ODE has one solution through each
# point; that makes the map invertible. The thin lines are whole paths of 200 draws, blue at t = 0, orange at t = 1.

# %%
field = flow.transform.field
z, path = torch.randn(200, 2), []
with torch.no_grad():
    for k in range(64):
        path.append(z)
        z = z + field(torch.full((200,), k / 64), z) / 64  # Euler steps, for the picture only
path = torch.stack([*path, z])

ticks = torch.linspace(-3.2, 3.2, 100)
with torch.no_grad():
    density = flow.log_prob(torch.cartesian_prod(ticks, ticks)).exp().reshape(100, 100).T
fig, axes = plt.subplots(
    1,
    3,
    figsize=(10, 3.2),
    layout="compressed",
    num="Three spiral arms, paths of a continuous flow, and its density",
)
axes[0].scatter(*points[:2500].T, s=1, color="#3b5b92")
axes[1].plot(path[:, :, 0], path[:, :, 1], color="0.6", linewidth=0.3)
axes[1].scatter(*path[0].T, s=5, color="#3b5b92", linewidths=0, label="t = 0")
axes[1].scatter(*path[-1].T, s=5, color="#d9743c", linewidths=0, label="t = 1")
axes[1].legend(frameon=False, loc="upper right", fontsize=8, markerscale=2)
axes[2].imshow(density, origin="lower", extent=(-3.2, 3.2, -3.2, 3.2), cmap="BuPu")
for axis, title in zip(axes, ("data", "paths", "density"), strict=True):
    axis.set(title=title, xlim=(-3.2, 3.2), ylim=(-3.2, 3.2), aspect="equal", xlabel="$z_1$")
axes[0].set_ylabel("$z_2$")
plt.show()
