# %% [markdown]
# # Decisions: repair, leave alone, or ask somebody
#
# A machine is about to fail or it is not, and 13 % are. A failure that nobody saw coming costs 10, the repair of a sound
# machine costs 1, and a call to an expert, who knows, costs 0.4. The prediction is a probability for each machine; the decision is the
# action with the lowest expected cost. No threshold is tuned: it follows from the costs.

# %%
import matplotlib.pyplot as plt
import torch
from torch import nn

import bayou
from bayou.likelihoods import Newsvendor

torch.manual_seed(0)


def machines(n: int) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(n, 2)
    logit = 2.5 * x[:, 0] * x[:, 1] + 1.5 * x[:, 0] - 3.2
    return x, (torch.rand(n) < logit.sigmoid()).long()


train, test = machines(300), machines(4000)
net = nn.Sequential(nn.Linear(2, 40), nn.SiLU(), nn.Linear(40, 2))
posterior = bayou.fit(net, train, "laplace", progress=False, seed=0)
predictive = posterior.predict(test[0])

# %% [markdown]
# ## Expected and realized costs
#
# `perfect_information` is what it would be worth to know whether a machine fails, `weights_information` what more
# training rows can be worth at most.

# %%
costs = torch.tensor([[0.0, 10.0], [1.0, 0.0]])  # leave, repair; of sound and failing machines
plain = predictive.decide(-costs, names=["leave", "repair"])
asking = predictive.decide(-costs, names=["leave", "repair"], abstain=0.4)
y = test[1]
always = costs[:, y].mean(1)
print(f"leave all {always[0]:.3f}, repair all {always[1]:.3f} per machine")
for name, decision in {"decide": plain, "decide or ask": asking}.items():
    cost = costs[decision.action, y]
    if decision.abstains is not None:
        cost = torch.where(decision.abstains, 0.4, cost)
    print(
        f"{name}: {cost.mean():.3f} per machine (expected {-decision.expected_utility.mean():.3f})"
    )
print(f"asked about {asking.abstains.float().mean():.1%}")
print(f"worth of knowing y {plain.perfect_information.mean():.3f}", end=", ")
print(f"of knowing the weights {plain.weights_information.mean():.3f}")

# %% [markdown]
# ## Orders under an uncertain demand
#
# A unit that is missing costs 9, a unit left over 1. The best order is the 90 % quantile of the demand (the newsvendor).
# Where there are no data the functions disagree, so that orders cost more, and it would be worth most to learn more.

# %%
x = torch.cat((torch.rand(60, 1) * 2 - 3, torch.rand(60, 1) * 2 + 0.5))
demand = 20 + 4 * torch.sin(2 * x) + torch.randn(120, 1)
curve = nn.Sequential(nn.Linear(1, 40), nn.Tanh(), nn.Linear(40, 1))
orders = bayou.fit(curve, (x, demand), "ensemble", progress=False, seed=0)
grid = torch.linspace(-3.5, 3.0, 131).unsqueeze(1)
prediction = orders.predict(grid)
order = prediction.decide(Newsvendor(shortage=9, surplus=1))
above = prediction.exceeds(22.0)[:, 0]
for at in (-2.0, -0.25):
    row = int((grid[:, 0] - at).abs().argmin())
    print(
        f"x = {at:5.2f}: order {order.action[row, 0]:.1f}, cost {-order.expected_utility[row, 0]:.2f}, "
        f"of which more data could save {order.weights_information[row, 0]:.2f}; "
        f"P(demand > 22) = {above[row]:.2f}"
    )

# %% [markdown]
# ## What one sees
#
# Left: the calls to the expert lie between the machines that are left alone and those that are repaired. Right: the order is above the mean everywhere, and the
# worth of more data (gray, right axis) is in the gap.

# %%
fig, axes = plt.subplots(
    1,
    2,
    figsize=(10, 3.4),
    layout="compressed",
    num="Decisions about machines in the plane of two inputs, and orders above the mean demand",
)
colors = {"leave": "#9db4d6", "repair": "#b5483a", "abstain": "#e0b84c"}
labels = asking.labels
for label, color in colors.items():
    rows = torch.tensor([text == label for text in labels])
    axes[0].scatter(
        *test[0][rows].T, s=3, color=color, label="ask" if label == "abstain" else label
    )
axes[0].legend(loc="upper left", markerscale=4)
axes[0].set(
    xlabel="first input", ylabel="second input", title="Decisions", xlim=(-3, 3), ylim=(-3, 3)
)
axes[1].scatter(x, demand, s=6, color="0.4", linewidths=0)
axes[1].plot(grid, prediction.mean, color="#3b5b92", label="mean")
axes[1].plot(grid, order.action, color="#b5483a", label="order")
axes[1].legend(loc="upper left")
axes[1].set(xlabel="x", ylabel="demand", title="Orders")
worth = axes[1].twinx()
worth.fill_between(grid[:, 0], order.weights_information[:, 0], color="0.6", alpha=0.4, linewidth=0)
worth.set(ylabel="worth of more data", ylim=(0, 4 * float(order.weights_information.max())))
plt.show()
