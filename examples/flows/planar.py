# %% [markdown]
# # Planar and Sylvester flows
#
# A planar map y = x + û·tanh(wᵀx + b) pushes mass along one direction; its determinant has a closed form by the matrix
# determinant lemma (Rezende & Mohamed 2015). A radial map contracts or expands around a center. A Sylvester map (van
# den Berg 2018) is a planar map with several directions at once, x + Q·R·tanh(R̃·Qᵀx + b). They are cheap to draw from,
# and therefore used as approximate posteriors.

# %%
import math

import matplotlib.pyplot as plt
import torch

from bayou import flows


def log_target(z: torch.Tensor) -> torch.Tensor:
    """A ring with two heavy sides, U1 of Rezende & Mohamed; log Z is 1.8775 by quadrature."""
    sides = torch.logaddexp(
        -0.5 * ((z[..., 0] - 2) / 0.6) ** 2, -0.5 * ((z[..., 0] + 2) / 0.6) ** 2
    )
    return sides - 0.5 * ((z.norm(dim=-1) - 2) / 0.4) ** 2


ticks = torch.linspace(-4, 4, 400)
cell = float(ticks[1] - ticks[0]) ** 2
log_z = float(log_target(torch.cartesian_prod(ticks, ticks)).logsumexp(0)) + math.log(cell)
print(f"log Z by quadrature: {log_z:.4f}")

# %% [markdown]
# ## Fit by reverse KL
#
# `fit` with a function instead of data maximizes E[log p̃(y) − log q(y)] over draws of the flow, a lower bound of log
# Z. What is missing is KL(q ‖ p).

# %%
fitted = {}
for name, transform in {
    "planar, 2": flows.planar(2, layers=2),
    "planar, 16": flows.planar(2, layers=16),
    "Sylvester, 8": flows.sylvester(2, layers=8, form="householder"),
}.items():
    flow = flows.Flow(flows.StandardNormal(2), transform)
    result = flows.fit(flow, log_target, steps=400, warmup=0.4, patience=None, progress=False)
    fitted[name] = flow
    print(f"{name:13s} bound {result.bound:.3f}, KL to the target {log_z - result.bound:.3f} nats")

# %% [markdown]
# Two planar maps can only split the Gaussian. Sixteen form both sides of the ring. A Sylvester map has two directions
# at once; here eight of them are still far from the target after as many steps, since tanh of both coordinates first
# finds a symmetric solution and leaves it slowly.

# %%
fig, axes = plt.subplots(
    1,
    4,
    figsize=(10, 2.8),
    layout="compressed",
    num="A ring with two heavy sides and draws of planar and Sylvester flows",
)
target = log_target(torch.cartesian_prod(ticks, ticks)).exp().reshape(400, 400).T[::4, ::4]
axes[0].imshow(target, origin="lower", extent=(-4, 4, -4, 4), cmap="BuPu")
axes[0].set(title="target", xlabel="$y_1$", ylabel="$y_2$")
for axis, (name, flow) in zip(axes[1:], fitted.items(), strict=True):
    axis.hist2d(
        *flow.sample(40_000, seed=0).T.numpy(), bins=70, range=((-4, 4), (-4, 4)), cmap="BuPu"
    )
    axis.set(title=name, xlabel="$y_1$", aspect="equal", yticks=[])
plt.show()
