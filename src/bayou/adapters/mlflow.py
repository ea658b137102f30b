"""Posteriors and estimators as models of MLflow, whose predictions have intervals.

bayou.mlflow.log_model(posterior, "houses", net="houses.network:build", code_paths=["houses"])
frame = mlflow.pyfunc.load_model("models:/houses/1").predict(rows)   # mean, std, lower, upper, ...

The files hold tensors and JSON. MLflow imports this module to load them (its ``loader_module``), so
that nothing is pickled.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

import numpy as np
import torch
from torch import Tensor, nn

from bayou import __version__
from bayou.adapters.prediction_frames import prediction_frame
from bayou.core.extras import extra
from bayou.core.files import FileError, StrPath, making, read_bytes, write_text
from bayou.likelihoods.predictive import check_level
from bayou.posteriors import Posterior, load
from bayou.posteriors.posterior import check_count

if TYPE_CHECKING:
    import pandas as pd

MODEL = "model.bayou"  # files of the data folder of a model
SETTINGS = "settings.json"
DATA = "data"  # that folder, as MLflow names it
ESTIMATORS = ("BayesClassifier", "BayesRegressor")
REQUIREMENTS = ("torch", "numpy", "pandas")  # of a model, in the versions that wrote it
PARAMETERS = ("level", "samples")  # of a call of predict


@final
@dataclass
class PredictionModel:
    """A model of MLflow: rows to a data frame of predictions.

    Args:
        model: a posterior, or a fitted ``BayesClassifier`` or ``BayesRegressor``.
        level: the probability of the interval. Default: 0.9.
        samples: draws averaged for a prediction; None (the default) for those of the posterior or
            of the estimator.
        classes: the labels of a posterior's classes; None (the default) for 0, 1, ...
    """

    model: Any
    level: float = 0.9
    samples: int | None = None
    classes: Sequence[Any] | None = None

    def __post_init__(self) -> None:
        check_level(self.level)
        if self.samples is not None:
            check_count(self.samples, "samples", 1)

    def get_raw_model(self) -> Any:
        """Return the posterior or the estimator; MLflow's ``PyFuncModel`` has a method for it."""
        return self.model

    def predict(self, model_input: Any, params: Mapping[str, Any] | None = None) -> pd.DataFrame:
        """Return predictions with the columns of ``BayesRegressor.predict_frame``.

        Args:
            model_input: rows: a data frame, whose columns are inputs in this order, or an array.
            params: "level" and "samples" for this call; None (the default) for those of the model.

        Raises:
            ValueError: for other parameters, and for rows that do not suit the model.
        """
        settings = {"level": self.level, "samples": self.samples} | dict(params or {})
        unknown = sorted(settings.keys() - set(PARAMETERS))
        if unknown:
            raise ValueError(
                f"params has {unknown[0]!r}; a prediction has {' and '.join(PARAMETERS)}"
            )
        index = getattr(model_input, "index", None)
        if not isinstance(self.model, Posterior):
            if settings["samples"] is not None:
                raise ValueError(
                    "samples is a parameter of the estimator: "
                    f"{type(self.model).__name__}(samples={settings['samples']})"
                )
            frame: pd.DataFrame = self.model.predict_frame(model_input, settings["level"])
            return frame
        x = _rows_of(model_input, self.model)
        predictive = self.model.predict(x, settings["samples"])
        return prediction_frame([predictive], settings["level"], classes=self.classes, index=index)


def save_model(
    model: Any,
    path: StrPath,
    *,
    net: str | None = None,
    level: float = 0.9,
    samples: int | None = None,
    classes: Sequence[Any] | None = None,
    **options: Any,
) -> None:
    """Save a posterior or an estimator as a model of MLflow in a folder.

    Args:
        model: a posterior, or a fitted ``BayesClassifier`` or ``BayesRegressor``, whose network is
            in its file.
        path: the folder, which must not exist.
        net: the function without arguments that builds the network of a posterior, as
            "package.module:function"; it is called when the model is loaded. ``code_paths`` of
            MLflow puts its source into the model. None (the default) for an estimator.
        level: the probability of the interval. Default: 0.9.
        samples: draws averaged for a prediction of a posterior; None (the default) for 100.
        classes: the labels of a posterior's classes; None (the default) for 0, 1, ...
        **options: of ``mlflow.pyfunc.save_model``, such as ``signature``, ``input_example``,
            ``code_paths`` and ``pip_requirements``, which are by default bayou, torch, numpy and
            pandas in their versions.

    Raises:
        ImportError: if mlflow is not installed.
        ValueError: for another model, or a network that cannot be built or does not fit.

    Example:
        >>> bayou.mlflow.save_model(posterior, "model", net="houses.network:build")
    """
    pyfunc = _import_pyfunc()
    with tempfile.TemporaryDirectory() as parent:
        folder = _write_data(model, Path(parent) / DATA, net, level, samples, classes)
        pyfunc.save_model(path=str(path), **_pyfunc_options(folder, options))


def log_model(
    model: Any,
    name: str,
    *,
    net: str | None = None,
    level: float = 0.9,
    samples: int | None = None,
    classes: Sequence[Any] | None = None,
    **options: Any,
) -> Any:
    """Log a posterior or an estimator to the active run of MLflow, as a model with intervals.

    Args:
        model: as of ``save_model``.
        name: of the model.
        net: as of ``save_model``.
        level: as of ``save_model``.
        samples: as of ``save_model``.
        classes: as of ``save_model``.
        **options: of ``mlflow.pyfunc.log_model``, such as ``registered_model_name``.

    Returns:
        The ``ModelInfo`` of MLflow, with its ``model_uri``.

    Raises:
        ImportError: if mlflow is not installed.
        ValueError: as of ``save_model``.

    Example:
        >>> info = bayou.mlflow.log_model(model, "houses", input_example=frame[:2])
        >>> mlflow.pyfunc.load_model(info.model_uri).predict(frame)
    """
    pyfunc = _import_pyfunc()
    with tempfile.TemporaryDirectory() as parent:
        folder = _write_data(model, Path(parent) / DATA, net, level, samples, classes)
        return pyfunc.log_model(name=name, **_pyfunc_options(folder, options))


