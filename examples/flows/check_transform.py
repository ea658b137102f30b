# %% [markdown]
# # Check a transform of your own
#
# A flow with a wrong log-determinant trains without an error and reports densities that do not exist. `flows.check`
# compares both directions with each other and with the Jacobian of autograd, integrates the density, and more.

# %%
import matplotlib.pyplot as plt
import torch
from torch import nn

from bayou import flows


class Squash(flows.Transform):
    """y = x + a·tanh(x) with a > 0, elementwise; the inverse by bisection. The log-determinant has a mistake."""

    inverse_kind = flows.Cost.iterative

    def __init__(self, dim: int, wrong: bool) -> None:
        super().__init__()
        self.event_shape, self.wrong = (dim,), wrong
        self.log_a = nn.Parameter(torch.tensor(0.5))

    def _ladj(self, x):
        slope = 1 - torch.tanh(x) if self.wrong else 1 - torch.tanh(x) ** 2  # the square is missing
        return (1 + self.log_a.exp() * slope).log().sum(-1)

    def _forward(self, x, context):
        return x + self.log_a.exp() * torch.tanh(x), self._ladj(x)

    def _inverse(self, y, context):
        low, high = y - self.log_a.exp(), y + self.log_a.exp()
        for _ in range(80):
            middle = (low + high) / 2
            above = middle + self.log_a.exp() * torch.tanh(middle) > y
            low, high = torch.where(above, low, middle), torch.where(above, middle, high)
        x = ((low + high) / 2).detach()
        x = x - (x + self.log_a.exp() * torch.tanh(x) - y) / (
            1 + self.log_a.exp() * (1 - torch.tanh(x) ** 2)
        )
        return x, -self._ladj(x)  # the step of Newton gives the solution a gradient


# %% [markdown]
# ## With the mistake

# %%
report = flows.check(Squash(2, wrong=True))
print("passed:", report.passed)
print(
    "\n".join(
        line
        for line in str(report).splitlines()
        if "ladj" in line or "integral" in line or "FAIL" in line
    )[:900]
)

# %% [markdown]
# ## Without it

# %%
report_2 = flows.check(Squash(2, wrong=False))
print("passed:", report_2.passed)
print("\n".join(line for line in str(report_2).splitlines() if "FAILED" in line))

# %% [markdown]
# ## Why it matters
#
# The density of the wrong transform does not integrate to one: the log-likelihoods that it reports are too low here,
# and could as well be too high.

# %%
line = torch.linspace(-7, 7, 400)[:, None]
fig, axis = plt.subplots(
    figsize=(6, 3),
    layout="compressed",
    num="Densities of a correct and a wrong transform, and a histogram of draws",
)
for wrong, color in ((True, "#d9743c"), (False, "#3b5b92")):
    flow = flows.Flow(flows.StandardNormal(1), Squash(1, wrong))
    with torch.no_grad():
        density = flow.log_prob(line).exp()
    area = torch.trapezoid(density, line[:, 0])
    axis.plot(
        line, density, color=color, label=f"{'wrong' if wrong else 'correct'}: integral {area:.2f}"
    )
axis.hist(flow.sample(20_000, seed=0)[:, 0], bins=80, density=True, color="0.85", label="draws")
axis.set(xlabel="y", ylabel="density")
axis.legend(frameon=False)
plt.show()
