"""The fit of a detector of unusual inputs: one pass over the training rows."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor

from bayou.core import rng
from bayou.core.progress import BayouWarning
from bayou.likelihoods.predictive import Predictive
from bayou.network import rows_of
from bayou.operations.ood.columns import (
    FEATURE_SCORES,
    SCORES,
    FunctionScores,
    average_columns,
    output_columns,
    score_features,
)
from bayou.operations.ood.detector import DEFAULT_RULE, Detector, UnusualRows
from bayou.operations.ood.feature_scores import TrainingFeatures, UnsupportedScore
from bayou.operations.ood.features import compute_features, feature_networks
from bayou.operations.ood.output_scores import OUTPUT_SCORES, output_scores
from bayou.operations.ood.ranks import RULES, ConformalRanks, Rule
from bayou.posteriors import Posterior
from bayou.posteriors.posterior import check_count
from bayou.training.rows import all_rows, check_held_out

CLASS_SCORES = (
    "entropy",
    "mutual_information",
    "max_probability",
    "energy",
    "max_logit",
    "mahalanobis",
    "relative_mahalanobis",
    "knn",
    "vim",
    "density",
)
NUMBER_SCORES = ("std", "epistemic_std", "mahalanobis", "knn")
HELD_OUT_SHARE = 0.2  # of the training rows, if no held-out rows are given
MAX_HELD_OUT_ROWS = 2000  # of them
MIN_HELD_OUT_ROWS = 20  # for p-values of .05
FUNCTIONS = 5  # draws whose features are used
SAMPLES = 100  # draws of a prediction


class InexactRanksWarning(BayouWarning):
    """P-values are ranks among training rows, of which the posterior is surer than of new ones."""


@torch.no_grad()
def fit(
    posterior: Posterior,
    train_data: object,
    *,
    scores: Sequence[str] | None = None,
    held_out: object = None,
    rule: Rule = DEFAULT_RULE,
    layer: str | None = None,
    functions: int = FUNCTIONS,
    samples: int = SAMPLES,
    neighbors: int = 10,
    seed: int = 0,
) -> Detector:
    """Fit scores of unusual inputs to the features of training rows, in one pass.

    Scores of predictions, which need no training rows:

    "entropy", "mutual_information"  of the predictive distribution
    "max_probability"  1 − max_c p(c | x)
    "energy", "max_logit"  −logsumexp_c f_c and −max_c f_c, the mean over functions
    "std", "epistemic_std"  of numbers

    and scores of features z, what the last layer reads, each fitted for every function and averaged
    over them:

    "mahalanobis", "relative_mahalanobis"  distances from class means
    "knn"  the distance to the k-th neighbor among training rows
    "vim"  the part of z outside the principal space, as a logit
    "density"  of a Gaussian for each class
    "typicality"  |log p − E log p| of a flow, fitted for some seconds for each function

    Every score has a p-value, its rank among held-out rows, and all of them together have one.

    Args:
        posterior: whose predictions and features are scored.
        train_data: its training rows (x, y), a Dataset or a DataLoader.
        scores: names of scores. None (the default): all of the above that this posterior has,
            without "typicality".
        held_out: rows like the training rows that the posterior has not seen, for the p-values.
            None (the default): those that the fit held out, or else a fifth of the training rows,
            2,000 at most. A posterior that has seen these rows is surer of them than of new ones,
            so that p-values of new rows are then too small, with a warning.
        rule: of the combination, "fisher", "stouffer" or "minimum" (``ConformalRanks.combine``).
        layer: the name of a layer whose inputs are the features, or "inputs" for those of the
            network. None (the default): the last linear layer or convolution.
        functions: the largest number of draws whose features are used, where there is no
            representative set of weights (``to_module()``): ensembles, chains, mixtures, MNF.
        samples: the largest number of draws of a prediction.
        neighbors: k of "knn".
        seed: of all draws and random choices.

    Returns:
        A detector; ``detector.score(x)`` has the scores and p-values of new rows.

    Raises:
        ValueError: for a score that the posterior does not have, unknown names, and too few rows.

    Warns:
        InexactRanksWarning: if the p-values are ranks among training rows.

    Example::

        detector = bayou.ood.fit(posterior, (x, y), held_out=(x_held, y_held))
        rows = detector.score(x_new)
        rows.p_value, rows.p_values["knn"], rows.is_unusual(0.01)

    References:
        Liu et al.: Energy-based out-of-distribution detection, NeurIPS 2020. Lee et al.: A simple
        unified framework for detecting out-of-distribution samples, NeurIPS 2018. Ren et al.: A
        simple fix to Mahalanobis distance, 2021. Sun et al.: Out-of-distribution detection with
        deep nearest neighbors, ICML 2022. Wang et al.: ViM, CVPR 2022. Mukhoti et al.: Deep
        deterministic uncertainty, CVPR 2023. Nalisnick et al.: Detecting out-of-distribution
        inputs to deep generative models using typicality, 2019. Bates et al.: Testing for outliers
        with conformal p-values, Annals of Statistics 2023.
    """
    for name, value in (("functions", functions), ("samples", samples), ("neighbors", neighbors)):
        check_count(value, name, 1)
    if rule not in RULES:
        raise ValueError(f"rule must be one of {', '.join(RULES)}, got {rule!r}")
    seed = rng.integer(seed)
    rows = _TrainingRows.of(posterior, train_data, held_out, seed)
    if not rows.is_exact:
        warnings.warn(
            "the p-values are ranks among training rows, of which the posterior is surer than of "
            "new ones, so that they are too small; give rows that it has not seen: "
            "held_out=(x, y)",
            InexactRanksWarning,
            stacklevel=3,
        )
    averaged = posterior.draws_to_average(samples)
    requested = _requested_scores(posterior, scores)
    drops = scores is None  # scores that this posterior does not have
    predicted = _output_scores_of(posterior, rows, requested, averaged, seed, drops=drops)
    feature_names = [name for name in requested if name in FEATURE_SCORES]
    fitted: list[FunctionScores] = []
    if feature_names:
        fitted, columns = _fit_functions(
            rows,
            feature_names,
            _FeatureSource(posterior, layer, functions, seed),
            neighbors=neighbors,
            drops=drops,
        )
        predicted |= columns
    names = _varying_scores(predicted, requested, drops=drops)
    fitted = [{name: item[name] for name in item if name in names} for item in fitted]
    ranks = ConformalRanks(names, torch.stack([predicted[name] for name in names], 1))
    return Detector(posterior, ranks, tuple(fitted), rule, layer, averaged, seed, rows.is_exact)


def score(posterior: Posterior, x: object, data: object, **options: Any) -> UnusualRows:
    """Score rows by a detector that is fitted for this call.

    Args:
        posterior: whose predictions and features are scored.
        x: inputs of the network (B, ...).
        data: the training rows of the posterior.
        **options: those of ``bayou.ood.fit``.

    Returns:
        Every score with its p-value, and the p-value of their combination.

    Example::

        bayou.ood.score(posterior, x_new, data=(x, y)).p_value
    """
    return fit(posterior, data, **options).score(x)


@final
@dataclass(frozen=True, eq=False)
class _TrainingRows:
    """The inputs to which scores are fitted, with their classes, and those of the p-values."""

    inputs: tuple[Any, ...]
    classes: Tensor | None
    held_out: tuple[Any, ...]
    is_exact: bool

    @classmethod
    def of(cls, posterior: Posterior, data: object, held_out: object, seed: int) -> _TrainingRows:
        """Divide the training rows, unless held-out rows are given."""
        x, y = all_rows(data)
        inputs = posterior.place(x)
        y = y.to(inputs[0].device)
        if held_out is not None:
            check_held_out(held_out, data)
            held_out_inputs = posterior.place(all_rows(held_out)[0])
            is_exact = True
        else:
            index, is_exact = _held_out_index(posterior, len(y), seed)
            index = index.to(y.device)
            held_out_inputs = rows_of(inputs, index)
            is_kept = torch.ones(len(y), dtype=torch.bool, device=y.device)
            is_kept[index] = False
            inputs = rows_of(inputs, is_kept)
            y = y[is_kept]
        count = len(held_out_inputs[0])
        if count < MIN_HELD_OUT_ROWS or not len(y):
            raise ValueError(
                f"p-values need {MIN_HELD_OUT_ROWS} held-out rows or more beside the training "
                f"rows, got {count}; give more rows: held_out=(x, y)"
            )
        classes = _row_classes(posterior, y)
        return cls(inputs, classes, held_out_inputs, is_exact)


def _held_out_index(posterior: Posterior, rows: int, seed: int) -> tuple[Tensor, bool]:
    """Return rows for the p-values, and whether the fit held them out."""
    index = posterior.held_out_index
    if index is not None:
        is_same_data = rows in (posterior.target.n, posterior.target.n + len(index))
        if is_same_data and len(index) >= MIN_HELD_OUT_ROWS:
            return index, True
    count = min(MAX_HELD_OUT_ROWS, round(HELD_OUT_SHARE * rows))
    return rng.permutation(rows, rng.fold(seed, "held out"))[:count], False


def _row_classes(posterior: Posterior, y: Tensor) -> Tensor | None:
    """Return the class of each row, 0 .. C − 1 without gaps; None if y is not one class each."""
    likelihood = posterior.target.likelihood
    if likelihood.support != "classes" or y.numel() != len(y):
        return None
    labels, is_label = likelihood.labels(y)
    if not bool(is_label.all()):
        return None
    _, classes = labels.reshape(-1).unique(return_inverse=True)
    return classes


def _requested_scores(posterior: Posterior, scores: Sequence[str] | None) -> tuple[str, ...]:
    """Return the names of the scores, by default those for such y."""
    if scores is None:
        is_class = posterior.target.likelihood.support == "classes"
        return CLASS_SCORES if is_class else NUMBER_SCORES
    unknown = [name for name in scores if name not in SCORES]
    if isinstance(scores, str) or unknown or not scores or len({*scores}) < len(scores):
        raise ValueError(
            f"scores must be a list of different names among {', '.join(SCORES)}, got {scores!r}"
        )
    return tuple(scores)


def _output_scores_of(
    posterior: Posterior,
    rows: _TrainingRows,
    names: Sequence[str],
    samples: int | None,
    seed: int,
    *,
    drops: bool,
) -> dict[str, Tensor]:
    """Return the scores of predictions of the held-out rows."""
    supported = [name for name in names if name in OUTPUT_SCORES]
    if drops and supported:
        p = posterior.predict(rows_of(rows.held_out, slice(2)), samples, seed=seed)
        supported = [name for name in supported if _has_score(p, name)]
    return output_columns(posterior, rows.held_out, supported, samples, seed)


def _varying_scores(
    columns: dict[str, Tensor], names: Sequence[str], *, drops: bool
) -> tuple[str, ...]:
    """Return the names of the scores that are not the same for all held-out rows."""
    computed = [name for name in names if name in columns]
    constant = [name for name in computed if bool((columns[name] == columns[name][0]).all())]
    if constant and (not drops or len(constant) == len(computed)):
        raise UnsupportedScore(
            f"the score {constant[0]!r} is the same for all held-out rows, so that it has no ranks "
            "(the std of a point with one learned noise is constant); use others, such as "
            "'mahalanobis' and 'knn'"
        )
    return tuple(name for name in computed if name not in constant)


def _has_score(p: Predictive, name: str) -> bool:
    """Return whether a prediction has a score."""
    try:
        output_scores(p, [name])
    except UnsupportedScore:
        return False
    return True


@final
@dataclass(frozen=True, eq=False)
class _FeatureSource:
    """Where features come from: the functions of a posterior, and a layer of them."""

    posterior: Posterior
    layer: str | None
    functions: int
    seed: int


def _fit_functions(
    rows: _TrainingRows,
    names: Sequence[str],
    source: _FeatureSource,
    *,
    neighbors: int,
    drops: bool,
) -> tuple[list[FunctionScores], dict[str, Tensor]]:
    """Fit scores to the features of every function, and return them with those of held-out rows."""
    posterior = source.posterior
    layer = source.layer
    seed = source.seed
    fitted: list[FunctionScores] = []
    columns: list[dict[str, Tensor]] = []
    for network in feature_networks(posterior, source.functions, seed):
        features = compute_features(posterior, network, rows.inputs, layer, seed)
        training = TrainingFeatures(
            features.values, rows.classes, features.weight, features.bias, neighbors, seed
        )
        fitted.append(_fit_scores(training, names, drops=drops))
        held_out_features = compute_features(posterior, network, rows.held_out, layer, seed)
        columns.append(score_features(fitted[-1], held_out_features.values))
    shared_names = [name for name in names if all(name in item for item in fitted)]
    shared_scores = [{name: item[name] for name in shared_names} for item in fitted]
    shared_columns = [{name: item[name] for name in shared_names} for item in columns]
    return shared_scores, average_columns(shared_columns)


def _fit_scores(training: TrainingFeatures, names: Sequence[str], *, drops: bool) -> FunctionScores:
    """Fit scores to the features of one function."""
    fitted: FunctionScores = {}
    for name in names:
        try:
            fitted[name] = FEATURE_SCORES[name].fit(training)
        except UnsupportedScore:
            if not drops:
                raise
    return fitted
