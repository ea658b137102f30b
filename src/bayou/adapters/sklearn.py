"""Bayesian networks as scikit-learn estimators: for pipelines, grid searches and cross-validation.

model = make_pipeline(SimpleImputer(), BayesRegressor("laplace", random_state=0)).fit(X, y)
mean, std = model.predict(X_new, return_std=True)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Self, final

# First: it names missing packages.
from bayou.adapters.estimator import (
    MAX_BATCH_ROWS,
    BayesEstimator,
    FittedRows,
    join_batches,
    moments,
)

# isort: split
import numpy as np
import torch
from numpy.typing import ArrayLike
from sklearn.base import ClassifierMixin, RegressorMixin
from sklearn.utils import Tags
from sklearn.utils.multiclass import check_classification_targets
from torch import Tensor

from bayou.adapters.frames import Labels
from bayou.app.runs.config import Config
from bayou.likelihoods import Categorical, FiniteLikelihood, Gaussian, Likelihood, Ordinal
from bayou.likelihoods.named import AUTO, find_likelihood
from bayou.likelihoods.predictive import Predictive, check_level


@final
@dataclass(eq=False, repr=False, kw_only=True)
class BayesClassifier(ClassifierMixin, BayesEstimator):  # type: ignore[misc]
    """A classifier that averages networks drawn from the posterior; see ``BayesEstimator``.

    p(y = c | x) = 1/S Σ_s softmax(f(x; w_s))_c, or with ordered classes
    P(y ≤ c | x) = 1/S Σ_s sigmoid(cut_c − f(x; w_s)).

    Fitted, it has ``classes_``, sorted, and with ordered classes ``order_``, from low to high.

    Args:
        likelihood: None or "categorical" (the default), or "ordinal" for ordered classes; or a
            ``Categorical`` or ``Ordinal``.
        order: the classes from low to high, with "ordinal"; None (the default) for the order of a
            pandas categorical, else for sorted classes.

    >>> from sklearn.datasets import load_iris
    >>> X, y = load_iris(return_X_y=True)
    >>> BayesClassifier("map", steps=200, random_state=0).fit(X, y).predict_proba(X).shape
    (150, 3)
    """

    likelihood: Likelihood | str | None = None
    order: Sequence[Any] | None = None

    classes_: np.ndarray = field(init=False)
    ranks_: list[int] | None = field(init=False, default=None)  # of ordered classes_, from low

    def fit(
        self,
        X: ArrayLike,
        y: ArrayLike,
        groups: ArrayLike | None = None,
        times: ArrayLike | None = None,
    ) -> Self:
        """Fit the posterior.

        Args:
            X: inputs (N, features), an array or a data frame.
            y: labels (N,): numbers, strings, or a pandas Series of any type.
            groups: the group of each row (N,): rows that the fit holds out, also for ``conformal``,
                are whole groups. None (the default): random rows.
            times: the time of each row (N,): held-out rows are the latest. None (the default):
                random rows.

        Raises:
            ValueError: if y has one class only, or ``order`` lacks a class.
        """
        labels = Labels.of_series(y)
        inputs, targets = self._read_training(X, y if labels is None else labels.codes)
        if labels is None:
            check_classification_targets(targets)
            labels = Labels.of_array(targets)
        self.classes_ = labels.classes
        if len(self.classes_) < 2:
            raise ValueError(
                f"y has one class, {self.classes_[0]!r}; a classifier needs two classes or more"
            )
        codes = labels.codes
        self.ranks_ = None
        if self._is_ordered:
            ranks = labels.ranks(self.order)
            self.ranks_ = ranks.tolist()
            codes = ranks[codes]
        elif self.order is not None:
            raise ValueError(
                "order is for ordered classes: give likelihood='ordinal' too, or leave it out"
            )
        rows = self._hold_out(inputs, codes, groups, times)
        outputs = 1 if self._is_ordered else len(self.classes_)
        return self._fit(rows, outputs, self._class_likelihood(rows.y))

    @property
    def order_(self) -> np.ndarray | None:
        """The classes from low to high; None if they have no order."""
        return None if self.ranks_ is None else self.classes_[np.argsort(self.ranks_)]

    @property
    def _is_ordered(self) -> bool:
        """Whether the likelihood is that of ordered classes."""
        return self.likelihood == "ordinal" or isinstance(self.likelihood, Ordinal)

    def _class_likelihood(self, codes: np.ndarray) -> Likelihood:
        """Return the likelihood, with cut points at the frequencies of ordered classes."""
        likelihood = self.likelihood
        if likelihood is None or likelihood == "categorical":
            return Categorical()
        if likelihood == "ordinal":
            return Ordinal(len(self.classes_)).starting_at(torch.as_tensor(codes))
        if isinstance(likelihood, Categorical | Ordinal):
            return likelihood
        name = likelihood
        if isinstance(likelihood, str):
            name = find_likelihood(likelihood).name
        raise ValueError(
            "likelihood of a BayesClassifier must be 'categorical' or 'ordinal', or a Categorical "
            f"or Ordinal, got {name!r}"
        )

    def _in_class_order(self, values: np.ndarray) -> np.ndarray:
        """Return columns of classes from low to high, (N, C), in the order of ``classes_``."""
        return values if self.ranks_ is None else values[:, self.ranks_]

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
        return self._in_class_order(mask)

    def predict_proba(self, X: ArrayLike) -> np.ndarray:
        """Return class probabilities in the order of ``classes_``: (N, C).

        Args:
            X: inputs (N, features).
        """
        (probabilities,) = join_batches(
            (p.probabilities if self._is_ordered else p.mean,) for p in self._predictives(X)
        )
        return self._in_class_order(probabilities)

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
        quantiles = (_class_probabilities(p).quantile(levels, dim=0) for p in self._predictives(X))
        lower, upper = join_batches((lower, upper) for lower, upper in quantiles)
        return self._in_class_order(lower), self._in_class_order(upper)


def _class_probabilities(p: Predictive) -> Tensor:
    """Return the probabilities of the classes for every draw, (S, N, C)."""
    likelihood = p.likelihood
    if likelihood.is_ordered and isinstance(likelihood, FiniteLikelihood):
        return likelihood.log_pmf(p.outputs).exp()
    return p.means


@final
@dataclass(eq=False, repr=False, kw_only=True)
class BayesRegressor(RegressorMixin, BayesEstimator):  # type: ignore[misc]
    """A regressor that averages networks drawn from the posterior; see ``BayesEstimator``.

    p(y | x) = 1/S Σ_s p(y | f(x; w_s)).

    Args:
        likelihood: Gaussian noise with a learned standard deviation by default, or what the method
            "auto" chooses; or a name of
            ``bayou.likelihoods.list_likelihoods()`` such as "lognormal", "negative-binomial" or
            "auto", whose targets are fitted and predicted in their units; or a Likelihood, which
            applies to standardized targets if ``standardize`` is on and y can be shifted.

    >>> import numpy as np
    >>> X = np.linspace(-1, 1, 50)[:, None]
    >>> model = BayesRegressor("map", steps=100, random_state=0).fit(X, X[:, 0])
    >>> mean, std = model.predict(X, return_std=True)
    """

    likelihood: Likelihood | str | None = None

    y_mean_: np.ndarray = field(init=False)
    y_scale_: np.ndarray = field(init=False)
    flat_: bool = field(init=False)  # y was (N,)

    def __sklearn_tags__(self) -> Tags:
        """Return the tags of scikit-learn: y may have several columns."""
        tags = super().__sklearn_tags__()
        tags.target_tags.multi_output = True
        return tags

    def fit(
        self,
        X: ArrayLike,
        y: ArrayLike,
        groups: ArrayLike | None = None,
        times: ArrayLike | None = None,
    ) -> Self:
        """Fit the posterior.

        Args:
            X: inputs (N, features), an array or a data frame.
            y: numbers, (N,) or (N, D).
            groups: the group of each row (N,): rows that the fit holds out, also for ``conformal``,
                are whole groups. None (the default): random rows.
            times: the time of each row (N,): held-out rows are the latest. None (the default):
                random rows.
        """
        inputs, targets = self._read_training(X, y, multi_output=True, y_numeric=True)
        targets = targets.astype(np.float64)
        self.flat_ = targets.ndim == 1
        rows = self._hold_out(inputs, targets.reshape(len(targets), -1), groups, times)
        targets = rows.y
        likelihood = self.likelihood
        if likelihood is None and self.method == AUTO and self.standardize:
            likelihood = AUTO
        if isinstance(likelihood, str):
            return self._fit_by_name(rows, likelihood)
        if likelihood is None:
            spread = 1.0 if self.standardize else float(moments(targets, True)[1].mean())
            likelihood = Gaussian(Config.noise * spread, learn=True)
        if not isinstance(likelihood, Likelihood):
            raise ValueError(
                "likelihood must be a Likelihood such as Gaussian(0.1), or a name, got "
                f"{likelihood!r}"
            )
        outputs = likelihood.outputs(targets.shape[1])
        rescaled = likelihood.bind().rescale(torch.zeros(1, outputs), torch.ones(1), torch.ones(1))
        has_units = rescaled is not None  # counts stay counts, and prices positive
        self.y_mean_, self.y_scale_ = moments(targets, self.standardize and has_units)
        return self._fit(rows, outputs, likelihood)

    def _fit_by_name(self, rows: FittedRows, name: str) -> Self:
        """Fit with a likelihood by name to targets in their units."""
        outputs = rows.y.shape[1]
        if name != AUTO:
            named = find_likelihood(name)
            if named.task != "regression":
                raise ValueError(
                    f"likelihood {name!r} is for classes: use BayesClassifier, or bayou.fit"
                )
            outputs = named.make(torch.as_tensor(rows.y)).outputs(outputs)
        self.y_mean_, self.y_scale_ = moments(rows.y, False)
        return self._fit(rows, outputs, name)

    def _targets(self, y: np.ndarray) -> Tensor:
        """Return standardized targets."""
        return super()._targets((y - self.y_mean_) / self.y_scale_)

    def _in_units(self, p: Predictive) -> Predictive:
        """Return a prediction in the units of y: shift + scale·z for every draw."""
        event = p.likelihood.mean(p.outputs[:1]).shape[-1]  # less than y with flags or noises
        shift = torch.as_tensor(self.y_mean_[:event]).to(p.outputs)
        scale = torch.as_tensor(self.y_scale_[:event]).to(p.outputs)
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
        x = self._inputs(self._encode(X))
        ends = join_batches(guarantee.interval(batch) for batch in x.split(MAX_BATCH_ROWS))
        low, high = (end.astype(np.float64) * self.y_scale_ + self.y_mean_ for end in ends)
        return (low[:, 0], high[:, 0]) if self.flat_ else (low, high)
