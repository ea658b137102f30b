"""Posteriors and estimators as models of MLflow."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose
from torch import nn

import bayou
from bayou.adapters.mlflow import PredictionModel

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")

X = np.random.default_rng(0).standard_normal((40, 2))
SOURCE = """
from torch import nn


def build():
    return nn.Sequential(nn.Linear(2, 6), nn.Tanh(), nn.Linear(6, {outputs}))


def build_nothing():
    return None
"""


def fitted(outputs: int) -> bayou.Posterior:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(2, 6), nn.Tanh(), nn.Linear(6, outputs))
    x = torch.as_tensor(X, dtype=torch.float32)
    y = x[:, :1] if outputs == 1 else (x[:, 0] > 0).long()
    likelihood = bayou.Gaussian(0.5) if outputs == 1 else bayou.Categorical()
    return bayou.fit(net, (x, y), bayou.VI(steps=20), likelihood=likelihood, progress=False, seed=0)


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A module with the functions that build the network of a regression."""
    (tmp_path / "houses_network.py").write_text(SOURCE.format(outputs=1))
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "houses_network", raising=False)
    return "houses_network:build"


@pytest.mark.peers
def test_a_model_of_a_posterior_predicts_a_frame_and_holds_no_pickle(
    source: str, tmp_path: Path
) -> None:
    import mlflow
    import pandas as pd

    posterior = fitted(1)
    folder = tmp_path / "model"
    bayou.mlflow.save_model(
        posterior,
        folder,
        net=source,
        samples=30,
        code_paths=[str(tmp_path / "houses_network.py")],
    )
    names = {file.name for file in folder.rglob("*") if file.is_file()}
    assert {"model.bayou", "settings.json", "houses_network.py"} <= names
    assert not [name for name in names if name.endswith((".pkl", ".pickle", ".pt", ".joblib"))]
    model = mlflow.pyfunc.load_model(str(folder))
    frame = pd.DataFrame(X, columns=["a", "b"], index=range(7, 47))
    predictions = model.predict(frame)
    expected = posterior.predict(torch.as_tensor(X, dtype=torch.float32), 30)
    assert predictions.index.equals(frame.index)
    assert_allclose(predictions["mean"], expected.mean[:, 0], rtol=1e-6)
    assert_allclose(predictions["epistemic_std"], expected.epistemic_std[:, 0], rtol=1e-6)
    lower, upper = expected.interval(0.9)
    assert_allclose(predictions["lower"], lower[:, 0], rtol=1e-6)
    assert_allclose(predictions["upper"], upper[:, 0], rtol=1e-6)
    again = bayou.mlflow.load_model(folder)
    assert torch.equal(
        again.predict(torch.zeros(1, 2)).mean, posterior.predict(torch.zeros(1, 2)).mean
    )


@pytest.mark.peers
def test_an_estimator_is_logged_to_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import mlflow
    import pandas as pd

    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    frame = pd.DataFrame({"size": X[:, 0], "town": np.where(X[:, 1] > 0, "Rome", "Bari")})
    labels = np.where(X[:, 0] > 0, "yes", "no")
    settings = {"steps": 20, "samples": 7, "prior": 1.0, "random_state": 0}
    estimator = bayou.BayesClassifier("ffg", **settings).fit(frame, labels)
    mlflow.set_tracking_uri((tmp_path / "runs").as_uri())
    with mlflow.start_run():
        info = bayou.mlflow.log_model(estimator, "houses", level=0.8)
    predictions = mlflow.pyfunc.load_model(info.model_uri).predict(frame)
    pd.testing.assert_frame_equal(predictions, estimator.predict_frame(frame, 0.8))
    again = bayou.mlflow.load_model(info.model_uri)
    assert type(again) is bayou.BayesClassifier
    assert (again.predict(frame) == estimator.predict(frame)).all()


@pytest.mark.peers
def test_the_model_of_classes_and_its_parameters() -> None:
    import pandas as pd

    posterior = fitted(2)
    model = PredictionModel(posterior, classes=["no", "yes"])
    counts = pd.DataFrame({"a": [1, 2], "b": [0, 1]})  # whole numbers become floating-point ones
    predictions = model.predict(counts, {"level": 0.5, "samples": 20})
    assert set(predictions["class"]) <= {"no", "yes"}
    x = torch.tensor([[1.0, 0.0], [2.0, 1.0]])
    assert_allclose(predictions["p[yes]"], posterior.predict(x, 20).mean[:, 1], rtol=1e-6)
    wide = model.predict(x.numpy(), {"level": 0.99, "samples": 20})
    assert (wide["upper"] - wide["lower"] > predictions["upper"] - predictions["lower"]).all()
    with pytest.raises(ValueError, match="params has 'seed'; a prediction has level and samples"):
        model.predict(counts, {"seed": 1})
    with pytest.raises(ValueError, match="rows must be numbers, got DataFrame"):
        model.predict(pd.DataFrame({"a": ["x"], "b": ["y"]}))


@pytest.mark.peers
def test_invalid_models(source: str, tmp_path: Path) -> None:
    posterior = fitted(1)
    calls: list[tuple[Any, dict[str, Any], str]] = [
        (nn.Linear(1, 1), {}, "expected a posterior of bayou.fit, .*, got Linear"),
        (posterior, {}, "name the function that builds its network"),
        (posterior, {"net": "houses"}, "net must be 'package.module:function', got 'houses'"),
        (posterior, {"net": "no_such:build"}, "net='no_such:build' cannot be imported"),
        (posterior, {"net": "houses_network:build_nothing"}, "must return an nn.Module"),
        (posterior, {"net": source, "level": 2.0}, "level must lie strictly between 0 and 1"),
        (posterior, {"net": source, "samples": 0}, "samples must be a whole number"),
        (posterior, {"net": source, "loader_module": "a"}, "loader_module is set by bayou.mlflow"),
        (bayou.BayesRegressor(), {"samples": 3}, "net, samples and classes are for posteriors"),
    ]
    for model, options, message in calls:
        with pytest.raises(ValueError, match=message):
            bayou.mlflow.save_model(model, tmp_path / "never", **options)
    assert not (tmp_path / "never").exists()


def test_without_mlflow_the_error_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(ImportError, match=r"A model of MLflow needs pandas.*bayou\[mlflow\]"):
        bayou.mlflow.load_model(tmp_path)
