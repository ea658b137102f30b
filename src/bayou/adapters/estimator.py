"""The base class of the scikit-learn classifier and regressor: network and method by settings,
held-out rows, files.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import KW_ONLY, dataclass, field, make_dataclass
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor, nn

from bayou._fit import fit
from bayou.app.runs import layers, nets
from bayou.app.runs.config import Config
from bayou.app.runs.interrupt import raise_if_interrupted
from bayou.core import rng
from bayou.core.extras import extra
from bayou.core.files import StrPath, making, read_file, write_file
from bayou.core.params import under
from bayou.core.progress import Show
from bayou.core.specs import from_json, to_json
from bayou.guides.guide import GuideSpec
from bayou.inference.method import Method
from bayou.likelihoods import Likelihood
from bayou.operations import Conformal, conformal
from bayou.posteriors import FileError, Posterior, restore_any
from bayou.predictive import Predictive, check_level
from bayou.priors import Normal, Prior
from bayou.select import by_name
from bayou.select.far_values import check_arrays, replace_sentinels
from bayou.select.held_out import GAIN_OF_CLASSES, GAIN_OF_NUMBERS
from bayou.select.named import find
from bayou.select.settings import DEFAULT_METHOD, TRAINING
from bayou.target import PriorRules

with extra("lab", "A scikit-learn estimator"):
    from sklearn.base import BaseEstimator
    from sklearn.utils import check_random_state
    from sklearn.utils.validation import check_is_fitted, validate_data

ROWS = 8192  # predicted at a time
HELD = ("held_x_", "held_y_")  # held-out rows
ARRAYS = ("x_mean_", "x_scale_", "y_mean_", "y_scale_", *HELD)  # of a fitted estimator
PLAIN = ("seed_", "outputs_", "n_features_in_", "flat_", "large_")
FAMILIES = {
    "likelihood": (Likelihood,),
    "prior": (Prior,),
}  # of the specs in these parameters of a file
DTYPES = {"float32": torch.float32, "float64": torch.float64}

Net = str | nn.Module | Callable[[int, int], nn.Module] | None


SETTINGS = Config.settings(TRAINING)
Training: Any = make_dataclass(
    "Training", [(name, Any, None) for name in SETTINGS], kw_only=True, eq=False, repr=False
)


@dataclass(eq=False, repr=False)
class BayesEstimator(BaseEstimator, Training):  # type: ignore[misc]
    """The base class of classifier and regressor.

    ``method``: a name (``bayou list methods``) or a Method. ``net``: None for layers of ``hidden``
    units with an ``activation`` of torch.nn, a name (``bayou list nets``), a function (features,
    outputs) → module, or a module. By default 50 SiLU units; in a regression of more than 5,000
    rows two layers of 128 ReLU units.
    ``prior``: a Prior, patterns → priors, or the standard deviation of a normal; None: normals with
    a variance proportional to 1/fan-in. ``samples``: draws averaged for a prediction.
    ``standardize``: shift and scale inputs (and regression targets) by the training data.
    ``input_shape``: of one row, such as (1, 8, 8) for images. ``verbose``: as ``progress`` of
    ``bayou.fit``. ``dtype``: "float64", or "float32", which is faster. ``conformal``: the fraction
    of rows held out of the fit for conformal intervals or sets (``bayou.conformal``).

    Fitted: ``posterior_``, ``n_features_in_``, ``feature_names_in_``, ``seed_``, the seed of every
    prediction.

    For a method by name also, with None for the default of ``bayou train``; a Method has its own
    settings:
    """

    method: str | Method = DEFAULT_METHOD
    _: KW_ONLY
    net: Net = None
    hidden: tuple[int, ...] | None = None
    activation: str | None = None
    prior: float | PriorRules | None = None
    samples: int = Config.samples
    standardize: bool = True
    input_shape: tuple[int, ...] | None = None
    random_state: Any = None
    device: str = Config.device
    dtype: str = "float64"
    verbose: Show = False
    conformal: float | None = None

    posterior_: Posterior = field(init=False)
    x_mean_: np.ndarray = field(init=False)
    x_scale_: np.ndarray = field(init=False)
    seed_: int = field(init=False)
    large_: bool = field(init=False, default=False)
    outputs_: int = field(init=False)
    n_features_in_: int = field(init=False)
    held_x_: np.ndarray = field(init=False)
    held_y_: np.ndarray = field(init=False)

    def _hold_out(self, X: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The rows to fit to: all, or all but a random fraction ``conformal``, which is held
        out.
        """
        given = plain(
            self.random_state
        )  # a whole number is the seed itself, as in bayou.fit and on the command line
        whole = isinstance(given, int) and not isinstance(given, bool)
        self.seed_ = given if whole else int(check_random_state(given).randint(2**31 - 1))
        for name in HELD:
            self.__dict__.pop(name, None)
        fraction = plain(self.conformal)
        if fraction is None:
            return X, y
        if isinstance(fraction, bool) or not isinstance(fraction, float) or not 0 < fraction < 1:
            raise ValueError(
                f"conformal must be a fraction of the rows such as 0.2, or None, got {fraction!r}"
            )
        count = round(fraction * len(X))
        if not 0 < count < len(X):
            raise ValueError(
                f"conformal={fraction} of {len(X)} rows leaves one part empty; give more rows"
            )
        order = rng.permutation(len(X), rng.fold(self.seed_, "conformal")).numpy()
        held, rest = np.sort(order[:count]), np.sort(order[count:])
        self.held_x_, self.held_y_ = X[held], y[held]
        return X[rest], y[rest]

    def _conformal(self, level: float, **options: Any) -> Conformal:
        """The conformal guarantee by the held-out rows, for standardized y."""
        check_is_fitted(self, "posterior_")
        check_level(level)
        if not hasattr(self, "held_x_"):
            raise ValueError(
                "no rows were held out for a guarantee: fit with conformal=0.2, for example"
            )
        rows = self._inputs(self.held_x_), self._targets(self.held_y_)
        return conformal(
            self.posterior_, rows, level, samples=plain(self.samples), seed=self.seed_, **options
        )

    def _targets(self, y: np.ndarray) -> Tensor:
        """Targets as the network expects them."""
        return torch.as_tensor(
            y, dtype=self._dtype if y.dtype.kind == "f" else torch.long, device=self.device
        )

    def _fit(self, X: np.ndarray, y: np.ndarray, outputs: int, likelihood: Likelihood) -> Self:
        if self.standardize:
            check_arrays(X, y, refuses_targets=getattr(self, "likelihood", None) is None)
            X = replace_sentinels(torch.tensor(X)).numpy()
        self.x_mean_, self.x_scale_ = moments(X, self.standardize)
        self.outputs_, self.large_ = (
            outputs,
            not hasattr(self, "classes_") and len(X) > nets.MANY_ROWS,
        )
        method, prior = self._method(), self._prior()
        self.posterior_ = fit(
            self._network(), (self._inputs(X), self._targets(y)), method=method, likelihood=likelihood, prior=prior,
            seed=self.seed_, progress=self.verbose,
        )  # fmt: skip
        raise_if_interrupted(self.posterior_)  # a search over settings must stop at Ctrl-C, too
        return self

    @property
    def _dtype(self) -> torch.dtype:
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype must be one of {', '.join(DTYPES)}, got {self.dtype!r}")
        return DTYPES[self.dtype]

    def _method(self) -> Method:
        given = {
            name: value for name in SETTINGS if (value := plain(getattr(self, name))) is not None
        }
        if isinstance(self.method, str):
            return by_name(self.method, **given)
        if not isinstance(self.method, Method):
            raise ValueError(
                f"method must be a name such as 'mnf' or a Method such as VI(MNF()), got {self.method!r}"
            )
        if given:
            name, me = next(iter(given)), type(self.method).__name__
            raise ValueError(f"{name} is a setting of the method: {me}({name}={given[name]})")
        return self.method

    def _prior(self) -> PriorRules | None:
        prior = plain(self.prior)
        if prior is None:
            if isinstance(self.method, str) or self.method.chooses_prior:
                return None
            return Normal(
                "fan_in", gain=GAIN_OF_CLASSES if hasattr(self, "classes_") else GAIN_OF_NUMBERS
            )
        return Normal(prior) if isinstance(prior, int | float) else prior

    def _network(self) -> nn.Module:
        """A network for the training data, determined by ``seed_``."""
        features, outputs = self.n_features_in_, self.outputs_
        shape = (features,) if self.input_shape is None else tuple(map(int, self.input_shape))
        if int(np.prod(shape)) != features:
            raise ValueError(
                f"input_shape {shape} has {int(np.prod(shape))} entries, but X has {features} features"
            )
        with rng.isolated(self.seed_, torch.device("cpu")):
            if isinstance(self.net, str):
                net = nets.build(self.net, shape, outputs)
            elif isinstance(self.net, nn.Module):
                net = copy.deepcopy(self.net)
            elif self.net is not None:
                net = self.net(features, outputs)
            elif self.large_ and self.hidden is None and self.activation is None:
                net = nets.build(nets.LARGE, shape, outputs)
            else:
                hidden = (50,) if self.hidden is None else tuple(map(int, self.hidden))
                net = layers.dense(shape, outputs, hidden, self._activation())
            if isinstance(self.method, str):
                net = find(self.method).prepare(net)
        if not isinstance(net, nn.Module):
            raise ValueError(f"net must give an nn.Module, got {type(net).__name__}")
        if len(shape) > 1:
            net = nn.Sequential(nn.Unflatten(1, shape), net)
        return net.to(device=self.device, dtype=self._dtype)

    def _activation(self) -> str:
        name = layers.SMOOTH if self.activation is None else self.activation
        kind = getattr(nn, name, None) if isinstance(name, str) else None
        if not isinstance(kind, type) or not issubclass(kind, nn.Module):
            raise ValueError(
                f"activation must name one of torch.nn, such as 'SiLU' or 'ReLU', got {name!r}"
            )
        return name

    def _inputs(self, X: np.ndarray) -> Tensor:
        return torch.as_tensor(
            (X - self.x_mean_) / self.x_scale_, dtype=self._dtype, device=self.device
        )

    def _predictives(self, X: Any, rows: int | None = ROWS) -> Iterator[Predictive]:
        check_is_fitted(self, "posterior_")
        X = validate_data(self, X, reset=False, dtype=np.float64)
        x = self._inputs(X)
        for part in x.split(rows or len(x)):
            yield self._in_units(
                self.posterior_.predict(part, samples=plain(self.samples), seed=self.seed_)
            )

    def _in_units(self, p: Predictive) -> Predictive:
        return p

    def predictive(self, X: Any) -> Predictive:
        """The predictive distribution of y, in its units: moments, quantiles, entropy, mutual
        information, draws.
        """
        (p,) = self._predictives(X, rows=None)
        return p

    def save(self, path: StrPath) -> None:
        """Write the fitted estimator to one file for ``load``: tensors and JSON, checksummed, no
        pickle.
        """
        check_is_fitted(self, "posterior_")
        tensors, posterior = self.posterior_.state()
        tensors = {f"posterior.{name}": value for name, value in tensors.items()}
        tensors |= {
            name: torch.as_tensor(getattr(self, name)) for name in ARRAYS if hasattr(self, name)
        }
        params = self.get_params(deep=False)
        params["verbose"] = False if callable(params["verbose"]) else params["verbose"]
        params["random_state"] = (
            plain(params["random_state"]) if np.isscalar(params["random_state"]) else None
        )
        config = {
            "kind": "estimator",
            "estimator": type(self).__name__,
            "params": {name: to_json(plain(value)) for name, value in params.items()},
            "fitted": {name: getattr(self, name) for name in PLAIN if hasattr(self, name)},
            "posterior": posterior,
        }
        if hasattr(self, "feature_names_in_"):
            config["feature_names"] = list(self.feature_names_in_)
        if hasattr(self, "classes_"):
            kind, labels = self.classes_.dtype, self.classes_.tolist()
            if not all(isinstance(label, bool | int | float | str) for label in labels):
                raise ValueError(f"labels of type {kind} cannot be saved; use numbers or strings")
            config["classes"] = [str(kind), labels]
        write_file(path, tensors, config)

    @classmethod
    def load(cls, path: StrPath, **given: Any) -> Self:
        """The estimator of a file. Parameters that a file cannot store, such as a function ``net``,
        are given again.
        """
        tensors, config = read_file(path, "estimator")
        with making("estimator", path):
            if config["estimator"] != cls.__name__:
                raise FileError(
                    f"{path} contains a {config['estimator']}; use {config['estimator']}.load"
                )
            params = dict(given)
            for name, value in config["params"].items():
                if name not in params:
                    try:
                        params[name] = from_json(value, *FAMILIES.get(name, (Method, GuideSpec)))
                    except ValueError as error:
                        raise FileError(
                            f"{path}: {error}; give it again: load(path, {name}=...)"
                        ) from None
            self = cls(**params)
            for name, value in config["fitted"].items():
                setattr(self, name, value)
            for name in ARRAYS:
                if name in tensors:
                    setattr(self, name, tensors[name].numpy())
            if "feature_names" in config:
                self.feature_names_in_ = np.array(config["feature_names"], dtype=object)
            if "classes" in config:
                dtype, classes = config["classes"]
                self.classes_ = np.array(classes, dtype=dtype)
            state = config["posterior"] | {"path": str(path)}
        options = {name: given[name] for name in ("prior", "likelihood") if name in given}
        self.posterior_ = restore_any(
            under("posterior.", tensors), state, self._network(), **options
        )
        return self


if BayesEstimator.__doc__:
    BayesEstimator.__doc__ += "".join(
        f"\n    ``{name}``: {one.metadata['help']}." for name, one in SETTINGS.items()
    )


def moments(values: np.ndarray, wanted: bool) -> tuple[np.ndarray, np.ndarray]:
    """Mean and standard deviation of every column, 1 where it is constant; 0 and 1 without
    standardization.
    """
    columns = values.shape[1]
    if not wanted:
        return np.zeros(columns), np.ones(columns)
    mean, scale = values.mean(0), values.std(0)
    flat = scale <= 10 * np.finfo(np.float64).eps * np.abs(values).max(0)
    return mean, np.where(flat, 1.0, scale)


def plain(value: Any) -> Any:
    """A numpy scalar, as in parameter grids, as a Python number."""
    return value.item() if isinstance(value, np.generic) else value
