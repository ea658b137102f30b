# %% [markdown]
# # Serving: predictions over HTTP
#
# `bayou train table.csv --target price --out run` makes a run folder, `bayou serve run` serves it. Here both happen in
# Python, with a server on a free port of this machine. A row is an object with the columns of the training table; the
# answer has the mean, an interval, and how far the row is from the training data. Needs `pip install "bayou[serve]"`.

# %%
import csv
import json
import random
import tempfile
import threading
from http.client import HTTPConnection
from pathlib import Path

import matplotlib.pyplot as plt

from bayou.app.runs.config import Config
from bayou.app.runs.folder import Run
from bayou.app.runs.serve import Server
from bayou.app.runs.service import Service

folder = tempfile.TemporaryDirectory()
table, random_numbers = Path(folder.name) / "flats.csv", random.Random(0)
with open(table, "w", newline="") as stream:
    writer = csv.writer(stream)
    writer.writerow(["area", "heating", "price"])
    for _ in range(150):
        area, heating = random_numbers.uniform(30, 120), random_numbers.choice(["gas", "district"])
        price = (
            40
            + 2.2 * area
            + 0.012 * area**2
            - 15 * (heating == "gas")
            + random_numbers.gauss(0, 12)
        )
        writer.writerow([round(area, 1), heating, round(price, 1)])

# %% [markdown]
# ## Train a run
#
# The same as `bayou train flats.csv --target price --method laplace --fast`.

# %%
run = Run.create(
    Path(folder.name) / "run", Config(str(table), ("laplace",), target="price", effort=0.2)
)
run.work()
print("\n".join(run.report().verdict))

# %% [markdown]
# ## Ask it
#
# The second request has a typing error in the name of a column.

# %%
rows = [{"area": area, "heating": "gas"} for area in range(10, 205, 5)]
answers = []
with Server(Service.of(Path(folder.name) / "run"), port=0, quiet=True) as server:
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    for body in ({"rows": rows}, {"rows": [{"area": 70, "heatign": "gas"}]}):
        connection = HTTPConnection(*server.address, timeout=60)
        connection.request(
            "POST", "/predict", json.dumps(body), {"Content-Type": "application/json"}
        )
        answers.append(json.loads(connection.getresponse().read()))
        connection.close()
    server.shutdown()
    thread.join()
answer = answers[0]
print(json.dumps(answer["predictions"][10], indent=1))
print(answers[1])

# %%
mean = [one["mean"] for one in answer["predictions"]]
low, high = zip(*(one["interval"] for one in answer["predictions"]), strict=True)
fig, axis = plt.subplots(
    figsize=(7, 3),
    layout="compressed",
    num="Served prices over area with intervals, wider outside of the training table",
)
areas = [row["area"] for row in rows]
axis.fill_between(areas, low, high, color="#3b5b92", alpha=0.25, linewidth=0, label="90 %")
axis.plot(areas, mean, color="#3b5b92", label="mean")
with open(table) as stream:
    known = [
        (float(row["area"]), float(row["price"]))
        for row in csv.DictReader(stream)
        if row["heating"] == "gas"
    ]
axis.scatter(*zip(*known, strict=True), s=8, color="#d9743c", linewidths=0, label="table, gas")
axis.set(xlabel="area", ylabel="price")
axis.legend(frameon=False)
plt.show()
