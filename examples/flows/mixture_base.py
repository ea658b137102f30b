# %% [markdown]
# # Separate modes: a mixture as the base
#
# A bijection of one bump cannot tear it apart. A flow on a standard normal therefore leaves bridges between separate
# modes. With a mixture of Gaussians as the base, each component can move to a mode of its own, and the flow only bends
# it.

# %%
import matplotlib.pyplot as plt
import torch

from bayou import flows

torch.manual_seed(0)
angle = 2 * torch.pi * torch.arange(3) / 3
centers = 2 * torch.stack([angle.cos(), angle.sin()], -1)
points = centers[torch.randint(0, 3, (5000,))] + 0.3 * torch.randn(5000, 2)

# %% [markdown]
# ## The same coupling layers, two bases

# %%
bases = {
    "standard normal": flows.StandardNormal(2),
    "mixture of three": flows.GaussianMixture(2, 3),
}
fitted = {}
for name, base in bases.items():
    torch.manual_seed(0)
    flow = flows.Flow(base, flows.realnvp(2, layers=2))
    result = flows.fit(flow, points, steps=400, progress=False)
    fitted[name] = flow
    print(f"{name:16s} −log p of held-out points {result.best:.3f} nats")
entropy = torch.log(torch.tensor(3.0)) + 1 + torch.log(2 * torch.pi * torch.tensor(0.3**2))
print(f"entropy of the data, the best possible value: {entropy:.3f} nats")

# %% [markdown]
# ## What one sees
#
# The logarithm of the density shows what the density hides: threads between the modes, along which the single Gaussian
# was stretched. A draw of this flow falls onto a thread now and then. In the mixture, a component has left for the mode
# below and bent into its shape; after so few steps the two others still share a thread.

# %%
ticks = torch.linspace(-3.2, 3.2, 120)
grid = torch.cartesian_prod(ticks, ticks)
fig, axes = plt.subplots(
    1,
    3,
    figsize=(10, 3.1),
    layout="compressed",
    num="Three modes, and log-densities of a flow on a normal and on a mixture",
)
axes[0].scatter(*points[:2000].T, s=1, color="#3b5b92")
axes[0].set(
    title="data", xlim=(-3.2, 3.2), ylim=(-3.2, 3.2), aspect="equal", xlabel="$y_1$", ylabel="$y_2$"
)
for axis, (name, flow) in zip(axes[1:], fitted.items(), strict=True):
    with torch.no_grad():
        log_p = flow.log_prob(grid).reshape(120, 120).T.clamp(min=-12)
    shown = axis.contourf(
        ticks, ticks, log_p, levels=torch.linspace(-12, 1, 14), cmap="BuPu", extend="max"
    )
    axis.set(title=f"log p, {name}", aspect="equal", xlabel="$y_1$")
fig.colorbar(shown, ax=axes[2])
plt.show()
