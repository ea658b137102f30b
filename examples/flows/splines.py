# %% [markdown]
# # Spline flows: sharp edges and several modes
#
# A rational-quadratic spline (Durkan 2019) is a monotone curve through a few knots, with an inverse and a slope in
# closed form. As the elementwise map of a coupling it can be steep in one place and flat in the next, which an affine
# map cannot.

# %%
import matplotlib.pyplot as plt
import torch

from bayou import flows

torch.manual_seed(0)
u = torch.rand(8000, 2) * 8 - 4
u = u[((u[:, 0] / 2).floor() + (u[:, 1] / 2).floor()) % 2 == 0]  # a checkerboard of 8 squares
print(f"{len(u)} points; log of the area that they fill: {torch.tensor(32.0).log():.3f} nats")

# %% [markdown]
# ## An affine and a spline coupling
#
# Splines are the identity outside [−bound, bound], here the default of 5. The best possible value of −log p is the log
# of the area of the squares.

# %%
fitted = {}
for name, transform in {"RealNVP": flows.realnvp(2), "spline": flows.spline_coupling(2)}.items():
    flow = flows.Flow(flows.StandardNormal(2), transform)
    result = flows.fit(flow, u, steps=350, progress=False)
    fitted[name] = flow
    print(f"{name:8s} −log p of held-out points {result.best:.3f} nats")

# %% [markdown]
# ## The maps themselves
#
# The right picture shows one spline: what the last layer does to the coordinate that it changes, for three values of
# the one that it keeps. The curve is monotone, with steep and flat parts: mass is thin where it is steep.

# %%
ticks = torch.linspace(-4.5, 4.5, 150)
grid = torch.cartesian_prod(ticks, ticks)
fig, axes = plt.subplots(
    1,
    4,
    figsize=(11, 2.9),
    layout="compressed",
    num="A checkerboard, two learned densities, and a spline of the last layer",
)
axes[0].scatter(*u[:3000].T, s=1, color="#3b5b92")
axes[0].set(
    title="data", xlim=(-4.5, 4.5), ylim=(-4.5, 4.5), aspect="equal", xlabel="$y_1$", ylabel="$y_2$"
)
for axis, (name, flow) in zip(axes[1:], fitted.items(), strict=False):
    with torch.no_grad():
        density = flow.log_prob(grid).exp().reshape(150, 150).T
    axis.imshow(density, origin="lower", extent=(-4.5, 4.5, -4.5, 4.5), cmap="BuPu", vmax=0.05)
    axis.set(title=name, xlabel="$y_1$")
line = torch.linspace(-4.5, 4.5, 300)
last = list(fitted["spline"].transform.transforms)[-1]
with torch.no_grad():
    for kept in (-2.0, 0.0, 2.0):  # the last layer keeps the first coordinate or the second
        rows = torch.stack([torch.full_like(line, kept), line], -1)
        changed = last.forward(rows)[0][:, 1]
        if torch.equal(changed, line):
            changed = last.forward(rows.flip(-1))[0][:, 0]
        axes[3].plot(line, changed, label=f"kept: {kept:+.0f}")
axes[3].set(title="one spline", xlabel="x", ylabel="y")
axes[3].legend(frameon=False, fontsize=8)
plt.show()
