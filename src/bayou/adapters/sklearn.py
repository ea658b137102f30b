"""Bayesian networks as scikit-learn estimators: for pipelines, grid searches and cross-validation.

model = make_pipeline(SimpleImputer(), BayesRegressor("laplace", random_state=0)).fit(X, y)
mean, std = model.predict(X_new, return_std=True)
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Self, final

from bayou.adapters.estimator import (
    ROWS,
    BayesEstimator,
    moments,
)  # first: it names missing packages

# isort: split
import numpy as np
import torch
from sklearn.base import ClassifierMixin, RegressorMixin
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import validate_data
from torch import Tensor

from bayou.app.runs.config import Config
from bayou.likelihoods import Categorical, Gaussian, Likelihood
from bayou.predictive import Predictive, check_level


@final
class BayesClassifier(ClassifierMixin, BayesEstimator):  # type: ignore[misc]
    """p(y = c | x) = 1/S Σ_s softmax(f(x; w_s))_c, with w_s drawn from the posterior; see
    ``BayesEstimator``.

    >>> from sklearn.datasets import load_iris
    >>> X, y = load_iris(return_X_y=True)
    >>> BayesClassifier("map", steps=200, random_state=0).fit(X, y).predict_proba(X).shape
    (150, 3)
    """

    classes_: np.ndarray

    def fit(self, X: Any, y: Any) -> Self:
        """Fit to X (N, features) and labels y (N,): numbers or strings."""
        X, y = validate_data(self, X, y, dtype=np.float64)
        check_classification_targets(y)
        self.classes_, codes = np.unique(y, return_inverse=True)
        if len(self.classes_) < 2:
            raise ValueError(
                f"y has one class, {self.classes_[0]!r}; a classifier needs two classes or more"
            )
        X, codes = self._hold_out(X, codes)
        return self._fit(X, codes, len(self.classes_), Categorical())

    def predict_set(
        self, X: Any, level: float = 0.9, *, score: str = "lac", empty: bool = True
    ) -> np.ndarray:
        """Sets of classes that contain y for a fraction ``level`` of all rows, with a guarantee:
        bool (N, C).

        This needs held-out rows: ``BayesClassifier(conformal=0.2)``. ``score``: "lac" or "aps";
        ``empty=False``: no set is empty (``bayou.conformal``).
        """
        c, parts, start = self._conformal(level, score=score), [], 0
        for p in self._predictives(X):
            parts.append(c.set(p, empty=empty, start=start).cpu().numpy())
            start += len(parts[-1])
        return np.concatenate(parts)

    def predict_proba(self, X: Any) -> np.ndarray:
        """Class probabilities in the order of ``classes_``: (N, C)."""
        return np.concatenate([p.mean.cpu().numpy() for p in self._predictives(X)])

    def predict(self, X: Any) -> np.ndarray:
        """The most probable class of every row: (N,)."""
        best = self.predict_proba(X).argmax(1)
        return self.classes_[best]

    def predict_interval(self, X: Any, level: float = 0.9) -> tuple[np.ndarray, np.ndarray]:
        """The central interval of each class probability over the draws: lower, upper, (N, C)
        each.
        """
        check_level(level)
        ends = torch.tensor(
            [0.5 - level / 2, 0.5 + level / 2], dtype=self._dtype, device=self.device
        )
        parts = [p.means.quantile(ends, dim=0).cpu().numpy() for p in self._predictives(X)]
        lower, upper = np.concatenate(parts, axis=1)
        return lower, upper


@final
@dataclass(eq=False, repr=False, kw_only=True)
class BayesRegressor(RegressorMixin, BayesEstimator):  # type: ignore[misc]
    """p(y | x) = 1/S Σ_s p(y | f(x; w_s)), with w_s drawn from the posterior; see
    ``BayesEstimator``.

    ``likelihood``: Gaussian noise with a learned standard deviation by default; a given one applies
    to standardized targets if ``standardize`` is on.

    >>> import numpy as np
    >>> X = np.linspace(-1, 1, 50)[:, None]
    >>> mean, std = BayesRegressor("map", steps=100, random_state=0).fit(X, X[:, 0]).predict(X, return_std=True)
    """

    likelihood: Likelihood | None = None

    y_mean_: np.ndarray = field(init=False)
    y_scale_: np.ndarray = field(init=False)
    flat_: bool = field(init=False)  # y was (N,)

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.target_tags.multi_output = True
        return tags

    def fit(self, X: Any, y: Any) -> Self:
        """Fit to X (N, features) and numbers y, (N,) or (N, D)."""
        X, y = validate_data(self, X, y, dtype=np.float64, multi_output=True, y_numeric=True)
        y = y.astype(np.float64)
        self.flat_ = y.ndim == 1
        X, y = self._hold_out(X, y.reshape(len(y), -1))
        spread = 1.0 if self.standardize else float(moments(y, True)[1].mean())
        likelihood = (
            Gaussian(Config.noise * spread, learn=True)
            if self.likelihood is None
            else self.likelihood
        )
        if not isinstance(likelihood, Likelihood):
            raise ValueError(
                f"likelihood must be a Likelihood such as Gaussian(0.1), got {likelihood!r}"
            )
        outputs = likelihood.outputs(y.shape[1])
        units = likelihood.bind().rescale(torch.zeros(1, outputs), torch.zeros(1), torch.ones(1))
        self.y_mean_, self.y_scale_ = moments(
            y, self.standardize and units is not None
        )  # counts stay counts
        return self._fit(X, y, outputs, likelihood)

    def _targets(self, y: np.ndarray) -> Tensor:
        return super()._targets((y - self.y_mean_) / self.y_scale_)

    def _in_units(self, p: Predictive) -> Predictive:
        """In the units of y: shift + scale·z for every draw, if y was standardized."""
        shift, scale = (
            torch.as_tensor(value).to(p.outputs) for value in (self.y_mean_, self.y_scale_)
        )
        likelihood, outputs = p.likelihood.rescale(p.outputs, shift, scale) or (
            p.likelihood,
            p.outputs,
        )
        return Predictive(likelihood, outputs.squeeze(2) if self.flat_ else outputs)

    def predict(self, X: Any, return_std: bool = False) -> Any:
        """E[y] of every row, (N,) or (N, D); with ``return_std`` also √Var[y], aleatoric and
        epistemic.
        """
        found = [
            (p.mean.cpu().numpy(), p.std.cpu().numpy() if return_std else 0.0)
            for p in self._predictives(X)
        ]
        mean = np.concatenate([mean for mean, _ in found])
        return (mean, np.concatenate([std for _, std in found])) if return_std else mean

    def predict_interval(
        self, X: Any, level: float = 0.9, *, conformal: bool = False, score: str = "cqr"
    ) -> tuple[np.ndarray, np.ndarray]:
        """The central interval of y with probability ``level``: lower, upper, like y each.

        ``conformal``: with the guarantee that it contains y for a fraction ``level`` of all rows,
        by held-out rows (``BayesRegressor(conformal=0.2)``); ``score``: "cqr" or "split"
        (``bayou.conformal``).
        """
        check_level(level)
        if not conformal:
            parts = [[end.cpu().numpy() for end in p.interval(level)] for p in self._predictives(X)]
            return np.concatenate([lower for lower, _ in parts]), np.concatenate(
                [upper for _, upper in parts]
            )
        c = self._conformal(level, score=score)
        x = self._inputs(validate_data(self, X, reset=False, dtype=np.float64))
        pairs = [[end.double().cpu().numpy() for end in c.interval(part)] for part in x.split(ROWS)]
        lower, upper = (
            np.concatenate(ends) * self.y_scale_ + self.y_mean_ for ends in zip(*pairs, strict=True)
        )
        return (lower[:, 0], upper[:, 0]) if self.flat_ else (lower, upper)
