"""Bayesian networks as scikit-learn estimators: for pipelines, grid searches and cross-validation.

model = make_pipeline(SimpleImputer(), BayesRegressor("laplace", random_state=0)).fit(X, y)
mean, std = model.predict(X_new, return_std=True)
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Self, final

# First: it names missing packages.
from bayou.adapters.estimator import MAX_BATCH_ROWS, BayesEstimator, join_batches, moments

# isort: split
import numpy as np
import torch
from numpy.typing import ArrayLike
from sklearn.base import ClassifierMixin, RegressorMixin
from sklearn.utils import Tags
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import validate_data
from torch import Tensor

from bayou.app.runs.config import Config
from bayou.likelihoods import Categorical, Gaussian, Likelihood
from bayou.likelihoods.predictive import Predictive, check_level


@final
class BayesClassifier(ClassifierMixin, BayesEstimator):  # type: ignore[misc]
    """A classifier that averages networks drawn from the posterior; see ``BayesEstimator``.

    p(y = c | x) = 1/S Σ_s softmax(f(x; w_s))_c.

    >>> from sklearn.datasets import load_iris
    >>> X, y = load_iris(return_X_y=True)
    >>> BayesClassifier("map", steps=200, random_state=0).fit(X, y).predict_proba(X).shape
    (150, 3)
    """

    classes_: np.ndarray

    def fit(self, X: ArrayLike, y: ArrayLike) -> Self:
        """Fit the posterior.

        Args:
            X: inputs (N, features).
            y: labels (N,), numbers or strings.

        Raises:
            ValueError: if y has one class only.
        """
        inputs, labels = validate_data(self, X, y, dtype=np.float64)
        check_classification_targets(labels)
        self.classes_, codes = np.unique(labels, return_inverse=True)
        if len(self.classes_) < 2:
            raise ValueError(
                f"y has one class, {self.classes_[0]!r}; a classifier needs two classes or more"
            )
        inputs, codes = self._hold_out(inputs, codes)
        return self._fit(inputs, codes, len(self.classes_), Categorical())

    def predict_set(
        self, X: ArrayLike, level: float = 0.9, *, score: str = "lac", empty: bool = True
    ) -> np.ndarray:
        """Return sets of classes that contain y for a fraction ``level`` of all rows, guaranteed.

        This needs held-out rows: ``BayesClassifier(conformal=0.2)``.

        Args:
            X: inputs (N, features).
            level: the fraction.
            score: "lac" or "aps" (``bayou.conformal``).
            empty: whether sets may be empty.

        Returns:
            A mask, bool (N, C).
        """
        guarantee = self._conformal(level, score)
        masks: list[tuple[Tensor]] = []
        start = 0
        for p in self._predictives(X):
            masks.append((guarantee.set(p, empty=empty, start=start),))
            start += len(masks[-1][0])
        (mask,) = join_batches(masks)
        return mask

    def predict_proba(self, X: ArrayLike) -> np.ndarray:
        """Return class probabilities in the order of ``classes_``: (N, C).

        Args:
            X: inputs (N, features).
        """
        (probabilities,) = join_batches((p.mean,) for p in self._predictives(X))
        return probabilities

    def predict(self, X: ArrayLike) -> np.ndarray:
        """Return the most probable class of every row: (N,).

        Args:
            X: inputs (N, features).
        """
        best_class = self.predict_proba(X).argmax(1)
        return self.classes_[best_class]

    def predict_interval(self, X: ArrayLike, level: float = 0.9) -> tuple[np.ndarray, np.ndarray]:
        """Return the central interval of each class probability over the draws.

        Args:
            X: inputs (N, features).
            level: the probability of the interval.

        Returns:
            Lower and upper end, (N, C) each.
        """
        check_level(level)
        levels = torch.tensor(
            [0.5 - level / 2, 0.5 + level / 2], dtype=self._dtype, device=self.device
        )
        quantiles = (p.means.quantile(levels, dim=0) for p in self._predictives(X))
        lower, upper = join_batches((lower, upper) for lower, upper in quantiles)
        return lower, upper


@final
@dataclass(eq=False, repr=False, kw_only=True)
class BayesRegressor(RegressorMixin, BayesEstimator):  # type: ignore[misc]
    """A regressor that averages networks drawn from the posterior; see ``BayesEstimator``.

    p(y | x) = 1/S Σ_s p(y | f(x; w_s)).

    Args:
        likelihood: Gaussian noise with a learned standard deviation by default. Any other applies
            to standardized targets if ``standardize`` is on.

    >>> import numpy as np
    >>> X = np.linspace(-1, 1, 50)[:, None]
    >>> model = BayesRegressor("map", steps=100, random_state=0).fit(X, X[:, 0])
    >>> mean, std = model.predict(X, return_std=True)
    """

    likelihood: Likelihood | None = None

    y_mean_: np.ndarray = field(init=False)
    y_scale_: np.ndarray = field(init=False)
    flat_: bool = field(init=False)  # y was (N,)

    def __sklearn_tags__(self) -> Tags:
        """Return the tags of scikit-learn: y may have several columns."""
        tags = super().__sklearn_tags__()
        tags.target_tags.multi_output = True
        return tags

    def fit(self, X: ArrayLike, y: ArrayLike) -> Self:
        """Fit the posterior.

        Args:
            X: inputs (N, features).
            y: numbers, (N,) or (N, D).
        """
        inputs, targets = validate_data(
            self, X, y, dtype=np.float64, multi_output=True, y_numeric=True
        )
        targets = targets.astype(np.float64)
        self.flat_ = targets.ndim == 1
        inputs, targets = self._hold_out(inputs, targets.reshape(len(targets), -1))
        likelihood = self.likelihood
        if likelihood is None:
            spread = 1.0 if self.standardize else float(moments(targets, True)[1].mean())
            likelihood = Gaussian(Config.noise * spread, learn=True)
        if not isinstance(likelihood, Likelihood):
            raise ValueError(
                f"likelihood must be a Likelihood such as Gaussian(0.1), got {likelihood!r}"
            )
        outputs = likelihood.outputs(targets.shape[1])
        rescaled = likelihood.bind().rescale(torch.zeros(1, outputs), torch.zeros(1), torch.ones(1))
        has_units = rescaled is not None  # counts stay counts
        self.y_mean_, self.y_scale_ = moments(targets, self.standardize and has_units)
        return self._fit(inputs, targets, outputs, likelihood)

    def _targets(self, y: np.ndarray) -> Tensor:
        """Return standardized targets."""
        return super()._targets((y - self.y_mean_) / self.y_scale_)

    def _in_units(self, p: Predictive) -> Predictive:
        """Return a prediction in the units of y: shift + scale·z for every draw."""
        shift = torch.as_tensor(self.y_mean_).to(p.outputs)
        scale = torch.as_tensor(self.y_scale_).to(p.outputs)
        rescaled = p.likelihood.rescale(p.outputs, shift, scale)
        likelihood, outputs = rescaled or (p.likelihood, p.outputs)
        return Predictive(likelihood, outputs.squeeze(2) if self.flat_ else outputs)

    def predict(self, X: ArrayLike, return_std: bool = False) -> Any:
        """Return E[y] of every row.

        Args:
            X: inputs (N, features).
            return_std: whether to return √Var[y] as well, aleatoric and epistemic.

        Returns:
            E[y], (N,) or (N, D), or E[y] and √Var[y].
        """
        if return_std:
            return join_batches((p.mean, p.std) for p in self._predictives(X))
        (mean,) = join_batches((p.mean,) for p in self._predictives(X))
        return mean

    def predict_interval(
        self, X: ArrayLike, level: float = 0.9, *, conformal: bool = False, score: str = "cqr"
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return the central interval of y with probability ``level``.

        Args:
            X: inputs (N, features).
            level: the probability.
            conformal: whether to guarantee that it contains y for a fraction ``level`` of all rows,
                by held-out rows (``BayesRegressor(conformal=0.2)``).
            score: of a guarantee, "cqr" or "split" (``bayou.conformal``).

        Returns:
            Lower and upper end, (N,) or (N, D) each.
        """
        check_level(level)
        if not conformal:
            low, high = join_batches(p.interval(level) for p in self._predictives(X))
            return low, high
        guarantee = self._conformal(level, score)
        x = self._inputs(validate_data(self, X, reset=False, dtype=np.float64))
        ends = join_batches(guarantee.interval(batch) for batch in x.split(MAX_BATCH_ROWS))
        low, high = (end.astype(np.float64) * self.y_scale_ + self.y_mean_ for end in ends)
        return (low[:, 0], high[:, 0]) if self.flat_ else (low, high)
