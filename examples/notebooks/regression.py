# %% [markdown]
# # Regression the scikit-learn way
#
# `BayesRegressor` fits into pipelines, grid searches and cross-validation, and says how sure it is, in the units of y.

# %%
import os

import numpy as np
from matplotlib.figure import Figure
from sklearn.model_selection import cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

import bayou
from bayou.adapters.sklearn import BayesRegressor

STEPS = int(os.environ.get("BAYOU_EXAMPLE_STEPS", "1500"))  # the tests take fewer

# %% [markdown]
# ## Data
# Temperatures over a day, with no reading between 10 and 15 o'clock.

# %%
generator = np.random.default_rng(0)
hours = np.sort(np.concatenate([generator.uniform(0, 10, 60), generator.uniform(15, 24, 60)]))
X, y = hours[:, None], 12 + 8 * np.sin((hours - 9) / 24 * 2 * np.pi) + generator.normal(0, 0.8, 120)
print(f"{len(y)} readings between {y.min():.1f} and {y.max():.1f} degrees")

# %% [markdown]
# ## Fit and predict
# A name picks the method (`bayou list methods`); inputs and targets are standardized inside, the noise is learned.

# %%
settings = {"hidden": (50,), "steps": STEPS, "lr": 1e-2, "random_state": 0}
model = BayesRegressor("ensemble", **settings).fit(X, y)
new = np.linspace(0, 24, 97)[:, None]
mean, std = model.predict(new, return_std=True)
lower, upper = model.predict_interval(new, level=0.9)
for hour in (5, 12, 20):
    i = 4 * hour
    print(f"{hour:2d} o'clock: {mean[i]:5.1f} ± {std[i]:.1f} degrees, with 90 % in {lower[i]:.1f} .. {upper[i]:.1f}")

# %% [markdown]
# ## All that is known
# `predictive` gives the whole predictive distribution: noise and doubt apart, quantiles, densities, draws.

# %%
p = model.predictive(new)
figure = Figure(figsize=(7, 3.4), layout="compressed")
axis = figure.subplots()
axis.fill_between(new[:, 0], lower, upper, color="#3b5b92", alpha=0.2, linewidth=0, label="90 %")
doubt = 1.645 * p.epistemic_std.numpy()
axis.fill_between(new[:, 0], mean - doubt, mean + doubt, color="#3b5b92", alpha=0.4, linewidth=0, label="doubt alone")
axis.plot(new[:, 0], mean, color="#3b5b92")
axis.scatter(hours, y, s=8, color="#d9743c", linewidths=0)
axis.set(xlabel="hour", ylabel="degrees")
axis.legend(frameon=False)
figure  # noqa: B018  (a notebook shows it)

# %% [markdown]
# ## In a pipeline, judged by cross-validation

# %%
pipeline = make_pipeline(StandardScaler(), BayesRegressor("map", **settings))
shuffled = generator.permutation(len(y))
scores = cross_val_score(pipeline, X[shuffled], y[shuffled], cv=3)
print("R² in three folds:", ", ".join(f"{score:.3f}" for score in scores))

# %% [markdown]
# ## Save without pickle
# One file of tensors and JSON with a checksum; loading runs no code.

# %%
model.save("temperature.bayou")
again = bayou.BayesRegressor.load("temperature.bayou")
print("the same predictions:", np.array_equal(again.predict(new), mean))
