"""The base class of the scikit-learn classifier and regressor: settings, held-out rows, files."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from dataclasses import KW_ONLY, dataclass, field, make_dataclass
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor, nn

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
from bayou.likelihoods.predictive import Predictive, check_level
from bayou.network.target import PriorRules
from bayou.operations import Conformal, conformal
from bayou.posteriors import FileError, Posterior, restore_any
from bayou.priors import Normal, Prior
from bayou.select import Recipe, by_name
from bayou.select.far_values import check_arrays, replace_sentinels
from bayou.select.fit import fit
from bayou.select.named import find
from bayou.select.noise_and_prior import GAIN_OF_CLASSES, GAIN_OF_NUMBERS
from bayou.select.settings import DEFAULT_METHOD, TRAINING

with extra("lab", "A scikit-learn estimator"):
    from sklearn.base import BaseEstimator
    from sklearn.utils import check_random_state
    from sklearn.utils.validation import check_is_fitted, validate_data

MAX_BATCH_ROWS = 8192  # predicted at a time
HELD_OUT_ARRAYS = ("held_x_", "held_y_")
ARRAYS = ("x_mean_", "x_scale_", "y_mean_", "y_scale_", *HELD_OUT_ARRAYS)  # of a file
NUMBERS = ("seed_", "outputs_", "n_features_in_", "flat_", "large_")  # of a file
PARAMETER_SPECS = {"likelihood": (Likelihood,), "prior": (Prior,)}  # the specs in a file
DTYPES = {"float32": torch.float32, "float64": torch.float64}

Net = str | nn.Module | Callable[[int, int], nn.Module] | None

SETTINGS = Config.settings(TRAINING)
Training: Any = make_dataclass(
    "Training", [(name, Any, None) for name in SETTINGS], kw_only=True, eq=False, repr=False
)


@dataclass(eq=False, repr=False)
class BayesEstimator(BaseEstimator, Training):  # type: ignore[misc]
    """The base class of classifier and regressor.

    Fitted, it has ``posterior_``, ``n_features_in_``, ``feature_names_in_`` and ``seed_``, the seed
    of every prediction.

    Args:
        method: a name (``bayou list methods``) or a Method.
        net: None for layers of ``hidden`` units, a name (``bayou list nets``), a function
            (features, outputs) → module, or a module.
        hidden: the units of each layer. By default 50; in a regression of more than 5,000 rows two
            layers of 128 ReLU units.
        activation: of torch.nn, by default "SiLU".
        prior: a Prior, patterns → priors, or the standard deviation of a normal; None: normals with
            a variance proportional to 1/fan-in.
        samples: draws averaged for a prediction.
        standardize: whether to shift and scale inputs (and regression targets) by the training
            data.
        input_shape: of one row, such as (1, 8, 8) for images; None: (features,).
        random_state: a whole number, which is the seed itself, or as of scikit-learn.
        device: of torch.
        dtype: "float64", or "float32", which is faster.
        verbose: as ``progress`` of ``bayou.fit``.
        conformal: the fraction of rows held out of the fit for conformal intervals or sets
            (``bayou.conformal``); None: none.

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
        """Return the rows to fit to: all, or all but a random fraction that is held out."""
        self.seed_ = self._draw_seed()
        for name in HELD_OUT_ARRAYS:
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
        held_out = np.sort(order[:count])
        fitted = np.sort(order[count:])
        self.held_x_ = X[held_out]
        self.held_y_ = y[held_out]
        return X[fitted], y[fitted]

    def _draw_seed(self) -> int:
        """Return the seed: a whole number as it is, as in bayou.fit and on the command line."""
        random_state = plain(self.random_state)
        if isinstance(random_state, int) and not isinstance(random_state, bool):
            return random_state
        return int(check_random_state(random_state).randint(2**31 - 1))

    def _conformal(self, level: float, score: str) -> Conformal:
        """Compute the conformal guarantee by the held-out rows, for standardized y."""
        check_is_fitted(self, "posterior_")
        check_level(level)
        if not hasattr(self, "held_x_"):
            raise ValueError(
                "no rows were held out for a guarantee: fit with conformal=0.2, for example"
            )
        rows = (self._inputs(self.held_x_), self._targets(self.held_y_))
        return conformal(
            self.posterior_,
            rows,
            level,
            samples=plain(self.samples),
            seed=self.seed_,
            score=score,  # type: ignore[arg-type]
        )

    def _targets(self, y: np.ndarray) -> Tensor:
        """Return targets as the network expects them."""
        dtype = self._dtype if y.dtype.kind == "f" else torch.long
        return torch.as_tensor(y, dtype=dtype, device=self.device)

    def _fit(self, X: np.ndarray, y: np.ndarray, outputs: int, likelihood: Likelihood) -> Self:
        """Fit the posterior of a new network."""
        if self.standardize:
            check_arrays(X, y, refuses_targets=getattr(self, "likelihood", None) is None)
            X = replace_sentinels(torch.tensor(X)).numpy()
        self.x_mean_, self.x_scale_ = moments(X, self.standardize)
        self.outputs_ = outputs
        self.large_ = not self._is_classifier and len(X) > nets.MAX_SMALL_NET_ROWS
        method = self._method()
        prior = self._prior()
        self.posterior_ = fit(
            self._network(),
            (self._inputs(X), self._targets(y)),
            method=method,
            likelihood=likelihood,
            prior=prior,
            seed=self.seed_,
            progress=self.verbose,
        )
        raise_if_interrupted(self.posterior_)  # a search over settings must stop at Ctrl-C, too
        return self

    @property
    def _is_classifier(self) -> bool:
        """Whether y are classes; known once the classes are."""
        return hasattr(self, "classes_")

    @property
    def _dtype(self) -> torch.dtype:
        """The dtype of the network."""
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype must be one of {', '.join(DTYPES)}, got {self.dtype!r}")
        return DTYPES[self.dtype]

    def _method(self) -> Method | Recipe:
        """Return the method, with the settings of this estimator if it is a name."""
        settings = {name: plain(getattr(self, name)) for name in SETTINGS}
        settings = {name: value for name, value in settings.items() if value is not None}
        if isinstance(self.method, str):
            return by_name(self.method, **settings)
        if not isinstance(self.method, Method | Recipe):
            raise ValueError(
                "method must be a name such as 'mnf' or a Method such as VI(MNF()), "
                f"got {self.method!r}"
            )
        for name, value in settings.items():
            method_name = type(self.method).__name__
            raise ValueError(f"{name} is a setting of the method: {method_name}({name}={value})")
        return self.method

    def _prior(self) -> PriorRules | None:
        """Return the prior, None if the method chooses it."""
        prior = plain(self.prior)
        if prior is None:
            if isinstance(self.method, str | Recipe):
                return None
            gain = GAIN_OF_CLASSES if self._is_classifier else GAIN_OF_NUMBERS
            return Normal("fan_in", gain=gain)
        return Normal(prior) if isinstance(prior, int | float) else prior

    def _network(self) -> nn.Module:
        """Build a network for the training data, determined by ``seed_``."""
        features = self.n_features_in_
        shape = (features,) if self.input_shape is None else tuple(map(int, self.input_shape))
        entries = int(np.prod(shape))
        if entries != features:
            raise ValueError(
                f"input_shape {shape} has {entries} entries, but X has {features} features"
            )
        with rng.isolated(self.seed_, torch.device("cpu")):
            net = self._build_network(shape)
            if isinstance(self.method, str):
                net = find(self.method).prepare(net)
        if not isinstance(net, nn.Module):
            raise ValueError(f"net must give an nn.Module, got {type(net).__name__}")
        if len(shape) > 1:
            net = nn.Sequential(nn.Unflatten(1, shape), net)
        return net.to(device=self.device, dtype=self._dtype)

    def _build_network(self, shape: tuple[int, ...]) -> nn.Module:
        """Build the network for rows of this shape."""
        if isinstance(self.net, str):
            return nets.build(self.net, shape, self.outputs_)
        if isinstance(self.net, nn.Module):
            return copy.deepcopy(self.net)
        if self.net is not None:
            return self.net(self.n_features_in_, self.outputs_)
        if self.large_ and self.hidden is None and self.activation is None:
            return nets.build(nets.LARGE_NET, shape, self.outputs_)
        hidden = (50,) if self.hidden is None else tuple(map(int, self.hidden))
        return layers.dense(shape, self.outputs_, hidden, self._activation())

    def _activation(self) -> str:
        """Return the name of the activation."""
        name = layers.SMOOTH if self.activation is None else self.activation
        module = getattr(nn, name, None) if isinstance(name, str) else None
        if not isinstance(module, type) or not issubclass(module, nn.Module):
            raise ValueError(
                f"activation must name one of torch.nn, such as 'SiLU' or 'ReLU', got {name!r}"
            )
        return name

    def _inputs(self, X: np.ndarray) -> Tensor:
        """Return standardized inputs."""
        standardized = (X - self.x_mean_) / self.x_scale_
        return torch.as_tensor(standardized, dtype=self._dtype, device=self.device)

    def _predictives(self, X: ArrayLike, rows: int | None = MAX_BATCH_ROWS) -> Iterator[Predictive]:
        """Yield the predictions of batches of rows, in the units of y."""
        check_is_fitted(self, "posterior_")
        x = self._inputs(validate_data(self, X, reset=False, dtype=np.float64))
        for batch in x.split(rows or len(x)):
            p = self.posterior_.predict(batch, samples=plain(self.samples), seed=self.seed_)
            yield self._in_units(p)

    def _in_units(self, p: Predictive) -> Predictive:
        """Return a prediction in the units of y."""
        return p

    def predictive(self, X: ArrayLike) -> Predictive:
        """Return the predictive distribution of y, in its units.

        Args:
            X: inputs (N, features).

        Returns:
            Moments, quantiles, entropy, mutual information and draws.
        """
        (p,) = self._predictives(X, rows=None)
        return p

    def save(self, path: StrPath) -> None:
        """Save the fitted estimator to one file: tensors and JSON, checksummed, no pickle.

        Args:
            path: the file, for ``load``.

        Raises:
            ValueError: if the labels are neither numbers nor strings.
        """
        check_is_fitted(self, "posterior_")
        state, posterior = self.posterior_.state()
        tensors = {f"posterior.{name}": value for name, value in state.items()}
        for name in ARRAYS:
            if hasattr(self, name):
                tensors[name] = torch.as_tensor(getattr(self, name))
        parameters = self.get_params(deep=False)
        if callable(parameters["verbose"]):
            parameters["verbose"] = False
        random_state = parameters["random_state"]
        parameters["random_state"] = plain(random_state) if np.isscalar(random_state) else None
        config = {
            "kind": "estimator",
            "estimator": type(self).__name__,
            "params": {name: to_json(plain(value)) for name, value in parameters.items()},
            "fitted": {name: getattr(self, name) for name in NUMBERS if hasattr(self, name)},
            "posterior": posterior,
        }
        if hasattr(self, "feature_names_in_"):
            config["feature_names"] = list(self.feature_names_in_)
        if hasattr(self, "classes_"):
            dtype = self.classes_.dtype
            labels = self.classes_.tolist()
            if not all(isinstance(label, bool | int | float | str) for label in labels):
                raise ValueError(f"labels of type {dtype} cannot be saved; use numbers or strings")
            config["classes"] = [str(dtype), labels]
        write_file(path, tensors, config)

    @classmethod
    def load(cls, path: StrPath, **parameters: Any) -> Self:
        """Load a saved estimator.

        Args:
            path: the file.
            **parameters: those that a file cannot store, such as a function ``net``.

        Raises:
            FileError: if the file is damaged, of another class, or lacks a parameter.
        """
        tensors, config = read_file(path, "estimator")
        with making("estimator", path):
            if config["estimator"] != cls.__name__:
                raise FileError(
                    f"{path} contains a {config['estimator']}; use {config['estimator']}.load"
                )
            estimator = cls(**_restore_parameters(config["params"], parameters, path))
            for name, value in config["fitted"].items():
                setattr(estimator, name, value)
            for name in ARRAYS:
                if name in tensors:
                    setattr(estimator, name, tensors[name].numpy())
            if "feature_names" in config:
                estimator.feature_names_in_ = np.array(config["feature_names"], dtype=object)
            if "classes" in config:
                dtype, classes = config["classes"]
                estimator.classes_ = np.array(classes, dtype=dtype)
            state = config["posterior"] | {"path": str(path)}
        options = {name: parameters[name] for name in ("prior", "likelihood") if name in parameters}
        estimator.posterior_ = restore_any(
            under("posterior.", tensors), state, estimator._network(), **options
        )
        return estimator


