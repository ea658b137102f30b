# %% [markdown]
# # scikit-learn: an estimator with intervals
#
# `BayesRegressor` and `BayesClassifier` fit into pipelines, grid searches and cross-validation. They standardize inputs
# and targets, select noise and prior on held-out rows, and predict in the units of y.

# %%
import tempfile

import matplotlib.pyplot as plt
import numpy as np
from sklearn.model_selection import cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from bayou.adapters.sklearn import BayesRegressor

generator = np.random.default_rng(0)
hours = np.sort(np.concatenate([generator.uniform(0, 10, 60), generator.uniform(15, 24, 60)]))
X, y = hours[:, None], 12 + 8 * np.sin((hours - 9) / 24 * 2 * np.pi) + generator.normal(0, 0.8, 120)
print(
    f"{len(y)} temperatures between {y.min():.1f} and {y.max():.1f} degrees, none from 10 to 15 o'clock"
)

# %% [markdown]
# ## Fit and predict

# %%
model = BayesRegressor("laplace", hidden=(50,), random_state=0).fit(X, y)
new = np.linspace(0, 24, 97)[:, None]
mean, std = model.predict(new, return_std=True)
lower, upper = model.predict_interval(new, level=0.9)
for hour in (5, 12, 20):
    i = 4 * hour
    print(
        f"{hour:2d} o'clock: {mean[i]:5.1f} ± {std[i]:.1f} degrees, 90 % in {lower[i]:.1f} .. {upper[i]:.1f}"
    )

# %% [markdown]
# ## In a pipeline, with cross-validation

# %%
pipeline = make_pipeline(
    StandardScaler(), BayesRegressor("map", hidden=(50,), steps=300, random_state=0)
)
shuffled = generator.permutation(len(y))
scores = cross_val_score(pipeline, X[shuffled], y[shuffled], cv=3)
print("R² in three folds:", ", ".join(f"{score:.3f}" for score in scores))

# %% [markdown]
# ## Save without pickle
#
# One file of tensors and JSON with a checksum; loading runs no code.

# %%
with tempfile.TemporaryDirectory() as folder:
    model.save(f"{folder}/temperature.bayou")
    again = BayesRegressor.load(f"{folder}/temperature.bayou")
print("the same predictions:", np.array_equal(again.predict(new), mean))

# %%
p = model.predictive(new)
fig, axis = plt.subplots(
    figsize=(7.5, 3.2),
    layout="compressed",
    num="Temperatures over a day with 90 % intervals, wider where there are no readings",
)
axis.fill_between(
    new[:, 0], lower, upper, color="#3b5b92", alpha=0.2, linewidth=0, label="90 % of y"
)
doubt = 1.645 * p.epistemic_std.numpy().reshape(-1)
axis.fill_between(
    new[:, 0],
    mean - doubt,
    mean + doubt,
    color="#3b5b92",
    alpha=0.35,
    linewidth=0,
    label="90 % of f",
)
axis.plot(new[:, 0], mean, color="#3b5b92")
axis.scatter(hours, y, s=8, color="#d9743c", linewidths=0)
axis.set(xlabel="hour", ylabel="degrees", xticks=range(0, 25, 3))
axis.legend(frameon=False)
plt.show()
