"""The base class of the scikit-learn classifier and regressor: settings, held-out rows, files."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass, field, make_dataclass
from typing import TYPE_CHECKING, Any, Self, final

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor, nn

from bayou.adapters.frames import FrameEncoder
from bayou.adapters.prediction_frames import prediction_frame
from bayou.adapters.watching import sample_rows, watch_rows
from bayou.app.runs import layers, nets
from bayou.app.runs.config import Config
from bayou.app.runs.interrupt import raise_if_interrupted
from bayou.app.runs.net_choice import choose_net
from bayou.core import rng
from bayou.core.extras import extra
from bayou.core.files import StrPath, making, read_file, write_file
from bayou.core.params import under
from bayou.core.progress import Show
from bayou.core.specs import from_json, to_json
from bayou.data.dates import Date
from bayou.data.encoders import Category, Number
from bayou.data.reading import RawTable, is_frame, read_frame
from bayou.diagnostics import ShiftReport
from bayou.guides.guide import GuideSpec
from bayou.inference.method import Method
from bayou.likelihoods import Likelihood
from bayou.likelihoods.predictive import Predictive
from bayou.network.target import PriorRules
from bayou.networks import TableLayout
from bayou.operations import Calibration, calibrate
from bayou.operations.ood import Detector, fit as fit_detector
from bayou.posteriors import FileError, Posterior
from bayou.posteriors.loading import restore_posterior
from bayou.posteriors.state import SavedState
from bayou.priors import Normal, Prior
from bayou.select import Recipe, by_name
from bayou.select.far_values import replace_in_array
from bayou.select.fit import fit
from bayou.select.named import find
from bayou.select.noise_and_prior import GAIN_OF_CLASSES, GAIN_OF_NUMBERS
from bayou.select.recipes import Standardized
from bayou.select.settings import DEFAULT_METHOD, TRAINING
from bayou.training.blocks import Blocks
from bayou.training.data import Rows
from bayou.training.rows import check_held_out
from bayou.training.seeds import part_seed

with extra("lab", "A scikit-learn estimator"):
    from sklearn.base import BaseEstimator
    from sklearn.utils import check_random_state
    from sklearn.utils.validation import check_consistent_length, check_is_fitted, validate_data

    from bayou.adapters.guarantees import HELD_OUT_ARRAYS, HELD_OUT_VALUES, ConformalRows

if TYPE_CHECKING:
    import pandas as pd

MAX_BATCH_ROWS = 8192  # predicted at a time
ARRAYS = ("x_mean_", "x_scale_", "y_mean_", "y_scale_", *HELD_OUT_ARRAYS)  # of a file
# Of a file:
NUMBERS = (
    "seed_",
    "outputs_",
    "n_features_in_",
    "flat_",
    "large_",
    "net_",
    "ranks_",
    "notes_",
    *HELD_OUT_VALUES,
)
PARAMETER_SPECS = {"likelihood": (Likelihood,), "prior": (Prior,)}  # the specs in a file
DTYPES = {"float32": torch.float32, "float64": torch.float64}

Net = str | nn.Module | Callable[[int, int], nn.Module] | None

SETTINGS = Config.settings(TRAINING)
Training: Any = make_dataclass(
    "Training", [(name, Any, None) for name in SETTINGS], kw_only=True, eq=False, repr=False
)


@final
@dataclass(frozen=True, eq=False)
class FittedRows:
    """The rows of a fit.

    Args:
        x: inputs (N, features).
        y: targets or the codes of classes, (N,) or (N, D).
        groups: the group of each row; None for none.
        times: the time of each row; None for none.
    """

    x: np.ndarray
    y: np.ndarray
    groups: ArrayLike | None = None
    times: ArrayLike | None = None

    def at(self, index: np.ndarray) -> FittedRows:
        """Return some of the rows.

        Args:
            index: their numbers.
        """
        groups = None if self.groups is None else np.asarray(self.groups)[index]
        times = None if self.times is None else np.asarray(self.times)[index]
        return FittedRows(self.x[index], self.y[index], groups, times)


@dataclass(eq=False, repr=False)
class BayesEstimator(ConformalRows, BaseEstimator, Training):  # type: ignore[misc]
    """The base class of classifier and regressor.

    Fitted, it has ``posterior_``, ``n_features_in_``, ``feature_names_in_`` and ``seed_``, the seed
    of every prediction.

    X is an array, or a data frame of pandas or polars, whose columns of numbers, categories,
    booleans, text and dates become inputs as those of a CSV file do in ``bayou train``; they may
    have missing values. ``notes_`` says what became of them. With ``standardize=False`` or an
    ``input_shape`` a frame must have numbers only, like an array.

    Args:
        method: a name (``bayou list methods``) or a Method.
        net: None for layers of ``hidden`` units, a name (``bayou list nets``), a function
            (features, outputs) → module, or a module.
        hidden: the units of each layer. By default 50; in a regression of more than 5,000 rows two
            layers of 128 ReLU units. From 2,000 rows on this default is compared with the network
            "table" (``bayou list nets``) on held-out rows, and ``net_`` has the better one.
        activation: of torch.nn, by default "SiLU".
        prior: a Prior, patterns → priors, or the standard deviation of a normal; None: normals with
            a variance proportional to 1/fan-in.
        samples: draws averaged for a prediction.
        standardize: whether to shift and scale inputs (and regression targets) by the training
            data.
        input_shape: of one row, such as (1, 8, 8) for images; None: (features,), or the inputs
            that the columns of a data frame become.
        random_state: a whole number, which is the seed itself, or as of scikit-learn.
        device: of torch.
        dtype: "float64", or "float32", which is faster.
        verbose: as ``progress`` of ``bayou.fit``.
        conformal: the fraction of rows held out of the fit for conformal intervals or sets
            (``bayou.conformal``); None: none, or those of ``conformalize``.
        ood: whether to fit a detector of unusual inputs for ``ood_p_value``. Its p-values are
            exact if rows are held out by ``conformal``; else too small, since the posterior has
            seen the rows that they are ranked among (``bayou.ood.fit``).

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
    ood: bool = False

    posterior_: Posterior = field(init=False)
    x_mean_: np.ndarray = field(init=False)
    x_scale_: np.ndarray = field(init=False)
    seed_: int = field(init=False)
    large_: bool = field(init=False, default=False)
    net_: str | None = field(init=False, default=None)
    layout_: TableLayout | None = field(init=False, default=None)
    table_: FrameEncoder | None = field(init=False, default=None)
    notes_: list[str] = field(init=False)
    outputs_: int = field(init=False)
    n_features_in_: int = field(init=False)
    detector_: Detector | None = field(init=False, default=None)
    train_x_: np.ndarray = field(init=False)

    def _read_training(
        self, X: ArrayLike, y: object, **checks: Any
    ) -> tuple[np.ndarray | RawTable, np.ndarray]:
        """Return the inputs of a fit, an array or the columns of a data frame, and its targets.

        Args:
            X: inputs.
            y: targets.
            **checks: of the targets, for ``validate_data``.
        """
        if not is_frame(X) or self.input_shape is not None or not self.standardize:
            inputs, targets = validate_data(self, X, y, dtype=np.float64, **checks)
            return inputs, targets
        targets = validate_data(self, y=y, **checks)
        table = read_frame(X)
        columns = list(table.columns.values())
        check_consistent_length(columns[0], targets)
        self.n_features_in_ = len(columns)
        names = list(X.columns)  # type: ignore[union-attr]
        if all(isinstance(name, str) for name in names):
            self.feature_names_in_: NDArray[Any] = np.array(names, dtype=object)
        return table, targets

    def _encode_training(self, X: np.ndarray | RawTable, index: np.ndarray) -> np.ndarray:
        """Return the inputs of all rows, the columns of a frame by the statistics of some."""
        self.table_ = None
        self.notes_ = []
        if isinstance(X, np.ndarray):
            return X
        self.table_ = FrameEncoder.fit(X, index, self.notes_)
        return self.table_.encode(X)

    def _encode(self, X: ArrayLike) -> np.ndarray:
        """Return the inputs of new rows, (N, features)."""
        check_is_fitted(self, "posterior_")
        if self.table_ is None:
            inputs: np.ndarray = validate_data(self, X, reset=False, dtype=np.float64)
            return inputs
        if is_frame(X):
            table = read_frame(X)
            self.table_.check_names(list(table.columns))
        else:
            rows = validate_data(self, X, reset=False, dtype=None, ensure_all_finite=False)
            table = self.table_.table_of(rows)
        return self.table_.encode(table)

    def _hold_out(
        self,
        X: np.ndarray | RawTable,
        y: np.ndarray,
        groups: ArrayLike | None,
        times: ArrayLike | None,
    ) -> FittedRows:
        """Return the rows to fit to: all, or all but a fraction that is held out.

        They are random rows, whole groups or the latest rows. The columns of a frame are encoded
        by the statistics of the rows to fit to.
        """
        self.seed_ = self._draw_seed()
        count = len(y)
        blocks = Blocks.of(count, groups, times)
        self._forget_held_out()
        fraction = plain(self.conformal)
        if fraction is None:
            return FittedRows(self._encode_training(X, np.arange(count)), y, groups, times)
        if isinstance(fraction, bool) or not isinstance(fraction, float) or not 0 < fraction < 1:
            raise ValueError(
                f"conformal must be a fraction of the rows such as 0.2, or None, got {fraction!r}"
            )
        if not 0 < round(fraction * count) < count:
            raise ValueError(
                f"conformal={fraction} of {count} rows leaves one part empty; give more rows"
            )
        rows = Rows((y, y), torch.arange(count), count, blocks)
        fitted, held_out = rows.split(fraction, part_seed(self.seed_, "conformal"))
        inputs = self._encode_training(X, fitted.index.numpy())
        self.held_x_ = inputs[held_out.index.numpy()]
        self.held_y_ = y[held_out.index.numpy()]
        return FittedRows(inputs, y, groups, times).at(fitted.index.numpy())

    def _draw_seed(self) -> int:
        """Return the seed: a whole number as it is, as in bayou.fit and on the command line."""
        random_state = plain(self.random_state)
        if isinstance(random_state, int) and not isinstance(random_state, bool):
            return random_state
        return int(check_random_state(random_state).randint(2**31 - 1))

    def calibrate(self, X: ArrayLike, y: ArrayLike, *, map: str = "temperature") -> Calibration:
        """Calibrate the predictions by rows that the fit has not seen; see ``bayou.calibrate``.

        The map belongs to ``posterior_`` and to the file of the estimator, and replaces an earlier
        one.

        Args:
            X: inputs (N, features).
            y: their targets, as of ``fit``.
            map: the name of the map; "temperature" by default; "auto" chooses by cross-validation.

        Returns:
            The map, and the NLL of these rows before and after, of standardized targets.

        Raises:
            ValueError: for labels that the fit has not seen, or too few rows for the map.
        """
        posterior = self._fitted_posterior()
        return calibrate(
            posterior,
            self._new_rows(X, y),
            map=map,
            samples=posterior.draws_to_average(plain(self.samples)),
            seed=self.seed_,
        )

    def _targets(self, y: np.ndarray) -> Tensor:
        """Return targets as the network expects them."""
        dtype = self._dtype if y.dtype.kind == "f" else torch.long
        return torch.as_tensor(y, dtype=dtype, device=self.device)

    def _fit(self, rows: FittedRows, outputs: int, likelihood: Likelihood | str) -> Self:
        """Fit the posterior of a new network; targets of a likelihood by name have their units."""
        X = rows.x
        y = rows.y
        if self.standardize:
            has_default_likelihood = getattr(self, "likelihood", None) is None
            X = replace_in_array(X, y, refuses_targets=has_default_likelihood)
        is_scaled = self.standardize and self.table_ is None  # else the encoders have scaled them
        self.train_x_ = sample_rows(X, self.seed_)
        self.x_mean_, self.x_scale_ = moments(X, is_scaled)
        if is_scaled and len(X) > 1:
            # New values of a column that is constant here are ignored: nothing is known of them.
            self.x_scale_[np.ptp(X, axis=0) == 0] = np.inf
        self.outputs_ = outputs
        self.large_ = not self._is_classifier and len(X) > nets.MAX_SMALL_NET_ROWS
        method = self._method()
        prior = self._prior()
        if isinstance(likelihood, str) and isinstance(method, Method) and self.standardize:
            method = Standardized(method)
        tensors = (self._inputs(X), self._targets(y))
        self._choose_net(*tensors, likelihood)
        self.posterior_ = fit(
            self._network(),
            tensors,
            method=method,
            likelihood=likelihood,
            prior=prior,
            groups=rows.groups,
            times=rows.times,
            seed=self.seed_,
            progress=self.verbose,
        )
        raise_if_interrupted(self.posterior_)  # a search over settings must stop at Ctrl-C, too
        self.detector_ = self._fit_detector(tensors) if self.ood else None
        return self

    def _fit_detector(self, rows: tuple[Tensor, Tensor]) -> Detector:
        """Fit a detector of unusual inputs to the training rows, and rank it by held-out rows."""
        held_out = None
        if hasattr(self, "held_x_"):
            held_out = (self._inputs(self.held_x_), self._targets(self.held_y_))
        return fit_detector(
            self.posterior_, rows, held_out=held_out, samples=plain(self.samples), seed=self.seed_
        )

    def ood_p_value(self, X: ArrayLike) -> np.ndarray:
        """Return how usual the inputs are: small p-values are unusual.

        Of rows like the training rows a fraction u has a p-value of u at most
        (``bayou.ood.fit``). This needs ``ood=True``.

        Args:
            X: inputs (N, features).

        Returns:
            The p-value of the combined scores, (N,).

        Raises:
            ValueError: without a detector.
        """
        x = self._inputs(self._encode(X))
        if self.detector_ is None:
            raise ValueError("this estimator has no detector of unusual inputs: fit with ood=True")
        p_values: np.ndarray = self.detector_.score(x).p_value.cpu().numpy()
        return p_values

    def _choose_net(self, x: Tensor, y: Tensor, likelihood: Likelihood | str) -> None:
        """Set the name of the network and the layout of its columns, where these are not given."""
        self.net_ = self.net if isinstance(self.net, str) else None
        shape = self._shape()
        has_default_net = self.net is None and self.hidden is None and self.activation is None
        needs_net = not isinstance(self.method, str) or find(self.method).needs_net
        if has_default_net and needs_net and nets.is_compared(shape, len(x)):
            plain = nets.LARGE_NET if self.large_ else nets.SMALL_NET
            given = likelihood if isinstance(likelihood, Likelihood) else None
            choice = choose_net(plain, x, y, self.outputs_, given, self.seed_)
            self.net_ = choice.name
        self.layout_ = None
        if self.net_ is not None and len(shape) == 1:
            self.layout_ = nets.layout_for(self.net_, x)

    def _shape(self) -> tuple[int, ...]:
        """Return the shape of one row, or raise a ValueError if it does not fit the features."""
        features = self._inputs_of_network
        shape = (features,) if self.input_shape is None else tuple(map(int, self.input_shape))
        entries = int(np.prod(shape))
        if entries != features:
            raise ValueError(
                f"input_shape {shape} has {entries} entries, but X has {features} features"
            )
        return shape

    @property
    def _inputs_of_network(self) -> int:
        """The number of inputs: those that the columns of a frame became, else the features."""
        return self.n_features_in_ if self.table_ is None else len(self.table_.features)

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
        shape = self._shape()
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
        if self.net_ is not None:
            return nets.build(self.net_, shape, self.outputs_, layout=self.layout_)
        if isinstance(self.net, str):  # in files of earlier versions
            return nets.build(self.net, shape, self.outputs_)
        if isinstance(self.net, nn.Module):
            return copy.deepcopy(self.net)
        if self.net is not None:
            return self.net(self._inputs_of_network, self.outputs_)
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
        x = self._inputs(self._encode(X))
        for batch in x.split(rows or len(x)):
            samples = self.posterior_.draws_to_average(plain(self.samples))
            p = self.posterior_.predict(batch, samples=samples, seed=self.seed_)
            yield self._in_units(p)

    def update(self, X: ArrayLike, y: ArrayLike, *, forget: float | None = None) -> Self:
        """Add rows to the fitted posterior, in milliseconds and without the rows of the fit.

        Columns are encoded and scaled as those of the fit, y has its units. See
        ``Posterior.update`` for the methods that can do this and how exact they are; ``method``
        "laplace-last", "vbll" and "wide" are exact for numbers.

        Args:
            X: new rows (N, features), an array or a data frame.
            y: their targets or labels.
            forget: the weight that is left to all earlier rows, in (0, 1]; None (default) for 1.

        Returns:
            The estimator itself, with another ``posterior_``.

        Raises:
            ValueError: for a method that cannot be updated, for rows that do not suit the fit, and
                for rows that are held out for a conformal guarantee.
        """
        posterior = self._fitted_posterior()
        rows = self._new_rows(X, y)
        self._check_not_held_out(rows)
        self.posterior_ = posterior.update(rows, forget=forget)
        return self

    def downdate(self, X: ArrayLike, y: ArrayLike) -> Self:
        """Remove rows from the fitted posterior exactly; see ``Posterior.downdate``.

        Args:
            X: rows of the fit or of an update, (N, features).
            y: their targets or labels.

        Returns:
            The estimator itself, with another ``posterior_``.

        Raises:
            ValueError: where that is not exact, or the rows were not in the posterior, such as
                those held out for a conformal guarantee.
        """
        posterior = self._fitted_posterior()
        rows = self._new_rows(X, y)
        self._check_not_held_out(rows)
        self.posterior_ = posterior.downdate(rows)
        return self

    def _check_not_held_out(self, rows: tuple[Tensor, Tensor]) -> None:
        """Raise a ValueError if rows to learn or to remove are held out for a guarantee."""
        if hasattr(self, "held_x_"):
            check_held_out((self._inputs(self.held_x_), self._targets(self.held_y_)), rows)

    def _fitted_posterior(self) -> Posterior:
        """Return the fitted posterior; an error if there is none."""
        check_is_fitted(self, "posterior_")
        return self.posterior_

    def _new_rows(self, X: ArrayLike, y: ArrayLike) -> tuple[Tensor, Tensor]:
        """Return further rows as the network takes them."""
        inputs = self._inputs(self._encode(X))
        targets = self._encode_targets(y)
        check_consistent_length(inputs, targets)
        return inputs, self._targets(targets)

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

    def predict_frame(self, X: ArrayLike, level: float = 0.9) -> pd.DataFrame:
        """Return predictions as a data frame of pandas, with the index of X.

        All other methods return arrays in the order of the rows, as the estimators of scikit-learn
        do; ``set_output`` is for transformers.

        Args:
            X: inputs (N, features), an array or a data frame.
            level: the probability of the interval. Default: 0.9.

        Returns:
            For numbers the columns "mean", "std", "epistemic_std", "lower" and "upper", with D > 1
            targets "mean[0]", "mean[1]", ...; the interval has no guarantee (``conformal`` has
            one). For classes "class", "probability", its "epistemic_std", "lower" and "upper" over
            the functions of the posterior, "entropy", "mutual_information" and "p[LABEL]" for each
            class.

        Raises:
            ImportError: if pandas is not installed.

        Example:
            >>> frame.join(model.predict_frame(frame[inputs]))
        """
        return prediction_frame(
            self._predictives(X),
            level,
            classes=self._labels_of_codes(),
            index=getattr(X, "index", None),
        )

    def _labels_of_codes(self) -> Sequence[Any] | None:
        """Return the labels in the order of the likelihood's classes; None for numbers."""
        return None

    def watch(
        self,
        X: ArrayLike,
        y: ArrayLike | None = None,
        *,
        X_train: ArrayLike | None = None,
        alpha: float = 0.01,
    ) -> ShiftReport:
        """Compare new rows with the training rows, and their targets with the predictions.

        With ``conformal=0.2``, for example, targets are compared with the rows that were held out.
        Without held-out rows the predictions alone decide on the relation.

        Args:
            X: inputs (N, features).
            y: targets or labels (N,); None (the default) without any.
            X_train: training rows, for an estimator that was loaded from a file, which has none.
            alpha: the largest probability of a false alarm. Default: 0.01.

        Returns:
            The verdict "as expected", "inputs have shifted", "the relation has changed" or "cannot
            tell", with its tests: see ``bayou.diagnostics.watch``.

        Raises:
            ValueError: for a loaded estimator without ``X_train``, or unknown labels.
        """
        check_is_fitted(self, "posterior_")
        if X_train is not None:
            train = sample_rows(self._encode(X_train), self.seed_)
        elif hasattr(self, "train_x_"):
            train = self.train_x_
        else:
            raise ValueError(
                "an estimator from a file has no training rows: give them, watch(X, y, X_train=...)"
            )
        targets = None if y is None else self._encode_targets(y)
        return watch_rows(self, X, targets, train, alpha)

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
        if self.detector_ is not None:
            detector_tensors, config["detector"] = self.detector_.state()
            tensors |= {f"detector.{name}": value for name, value in detector_tensors.items()}
        if self.layout_ is not None:
            config["layout"] = self.layout_.to_json()
        if self.table_ is not None:
            config["table"] = to_json(self.table_)
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
            if "layout" in config:
                estimator.layout_ = TableLayout.from_json(config["layout"])
            if "table" in config:
                estimator.table_ = from_json(config["table"], FrameEncoder, Number, Category, Date)
            if "feature_names" in config:
                estimator.feature_names_in_ = np.array(config["feature_names"], dtype=object)
            if "classes" in config:
                dtype, classes = config["classes"]
                estimator.classes_ = np.array(classes, dtype=dtype)
            names = ("prior", "likelihood")
            options: dict[str, Any] = {
                name: parameters[name] for name in names if name in parameters
            }
            posterior_tensors = under("posterior.", tensors)
            saved = SavedState(posterior_tensors, config["posterior"], path, options)
        estimator.posterior_ = restore_posterior(saved, estimator._network())
        if "detector" in config:
            with making("detector", path):
                estimator.detector_ = Detector.restore(
                    under("detector.", tensors), config["detector"], estimator.posterior_
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
