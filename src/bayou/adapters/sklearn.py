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
from sklearn.utils import Tags, check_array, column_or_1d
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted
from torch import Tensor

from bayou.adapters.frames import Labels
from bayou.adapters.guarantees import batch_of, check_rows_of
from bayou.app.runs.config import Config
from bayou.likelihoods import Categorical, Decision, FiniteLikelihood, Gaussian, Likelihood, Ordinal
from bayou.likelihoods.decisions import Utility
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

    def _encode_targets(self, y: ArrayLike) -> np.ndarray:
        """Return the codes of labels, (N,), which must be among the classes of the fit."""
        labels = Labels.of_series(y)
        names = column_or_1d(y) if labels is None else labels.classes[labels.codes]
        known = {name: code for code, name in enumerate(self.classes_.tolist())}
        unknown = [name for name in names.tolist() if name not in known]
        if unknown:
            raise ValueError(
                f"y has the label {unknown[0]!r}, which is none of the {len(known)} classes of the "
                "fit; fit again with rows of it"
            )
        codes = np.array([known[name] for name in names.tolist()], dtype=np.int64)
        return codes if self.ranks_ is None else np.asarray(self.ranks_)[codes]

    @property
    def order_(self) -> np.ndarray | None:
        """The classes from low to high; None if they have no order."""
        return None if self.ranks_ is None else self.classes_[np.argsort(self.ranks_)]

    def _labels_of_codes(self) -> Sequence[Any]:
        """Return the labels in the order of the likelihood's classes."""
        labels = self.classes_ if self.order_ is None else self.order_
        return list(labels)

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
        self,
        X: ArrayLike,
        level: float = 0.9,
        *,
        score: str = "lac",
        empty: bool = True,
        groups: ArrayLike | None = None,
        weights: ArrayLike | None = None,
    ) -> np.ndarray:
        """Return sets of classes that contain y for a fraction ``level`` of all rows, guaranteed.

        This needs held-out rows: ``BayesClassifier(conformal=0.2)`` or ``conformalize``.

        Args:
            X: inputs (N, features).
            level: the fraction.
            score: "lac" or "aps" (``bayou.conformal``).
            empty: whether sets may be empty.
            groups: the group of each row (N,), if ``conformalize`` had groups.
            weights: the weight of each row (N,), if ``conformalize`` had weights.

        Returns:
            A mask, bool (N, C).
        """
        guarantee = self._conformal(level, score)
        x = self._inputs(self._encode(X))
        check_rows_of(len(x), groups, weights)
        masks: list[tuple[Tensor]] = []
        for start in range(0, len(x), MAX_BATCH_ROWS):
            batch = x[start : start + MAX_BATCH_ROWS]
            mask = guarantee.set(
                batch,
                batch_of(groups, start, len(batch)),
                weights=batch_of(weights, start, len(batch)),
                empty=empty,
                start=start,
            )
            masks.append((mask,))
        (all_masks,) = join_batches(masks)
        return self._in_class_order(all_masks)

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

    def decide(
        self,
        X: ArrayLike,
        utilities: ArrayLike,
        *,
        abstain: float | None = None,
        names: Sequence[str] | None = None,
    ) -> Decision:
        """Choose the action with the highest expected utility for every row.

        Args:
            X: inputs (N, features).
            utilities: of every action for every class, in the order of ``classes_``, (A, C); costs
                are negative utilities.
            abstain: the cost of leaving a row to somebody else; None (the default) if that is no
                option.
            names: the names of the actions.

        Returns:
            The numbers of the actions, their expected utility, what information is worth, and which
            rows abstain: see ``bayou.likelihoods.Decision``.
        """
        check_is_fitted(self, "posterior_")
        matrix = np.asarray(utilities, dtype=np.float64)
        if matrix.ndim != 2 or matrix.shape[1] != len(self.classes_):
            raise ValueError(
                f"utilities must be (actions, {len(self.classes_)}), with a column for each of "
                f"classes_, got {matrix.shape}"
            )
        if self.ranks_ is not None:
            matrix = matrix[:, np.argsort(self.ranks_)]
        return self.predictive(X).decide(torch.from_numpy(matrix), abstain=abstain, names=names)

    def exceeds(self, X: ArrayLike, threshold: Any) -> np.ndarray:
        """Return the probability of the classes above one, for ordered classes: (N,).

        Args:
            X: inputs (N, features).
            threshold: one of ``order_``.
        """
        check_is_fitted(self, "posterior_")
        order = self.order_
        if order is None:
            raise ValueError(
                "classes have no order, so none exceeds another; use predict_proba, or "
                "likelihood='ordinal'"
            )
        matches = np.flatnonzero(order == threshold)
        if len(matches) != 1:
            raise ValueError(f"threshold must be one of {order.tolist()}, got {threshold!r}")
        rank = float(matches[0])
        (probability,) = join_batches((p.exceeds(rank),) for p in self._predictives(X))
        return probability

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

    def _encode_targets(self, y: ArrayLike) -> np.ndarray:
        """Return numbers (N, D), with as many columns as those of the fit."""
        values: np.ndarray = check_array(y, ensure_2d=False, dtype=np.float64, input_name="y")
        if (values.ndim == 1) != self.flat_:
            expected = "(N,)" if self.flat_ else "(N, D)"
            raise ValueError(f"y has shape {values.shape}, and that of the fit was {expected}")
        return values.reshape(len(values), -1)

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

    def exceeds(self, X: ArrayLike, threshold: float) -> np.ndarray:
        """Return P(y > threshold) of every row: (N,) or (N, D).

        Args:
            X: inputs (N, features).
            threshold: in the units of y.
        """
        (probability,) = join_batches((p.exceeds(threshold),) for p in self._predictives(X))
        return probability

    def decide(
        self,
        X: ArrayLike,
        utilities: Utility,
        actions: ArrayLike | None = None,
        *,
        abstain: float | None = None,
        names: Sequence[str] | None = None,
    ) -> Decision:
        """Choose the action with the highest expected utility for every row.

        Args:
            X: inputs (N, features).
            utilities: u(action, y) of tensors, in the units of y, such as
                ``bayou.likelihoods.Newsvendor``.
            actions: the actions to choose from, (A,); None (the default) for a utility with a
                formula of the best action.
            abstain: the cost of leaving a row to somebody else; None (the default) if that is no
                option.
            names: the names of the actions.

        Returns:
            The actions, their expected utility, what information is worth, and which rows abstain:
            see ``bayou.likelihoods.Decision``.
        """
        grid = None if actions is None else torch.as_tensor(np.asarray(actions))
        return self.predictive(X).decide(utilities, grid, abstain=abstain, names=names)

    def predict_interval(
        self,
        X: ArrayLike,
        level: float = 0.9,
        *,
        conformal: bool = False,
        score: str = "cqr",
        groups: ArrayLike | None = None,
        weights: ArrayLike | None = None,
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return the central interval of y with probability ``level``.

        Args:
            X: inputs (N, features).
            level: the probability.
            conformal: whether to guarantee that it contains y for a fraction ``level`` of all rows,
                by held-out rows (``BayesRegressor(conformal=0.2)`` or ``conformalize``).
            score: of a guarantee, "cqr" or "split" (``bayou.conformal``).
            groups: the group of each row (N,), if ``conformalize`` had groups.
            weights: the weight of each row (N,), if ``conformalize`` had weights.

        Returns:
            Lower and upper end, (N,) or (N, D) each.
        """
        check_level(level)
        if not conformal:
            low, high = join_batches(p.interval(level) for p in self._predictives(X))
            return low, high
        guarantee = self._conformal(level, score)
        x = self._inputs(self._encode(X))
        check_rows_of(len(x), groups, weights)
        ends = join_batches(
            guarantee.interval(
                x[start : start + MAX_BATCH_ROWS],
                batch_of(groups, start, MAX_BATCH_ROWS),
                weights=batch_of(weights, start, MAX_BATCH_ROWS),
            )
            for start in range(0, len(x), MAX_BATCH_ROWS)
        )
        low, high = (end.astype(np.float64) * self.y_scale_ + self.y_mean_ for end in ends)
        return (low[:, 0], high[:, 0]) if self.flat_ else (low, high)
