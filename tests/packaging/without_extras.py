"""Run where bayou is installed with its dependencies alone: each extra that is missing is one
sentence.
"""

import sys
from importlib import import_module
from importlib.util import find_spec

import torch

import bayou
from bayou import *  # noqa: F403  all public names must be importable

x = torch.ones(4, 1)
posterior = bayou.fit(
    torch.nn.Linear(1, 1), (x, x), bayou.MAP(steps=2), likelihood=bayou.Gaussian(1.0), seed=0
)


def onnx():
    from bayou.operations.export import export_onnx

    export_onnx(posterior, "net.onnx", x)


def parquet():
    import bayou.data

    bayou.data.load("table.parquet", target="y")


def digits():
    import bayou.data

    bayou.data.load("digits")


def picture():
    from bayou.app.report.judge import png

    png(torch.zeros(1, 2, 2))


def report():
    from bayou.app.report.page import RunReport

    sys.modules["jinja2"] = None  # torch depends on it
    RunReport([{"label": "map", "task": "regression", "seed": 0, "metrics": {}}], {}).html()


MISSING = [
    ("sklearn", "lab", lambda: bayou.BayesRegressor),
    ("sklearn", "lab", lambda: bayou.BayesClassifier),
    ("sklearn", "lab", digits),
    ("pil", "lab", picture),
    ("jinja2", "lab", report),
    ("pyarrow", "parquet", parquet),
    ("botorch", "botorch", lambda: import_module("bayou.adapters.botorch")),
    ("onnxscript", "onnx", onnx),
    ("huggingface_hub", "hub", lambda: bayou.from_pretrained("owner/name", torch.nn.Linear(1, 1))),
    ("mlflow", "mlflow", lambda: bayou.mlflow.load_model("folder")),
    ("sbi", "sbi", lambda: import_module("bayou.adapters.sbi")),
]
problems = []
for module, extra, use in MISSING:
    if module != "jinja2" and find_spec("PIL" if module == "pil" else module) is not None:
        problems.append(f"{module} is installed here")
    try:
        use()
    except (ImportError, ValueError) as error:
        sentence = str(error)
        if (
            f"pip install 'bayou[{extra}]'" not in sentence
            or module not in sentence.lower().replace("scikit-", "sk")
        ):
            problems.append(f"{module}: {sentence}")
    else:
        problems.append(f"{module}: no error")
if problems:
    sys.exit("\n".join(problems))