def load_model(uri: StrPath) -> Any:
    """Load the posterior or the estimator of a model, with all its methods.

    ``mlflow.pyfunc.load_model`` returns a model with ``predict`` alone.

    Args:
        uri: a folder, or an address such as "models:/houses/1".

    Returns:
        The posterior or the estimator.

    Raises:
        ImportError: if mlflow is not installed.
        ValueError: for a model of another library.
    """
    loaded = _import_pyfunc().load_model(str(uri))
    module = loaded.loader_module
    if module != __name__:
        raise ValueError(
            f"{uri} is a model of {module}, not of bayou.mlflow; use mlflow.pyfunc.load_model"
        )
    return loaded.get_raw_model()


def _load_pyfunc(path: str) -> PredictionModel:
    """Return the model in a folder, which MLflow calls by this name.

    Args:
        path: the data folder of the model.
    """
    settings_path = Path(path) / SETTINGS
    model_path = Path(path) / MODEL
    with making("model", settings_path):
        settings = json.loads(read_bytes(settings_path))
        estimator = settings["estimator"]
        net = settings["net"]
        options = {name: settings[name] for name in ("level", "samples", "classes")}
    if estimator is not None:
        if estimator not in ESTIMATORS:
            raise FileError(f"{settings_path} has {estimator!r:.40}, which is no estimator")
        import bayou

        return PredictionModel(getattr(bayou, estimator).load(model_path), **options)
    return PredictionModel(load(model_path, _build_network(net)), **options)


def _import_pyfunc() -> Any:
    """Import the module of MLflow for functions of Python."""
    with extra("mlflow", "A model of MLflow"):
        import pandas  # noqa: F401
        from mlflow import pyfunc
    return pyfunc


def _pyfunc_options(folder: Path, options: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of MLflow that load a model by this module."""
    reserved = {"python_model", "loader_module", "data_path", "artifacts"} & options.keys()
    if reserved:
        raise ValueError(f"{min(reserved)} is set by bayou.mlflow; leave it out")
    defaults: dict[str, Any] = {"loader_module": __name__, "data_path": str(folder)}
    if not {"conda_env", "pip_requirements", "extra_pip_requirements"} & options.keys():
        modules = [(name, import_module(name).__version__) for name in REQUIREMENTS]
        versions = [f"{name}=={version.partition('+')[0]}" for name, version in modules]
        defaults["pip_requirements"] = [f"bayou=={__version__}", *versions]
    return defaults | options


def _write_data(
    model: Any,
    folder: Path,
    net: str | None,
    level: float,
    samples: int | None,
    classes: Sequence[Any] | None,
) -> Path:
    """Write the files of a model, and load them as a test."""
    is_posterior = isinstance(model, Posterior)
    estimator = None if is_posterior else type(model).__name__
    if not is_posterior and estimator not in ESTIMATORS:
        raise ValueError(
            "expected a posterior of bayou.fit, a BayesClassifier or a BayesRegressor, got "
            f"{type(model).__name__}"
        )
    if is_posterior and net is None:
        raise ValueError(
            "a file of a posterior has no code: name the function that builds its network, "
            "net='package.module:function'"
        )
    if not is_posterior and (net, samples, classes) != (None, None, None):
        raise ValueError(f"net, samples and classes are for posteriors; {estimator} has its own")
    PredictionModel(model, level, samples)  # checks the settings
    folder.mkdir()
    model.save(folder / MODEL)
    settings = {
        "estimator": estimator,
        "net": net,
        "level": level,
        "samples": samples,
        "classes": None if classes is None else list(classes),
    }
    write_text(folder / SETTINGS, json.dumps(settings))
    _load_pyfunc(str(folder))
    return folder


def _build_network(name: Any) -> nn.Module:
    """Return the network that a function builds, by the name of the function."""
    module_name, _, function_name = str(name).partition(":")
    if not isinstance(name, str) or not module_name or not function_name.isidentifier():
        raise ValueError(f"net must be 'package.module:function', got {name!r:.60}")
    try:
        function = getattr(import_module(module_name), function_name)
    except (ImportError, AttributeError) as error:
        raise ValueError(
            f"net={name!r} cannot be imported: {error}; give MLflow its source by code_paths=[...]"
        ) from error
    network = function()
    if not isinstance(network, nn.Module):
        raise ValueError(f"{name} must return an nn.Module, got {type(network).__name__}")
    return network


def _rows_of(model_input: Any, posterior: Posterior) -> Tensor:
    """Return the rows of a frame, as floating-point numbers, or of an array as they are."""
    like = next(iter(posterior.template().values()))
    try:
        if hasattr(model_input, "to_numpy"):
            x = torch.tensor(np.asarray(model_input.to_numpy(), dtype=np.float64))
        else:
            x = torch.tensor(np.asarray(model_input))
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"rows must be numbers, got {type(model_input).__name__}: {error}; BayesRegressor and "
            "BayesClassifier encode columns of words and dates"
        ) from None
    return x.to(like.device, like.dtype) if x.is_floating_point() else x.to(like.device)