if BayesEstimator.__doc__:
    BayesEstimator.__doc__ += "".join(
        f"\n    ``{name}``: {setting.metadata['help']}." for name, setting in SETTINGS.items()
    )


def _restore_parameters(
    saved: dict[str, Any], parameters: dict[str, Any], path: StrPath
) -> dict[str, Any]:
    """Return the parameters of a file together with those that were passed, which come first."""
    restored = dict(parameters)
    for name, value in saved.items():
        if name in restored:
            continue
        try:
            restored[name] = from_json(
                value, *PARAMETER_SPECS.get(name, (Method, Recipe, GuideSpec))
            )
        except ValueError as error:
            raise FileError(f"{path}: {error}; give it again: load(path, {name}=...)") from None
    return restored


def moments(values: np.ndarray, standardize: bool) -> tuple[np.ndarray, np.ndarray]:
    """Return mean and standard deviation of every column, by which it is standardized.

    Args:
        values: (N, D).
        standardize: if not, the means are 0 and the standard deviations 1.

    Returns:
        (D,) each; the standard deviation of a constant column is 1.
    """
    columns = values.shape[1]
    if not standardize:
        return np.zeros(columns), np.ones(columns)
    mean = values.mean(0)
    scale = values.std(0)
    is_constant = scale <= 10 * np.finfo(np.float64).eps * np.abs(values).max(0)
    return mean, np.where(is_constant, 1.0, scale)


def join_batches(batches: Iterable[tuple[Tensor, ...]]) -> tuple[np.ndarray, ...]:
    """Return the tensors of all batches, joined along their rows.

    Args:
        batches: at least one; the same number of tensors each.
    """
    columns = zip(*batches, strict=True)
    return tuple(torch.cat(column).cpu().numpy() for column in columns)


def plain(value: Any) -> Any:
    """Return a numpy scalar, as in parameter grids, as a Python number.

    Args:
        value: anything; all but numpy scalars is returned as it is.
    """
    return value.item() if isinstance(value, np.generic) else value
