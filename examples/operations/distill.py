# %% [markdown]
# # Distillation: one network that predicts what a posterior predicts
#
# A prediction of a posterior evaluates its network a hundred times. A student network learns these predictions and
# computes them in one pass (Balan 2015, Bulò 2016). With a mean and one log-variance it learns the whole spread; with a
# second log-variance (`keep="epistemic"`) it keeps noise and doubt apart.

# %%
import time

import matplotlib.pyplot as plt
import torch
from torch import nn

import bayou

torch.manual_seed(1)
x = torch.cat([-1 - 2 * torch.rand(60, 1), 1 + 2 * torch.rand(60, 1)])
y = torch.sin(2 * x) + 0.1 * torch.randn(120, 1)


def network(outputs: int) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(1, 50), nn.Tanh(), nn.Linear(50, outputs))


# %% [markdown]
# ## A teacher and two students
#
# The teacher has a gap in its data. It answers anywhere, so the students learn from rows without labels.

# %%
likelihood, prior = bayou.Gaussian(0.1), bayou.Normal(1.0)
teacher = bayou.fit(
    network(1),
    (x, y),
    bayou.Laplace("full", start=bayou.MAP(steps=800, lr=1e-2)),
    likelihood=likelihood,
    prior=prior,
    progress=False,
)
rows = torch.linspace(-4, 4, 800)[:, None]
learn = {"steps": 700, "lr": 5e-3, "progress": False}
found = {
    "teacher": teacher,
    "student": bayou.distill(teacher, network(2), rows, **learn),
    "student, two variances": bayou.distill(teacher, network(3), rows, keep="epistemic", **learn),
}
curves = {}
for name, posterior in found.items():
    begun = time.process_time()
    p = posterior.predict(rows, seed=0)
    curves[name] = p.mean[:, 0], p.std[:, 0], p.epistemic_std[:, 0]
    seconds = time.process_time() - begun
    gap = rows[:, 0].abs() < 0.5
    std, doubt = p.std[gap].mean(), p.epistemic_std[gap].mean()
    print(f"{name:23s} std in the gap {std:.2f}, of f {doubt:.2f}; {1000 * seconds:.0f} ms")

# %% [markdown]
# ## What one sees
#
# Light: two standard deviations of y. Dark: the part that is doubt about the function. The student with one variance
# has the light band only; the other has both.

# %%
fig, axes = plt.subplots(
    1,
    3,
    figsize=(10.5, 3),
    sharey=True,
    layout="compressed",
    num="Bands of a teacher and of two students on a curve with a gap",
)
for axis, (name, (mean, std, doubt)) in zip(axes, curves.items(), strict=True):
    axis.fill_between(
        rows[:, 0], mean - 2 * std, mean + 2 * std, color="#3b5b92", alpha=0.2, linewidth=0
    )
    axis.fill_between(
        rows[:, 0], mean - 2 * doubt, mean + 2 * doubt, color="#3b5b92", alpha=0.3, linewidth=0
    )
    axis.plot(rows, mean, color="#3b5b92")
    axis.scatter(x, y, s=4, color="black", linewidths=0)
    axis.set(title=name, xlabel="x", ylim=(-4, 4))
axes[0].set_ylabel("y")
plt.show()
