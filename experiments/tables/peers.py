"""Models of other libraries with the defaults of their documentation, on one thread.

Each function fits the training rows and returns a forecast of the test rows. Boosting and networks
stop early by held-out training rows where that is customary; a model without a noise of its own has
the standard deviation of its residuals in rows that were held out.
"""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
from numpy.typing import NDArray

from experiments.tables.rows import Rows
from experiments.tables.scores import (
    Floats,
    Forecast,
    gaussian,
    residual_quantiles,
    spread_levels,
)

HELD_OUT = 0.2  # of the training rows, for residuals and early stopping
PATIENCE = 50  # rounds of boosting without improvement
MAX_ROUNDS = 1000
PROCESS_ROWS = 2000
PROCESS_ENTRIES = 10**8  # of the gradient of a kernel matrix: rows² × inputs
QUANTILES = np.array([0.025, 0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.975])
MAX_HISTOGRAM_LEVELS = 255  # categories of a column of HistGradientBoosting
VIRTUAL_ENSEMBLES = 10


def split_held_out(rows: Rows, seed: int) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return the indices of rows to fit and of rows to hold out, every class in both if it can be.

    Args:
        rows: the training rows.
        seed: of the split.
    """
    from sklearn.model_selection import train_test_split

    groups = None
    if rows.classes and np.bincount(rows.y, minlength=rows.classes).min() >= 2:
        groups = rows.y
    options: dict[str, Any] = {"test_size": HELD_OUT, "random_state": seed, "stratify": groups}
    fitted, held = train_test_split(np.arange(len(rows.y)), **options)
    return np.sort(fitted), np.sort(held)


def all_classes(probabilities: Floats, known: NDArray[Any], rows: Rows) -> Forecast:
    """Return probabilities of all classes; those that were not fitted have 0.

    Args:
        probabilities: of the known classes (N, K).
        known: their codes (K,).
        rows: tell how many classes there are.
    """
    complete = np.zeros((len(probabilities), rows.classes))
    complete[:, np.asarray(known, int)] = probabilities
    return Forecast(probabilities=complete)


# --- scikit-learn --------------------------------------------------------------------------------


def fit_linear(rows: Rows, seed: int) -> Forecast:
    """Fit BayesianRidge, or logistic regression for classes.

    Args:
        rows: of one split.
        seed: unused, as every function here has one.
    """
    from sklearn.linear_model import BayesianRidge, LogisticRegression

    if rows.classes:
        model = LogisticRegression(max_iter=2000).fit(rows.x, rows.y)
        return all_classes(model.predict_proba(rows.x_test), model.classes_, rows)
    mean, std = BayesianRidge().fit(rows.x, rows.y).predict(rows.x_test, return_std=True)
    return gaussian(mean, std)


def fit_process(rows: Rows, seed: int) -> Forecast:
    """Fit a Gaussian process: an RBF kernel with a length for every input, and noise.

    Args:
        rows: of one split.
        seed: of the optimizer, and of the part of the rows if the kernel matrix is too large.
    """
    from sklearn.gaussian_process import GaussianProcessRegressor
    from sklearn.gaussian_process.kernels import RBF, ConstantKernel, WhiteKernel

    inputs = rows.x.shape[1]
    rows = rows.first(int((PROCESS_ENTRIES / inputs) ** 0.5), seed)
    lengths = RBF(np.full(inputs, max(3.0, inputs**0.5)), (0.1, 1e4))
    kernel = ConstantKernel(1.0, (1e-3, 1e4)) * lengths + WhiteKernel(0.2, (1e-6, 10.0))
    model = GaussianProcessRegressor(kernel, normalize_y=True, random_state=seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # lengths at the end of their range
        model.fit(rows.x, rows.y)
        mean, std = model.predict(rows.x_test, return_std=True)
    return gaussian(mean, std)


def _histogram_categories(rows: Rows) -> list[int]:
    """Return the columns that HistGradientBoosting can take as categories."""
    return [i for i in rows.categories if rows.mixed[:, i].max() < MAX_HISTOGRAM_LEVELS]


def _boosted(rows: Rows, seed: int, **options: Any) -> Any:
    from sklearn.ensemble import HistGradientBoostingRegressor

    categories = _histogram_categories(rows) or None
    return HistGradientBoostingRegressor(
        categorical_features=categories, random_state=seed, **options
    )


def fit_boosted_quantiles(rows: Rows, seed: int) -> Forecast:
    """Fit a HistGradientBoostingRegressor for the mean and one for each of nine quantiles.

    Args:
        rows: of one split.
        seed: of the models.
    """
    mean = _boosted(rows, seed).fit(rows.mixed, rows.y).predict(rows.mixed_test)
    predicted = [
        _boosted(rows, seed, loss="quantile", quantile=level)
        .fit(rows.mixed, rows.y)
        .predict(rows.mixed_test)
        for level in QUANTILES
    ]
    return Forecast(mean=mean, quantiles=spread_levels(QUANTILES, np.stack(predicted)))


def fit_boosted_conformal(rows: Rows, seed: int) -> Forecast:
    """Fit a HistGradientBoostingRegressor, with split conformal intervals by held-out residuals.

    Args:
        rows: of one split.
        seed: of the split and the model.
    """
    fitted, held = split_held_out(rows, seed)
    model = _boosted(rows, seed).fit(rows.mixed[fitted], rows.y[fitted])
    residuals = rows.y[held] - model.predict(rows.mixed[held])
    return residual_quantiles(model.predict(rows.mixed_test), residuals)


def fit_boosted_classes(rows: Rows, seed: int) -> Forecast:
    """Fit a HistGradientBoostingClassifier.

    Args:
        rows: of one split.
        seed: of the model.
    """
    from sklearn.ensemble import HistGradientBoostingClassifier

    categories = _histogram_categories(rows) or None
    model = HistGradientBoostingClassifier(categorical_features=categories, random_state=seed)
    model.fit(rows.mixed, rows.y)
    return all_classes(model.predict_proba(rows.mixed_test), model.classes_, rows)


def fit_mlp(rows: Rows, seed: int) -> Forecast:
    """Fit the MLP of scikit-learn with early stopping; its noise is that of held-out residuals.

    Args:
        rows: of one split.
        seed: of the split and the network.
    """
    from sklearn.neural_network import MLPClassifier, MLPRegressor

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # 200 epochs without convergence
        if rows.classes:
            stops = bool(np.bincount(rows.y, minlength=rows.classes).min() >= 10)
            classifier = MLPClassifier(early_stopping=stops, random_state=seed)
            classifier.fit(rows.x, rows.y)
            known = classifier.classes_
            return all_classes(classifier.predict_proba(rows.x_test), known, rows)
        shift, scale = rows.y.mean(), rows.y.std()
        y = (rows.y - shift) / scale
        fitted, held = split_held_out(rows, seed)
        model = MLPRegressor(early_stopping=True, random_state=seed)
        model.fit(rows.x[fitted], y[fitted])
    residuals = y[held] - model.predict(rows.x[held])
    std = scale * float(np.sqrt(np.mean(residuals**2)))
    return gaussian(shift + scale * model.predict(rows.x_test), std)


# --- boosting ------------------------------------------------------------------------------------


def _with_codes(matrix: Floats, categories: tuple[int, ...]) -> NDArray[Any]:
    """Return a matrix of objects in which codes of categories are whole numbers."""
    mixed = matrix.astype(object)
    for place in categories:
        mixed[:, place] = matrix[:, place].astype(int)
    return mixed


def fit_catboost(rows: Rows, seed: int) -> Forecast:
    """Fit CatBoost: RMSEWithUncertainty with virtual ensembles, or Logloss for classes.

    Args:
        rows: of one split.
        seed: of the split and the model.
    """
    from catboost import CatBoostClassifier, CatBoostRegressor, Pool

    fitted, held = split_held_out(rows, seed)
    mixed = _with_codes(rows.mixed, rows.categories)
    places = list(rows.categories)
    pools = [Pool(mixed[part], rows.y[part], cat_features=places) for part in (fitted, held)]
    test = Pool(_with_codes(rows.mixed_test, rows.categories), cat_features=places)
    options: dict[str, Any] = {
        "random_seed": seed,
        "thread_count": 1,
        "verbose": False,
        "allow_writing_files": False,
        "early_stopping_rounds": PATIENCE,
    }
    if rows.classes:
        classifier = CatBoostClassifier(**options).fit(pools[0], eval_set=pools[1])
        known = np.ravel(classifier.classes_)
        return all_classes(classifier.predict_proba(test), known, rows)
    model = CatBoostRegressor(loss_function="RMSEWithUncertainty", **options)
    model.fit(pools[0], eval_set=pools[1])
    count = min(VIRTUAL_ENSEMBLES, max(1, model.tree_count_ // 2))
    kind = {"prediction_type": "TotalUncertainty", "virtual_ensembles_count": count}
    mean, knowledge, noise = model.virtual_ensembles_predict(test, **kind).T
    return gaussian(mean, np.sqrt(knowledge + noise))


def fit_lightgbm(rows: Rows, seed: int) -> Forecast:
    """Fit LightGBM with early stopping; its noise is that of held-out residuals.

    Args:
        rows: of one split.
        seed: of the split and the model.
    """
    import lightgbm

    fitted, held = split_held_out(rows, seed)
    options: dict[str, Any] = {
        "n_estimators": MAX_ROUNDS,
        "random_state": seed,
        "n_jobs": 1,
        "verbose": -1,
    }
    kind = lightgbm.LGBMClassifier if rows.classes else lightgbm.LGBMRegressor
    model: Any = kind(**options)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.fit(
            rows.mixed[fitted],
            rows.y[fitted],
            eval_set=[(rows.mixed[held], rows.y[held])],
            categorical_feature=list(rows.categories) or "auto",
            callbacks=[lightgbm.early_stopping(PATIENCE, verbose=False)],
        )
        if rows.classes:
            known = model.classes_
            return all_classes(model.predict_proba(rows.mixed_test), known, rows)
        residuals = rows.y[held] - model.predict(rows.mixed[held])
        return gaussian(model.predict(rows.mixed_test), float(np.sqrt(np.mean(residuals**2))))


def fit_ngboost(rows: Rows, seed: int) -> Forecast:
    """Fit NGBoost with a Normal, or with classes, and early stopping.

    Args:
        rows: of one split.
        seed: of the split and the model.
    """
    from ngboost import NGBClassifier, NGBRegressor
    from ngboost.distns import Normal, k_categorical

    fitted, held = split_held_out(rows, seed)
    validation = {"X_val": rows.x[held], "Y_val": rows.y[held]}
    options: dict[str, Any] = {"random_state": seed, "verbose": False}
    if rows.classes:
        model = NGBClassifier(Dist=k_categorical(rows.classes), **options)
        model.fit(rows.x[fitted], rows.y[fitted], early_stopping_rounds=PATIENCE, **validation)
        return Forecast(probabilities=model.predict_proba(rows.x_test))
    model = NGBRegressor(Dist=Normal, **options)
    model.fit(rows.x[fitted], rows.y[fitted], early_stopping_rounds=PATIENCE, **validation)
    law = model.pred_dist(rows.x_test)
    return gaussian(law.loc, law.scale)
