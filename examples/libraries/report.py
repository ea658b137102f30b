# %% [markdown]
# # A report: methods compared on one page
#
# `bayou compare digits-few --methods map,ensemble,laplace` trains several methods and writes one HTML page with scores,
# checks and a recommendation. This page does the same in Python and reads the numbers that the report shows.

# %%
import tempfile
from pathlib import Path

import matplotlib.pyplot as plt

from bayou.app.runs.config import Config
from bayou.app.runs.folder import Run

folder = tempfile.TemporaryDirectory()
methods = ("mle", "map", "ensemble", "laplace")
run = Run.create(Path(folder.name) / "run", Config("digits-few", methods, effort=0.1, samples=30))
run.work()
page = Path(folder.name) / "run" / "report.html"
print("files of the run:", ", ".join(sorted(path.name for path in page.parent.iterdir())))

# %% [markdown]
# ## The verdict
#
# Differences are paired over test rows and have standard errors; the recommendation prefers a simple method where the
# data do not separate it from the best.

# %%
print("\n".join(run.report().verdict))
results = {row["method"]: row for row in run.results()}
keys = ("accuracy", "nll", "ece", "auroc_entropy")
print(f"\n{'':10s}" + "".join(f"{key:>15s}" for key in keys))
for name in methods:
    print(f"{name:10s}" + "".join(f"{results[name]['metrics'][key]:15.3f}" for key in keys))

# %% [markdown]
# ## Two of its numbers as a picture
#
# Left: lower is better. Right: whether the entropy separates letters from digits.

# %%
fig, axes = plt.subplots(
    1,
    2,
    figsize=(8.5, 2.8),
    layout="compressed",
    num="NLL on test digits and AUROC of letters for four methods",
)
for axis, key, title in (
    (axes[0], "nll", "NLL, nats"),
    (axes[1], "auroc_entropy", "AUROC, letters against digits"),
):
    axis.barh(methods, [results[name]["metrics"][key] for name in methods], color="#3b5b92")
    axis.set(title=title)
    axis.invert_yaxis()
axes[1].set_xlim(0.5, 1)
plt.show()
