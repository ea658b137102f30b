"""Data frames in the scikit-learn estimators: the preprocessing of ``bayou train`` on a CSV file."""

from __future__ import annotations

import datetime
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose, assert_array_equal
from sklearn.base import clone

import bayou
from bayou.adapters.frames import FrameEncoder, Labels, TableWarning
from bayou.adapters.sklearn import BayesClassifier, BayesRegressor
from bayou.data import DataError
from bayou.data.columns import Column
from bayou.data.options import Options
from bayou.data.reading import is_frame, read_file, read_frame
from bayou.data.tables import table_dataset
from tests.adapters.frames import Categories, StandIn, pandas_frame, write_csv

Columns = dict[str, Any]
MakeFrame = Callable[[Columns], Any]

ROWS = 90
NOISE = bayou.Gaussian(0.3)
QUICK = {"steps": 40, "lr": 0.05, "hidden": (8,), "samples": 4, "prior": 1.0, "random_state": 0}
CLASSES = np.array(["low", "high", "medium"])  # sorted: high, low, medium
ORDER = ["low", "medium", "high"]


@pytest.fixture(params=["stand-in", pytest.param("pandas", marks=pytest.mark.peers)])
def frame(request: pytest.FixtureRequest) -> MakeFrame:
    """What makes a frame of columns: of each library."""
    return StandIn if request.param == "stand-in" else pandas_frame


def mixed_columns(seed: int = 0, rows: int = ROWS) -> Columns:
    """Return columns of all types, some with missing values."""
    generator = np.random.default_rng(seed)
    numbers = generator.normal(size=rows)
    numbers[::9] = np.nan
    cities = generator.choice(["Bern", "Kyiv", "Oslo"], rows).tolist()
    first_day = datetime.datetime(2023, 1, 1)
    days = generator.integers(0, 700, rows).tolist()
    return {
        "size": numbers,
        "rooms": generator.integers(1, 9, rows),
        "city": [None if row % 11 == 0 else city for row, city in enumerate(cities)],
        "garden": generator.random(rows) < 0.5,
        "sold": [first_day + datetime.timedelta(days=day) for day in days],
        "grade": Categories(generator.choice(["A", "B", "C"], rows).tolist()),
    }


def prices(columns: Columns) -> np.ndarray:
    """Return targets of these columns."""
    return 100.0 + 20 * columns["rooms"] + 15 * columns["garden"]


def fit(X: Any, y: Any, **settings: Any) -> BayesRegressor:
    """Fit a small network by few steps."""
    return BayesRegressor("map", likelihood=NOISE, **(QUICK | settings)).fit(X, y)


def without(columns: Columns, *names: str) -> Columns:
    """Return the other columns."""
    return {name: cells for name, cells in columns.items() if name not in names}


# --- The same as from a file ---


def test_columns_become_inputs_as_in_a_csv_file(frame: MakeFrame, tmp_path: Path) -> None:
    columns = mixed_columns()
    y = prices(columns)
    table = read_file(write_csv(tmp_path / "t.csv", columns | {"price": y}))
    preprocessor: Any = table_dataset(table, Options(target="price"), test=table).preprocessor
    model = fit(frame(columns), y)
    assert model.table_.columns == preprocessor.columns
    assert model.table_.features == preprocessor.feature_names
    assert_allclose(model._encode(frame(columns)), preprocessor.rows(table).x.numpy(), rtol=1e-6)


def test_predictions_are_those_of_the_cells_of_a_csv_file(frame: MakeFrame, tmp_path: Path) -> None:
    columns = mixed_columns()
    new = mixed_columns(seed=1, rows=20)
    texts = [
        {name: column.levels for name, column in read_file(path).columns.items()}
        for path in (write_csv(tmp_path / "t.csv", columns), write_csv(tmp_path / "n.csv", new))
    ]
    y = prices(columns)
    from_types = fit(frame(columns), y).predict(frame(new))
    from_text = fit(StandIn(texts[0]), y).predict(StandIn(texts[1]))
    assert_allclose(from_types, from_text, rtol=1e-9)


def test_new_rows_are_encoded_as_those_of_a_new_file(frame: MakeFrame, tmp_path: Path) -> None:
    columns = mixed_columns()
    table = read_file(write_csv(tmp_path / "t.csv", columns | {"price": prices(columns)}))
    preprocessor = table_dataset(table, Options(target="price"), test=table).preprocessor
    new = mixed_columns(seed=2, rows=12) | {"city": ["Rome"] * 6 + ["Oslo"] * 6}
    prepared = preprocessor.rows(write_csv(tmp_path / "new.csv", new))
    model = fit(frame(columns), prices(columns))
    with pytest.warns(TableWarning) as caught:
        inputs = model._encode(frame(new))
    assert_allclose(inputs, prepared.x.numpy(), rtol=1e-5, atol=1e-6)
    assert [str(warning.message) for warning in caught] == prepared.notes


def test_the_network_gets_the_inputs_of_the_encoders(frame: MakeFrame) -> None:
    columns = mixed_columns()
    y = prices(columns)
    model = fit(frame(columns), y)
    x = torch.as_tensor(model.table_.encode(read_frame(frame(columns))))
    outputs = model.posterior_.predict(x, samples=4, seed=0).mean.numpy()[:, 0]
    assert_allclose(model.predict(frame(columns)), outputs * y.std() + y.mean(), rtol=1e-9)


WEEKDAYS = ("Mon", "Tues", "Wednes", "Thurs", "Fri", "Satur", "Sun")
DATES = [datetime.date(2024, 1, 1) + datetime.timedelta(days=row) for row in range(ROWS)]
DATE_INPUTS = (
    "c trend",
    "c season (sine)",
    "c season (cosine)",
    *(f"c is a {day}day" for day in WEEKDAYS),
)


@pytest.mark.parametrize(
    ("cells", "features"),
    [
        (np.linspace(0, 1, ROWS), ("c",)),
        (np.linspace(0, 1, ROWS, dtype=np.float32), ("c",)),
        (np.arange(ROWS) % 7, ("c",)),
        ((np.arange(ROWS) % 7).astype(np.uint8), ("c",)),
        ([None, *range(1, ROWS)], ("c", "c is missing")),
        ([np.inf, *range(1, ROWS)], ("c", "c is missing")),
        (["ab"[row % 2] for row in range(ROWS)], ("c=a", "c=b")),
        ([("a", "b", None)[row % 3] for row in range(ROWS)], ("c=a", "c=b", "c=(missing)")),
        (np.arange(ROWS) % 2 == 0, ("c=False", "c=True")),
        ([(True, False, None)[row % 3] for row in range(ROWS)], None),
        (Categories([row % 3 for row in range(ROWS)]), ("c=0", "c=1", "c=2")),
        (Categories([0.5 + row % 2 for row in range(ROWS)]), ("c=0.5", "c=1.5")),
        (Categories([(1, 2, None)[row % 3] for row in range(ROWS)]), None),
        (Categories([("2024-01-01", "2024-02-01")[row % 2] for row in range(ROWS)]), None),
        (DATES, DATE_INPUTS),
        (np.array(DATES, dtype="datetime64[ns]"), DATE_INPUTS),
        ([day.isoformat() for day in DATES], DATE_INPUTS),
        (np.array([None, *DATES[1:]], dtype="datetime64[s]"), (*DATE_INPUTS, "c is missing")),
        (np.arange(ROWS).astype("timedelta64[h]"), ("c",)),
        ([f"{row / 7:.2f}" for row in range(ROWS)], ("c",)),
    ],
)
def test_types_of_columns(frame: MakeFrame, cells: Any, features: tuple[str, ...] | None) -> None:
    table = read_frame(frame({"c": cells}))
    encoder = FrameEncoder.fit(table, np.arange(ROWS), [])
    expected = {
        ("False", "True"): ("c=False", "c=True", "c=(missing)"),
        ("1", "2"): ("c=1", "c=2", "c=(missing)"),
        ("2024-01-01", "2024-02-01"): ("c=2024-01-01", "c=2024-02-01"),
    }
    levels = tuple(sorted(set(table.columns["c"].levels) - {""}))
    assert encoder.features == (expected[levels] if features is None else features)
    assert np.isfinite(encoder.encode(table)).all()


def test_spans_of_time_are_seconds(frame: MakeFrame) -> None:
    hours = np.array([1, 2, "NaT"], dtype="timedelta64[h]")
    values = read_frame(frame({"c": hours})).columns["c"].values
    assert_array_equal(values, [3600, 7200, np.nan])


@pytest.mark.parametrize(
    ("cells", "reason"),
    [
        ([f"row {row}" for row in range(ROWS)], "an identifier or free text"),
        ([None] * ROWS, "is empty"),
        (["always"] * ROWS, "is constant in training"),
        ([f"{row % 24}:15" for row in range(ROWS)], "times of day"),
    ],
)
def test_a_warning_names_columns_that_are_not_used(
    frame: MakeFrame, cells: Any, reason: str
) -> None:
    columns = mixed_columns()
    with pytest.warns(TableWarning, match=f"columns that are not used: 'extra'.*{reason}") as seen:
        model = fit(frame(columns | {"extra": cells}), prices(columns))
    assert len(seen) == 1
    assert any(reason in note for note in model.notes_)
    changed = frame(columns | {"extra": ["whatever"] * ROWS})
    assert_array_equal(model.predict(changed), model.predict(frame(columns | {"extra": cells})))


def test_an_identifier_is_explained_without_options_of_the_command_line() -> None:
    columns = mixed_columns()
    with pytest.warns(TableWarning, match="dropped. To use it as an input, rename it."):
        fit(StandIn({"customer_id": np.arange(ROWS)[::-1] * 3} | columns), prices(columns))


def test_notes_say_what_became_of_the_columns(frame: MakeFrame) -> None:
    notes = " ".join(fit(frame(mixed_columns()), prices(mixed_columns())).notes_)
    assert "Column 'size': 10 of 90 training values are missing; replaced by the median" in notes
    assert "Column 'city': missing values are a separate category." in notes
    assert "Column 'sold' has dates, used as trend, year, season, weekday." in notes


def test_a_frame_without_a_usable_column_is_an_error(frame: MakeFrame) -> None:
    texts = [f"row {row}" for row in range(ROWS)]
    with pytest.raises(DataError, match="no column of the data frame is left as an input.*'a' has"):
        fit(frame({"a": texts}), np.arange(ROWS))


def test_a_value_far_from_all_others_counts_as_missing(frame: MakeFrame) -> None:
    columns = mixed_columns()
    columns["size"][4] = 999_999_999
    with pytest.warns(TableWarning, match="'size': 1 value is far from all others"):
        model = fit(frame(columns), prices(columns))
    assert model.table_.columns[0].high < 10


# --- Names of columns ---


def test_reordered_columns_are_taken_by_name(frame: MakeFrame) -> None:
    columns = mixed_columns()
    model = fit(frame(columns), prices(columns))
    reordered = dict(reversed(columns.items()))
    assert_array_equal(model.predict(frame(reordered)), model.predict(frame(columns)))


def test_reordered_columns_of_numbers_alone_are_an_error_as_in_scikit_learn(
    frame: MakeFrame,
) -> None:
    columns = {"a": np.linspace(0, 1, ROWS), "b": np.sin(np.arange(ROWS))}
    model = fit(frame(columns), columns["a"])
    with pytest.raises(ValueError, match="Feature names must be in the same order"):
        model.predict(frame(dict(reversed(columns.items()))))


def test_missing_columns_are_named(frame: MakeFrame) -> None:
    columns = mixed_columns()
    model = fit(frame(columns), prices(columns))
    with pytest.raises(ValueError, match="yet now missing:\n- city\n- sold\n$"):
        model.predict(frame(without(columns, "sold", "city")))
    with pytest.raises(ValueError, match=r"yet now missing:\n(- \w+\n){5}$"):
        model.predict(frame({"rooms": columns["rooms"]}))


def test_extra_columns_are_an_error_as_in_scikit_learn(frame: MakeFrame) -> None:
    columns = mixed_columns()
    model = fit(frame(columns), prices(columns))
    extra = {f"extra{number}": columns["rooms"] for number in range(7)}
    with pytest.raises(ValueError, match=r"unseen at fit time:\n(- extra\d\n){5}- \.\.\.\n$"):
        model.predict(frame(columns | extra))


def test_columns_of_one_name_are_an_error() -> None:
    class Repeated(StandIn):  # type: ignore[misc]
        columns = ("a", "a")

    with pytest.raises(DataError, match="the data frame has several columns named 'a'; rename"):
        fit(Repeated({"a": np.arange(ROWS)}), np.arange(ROWS))


def test_attributes_of_scikit_learn(frame: MakeFrame) -> None:
    columns = mixed_columns()
    model = fit(frame(columns), prices(columns))
    assert model.n_features_in_ == 6
    assert_array_equal(model.feature_names_in_, list(columns))
    assert model.feature_names_in_.dtype == object
    x = np.random.default_rng(0).normal(size=(ROWS, 2))
    model.fit(x, x[:, 0])
    assert model.n_features_in_ == 2
    assert model.table_ is None
    assert not model.notes_
    assert not hasattr(model, "feature_names_in_")


def test_names_that_are_no_text_are_not_feature_names(frame: MakeFrame) -> None:
    columns = {0: np.linspace(0, 1, ROWS), 1: ["ab"[row % 2] for row in range(ROWS)]}
    model = fit(frame(columns), columns[0])
    assert not hasattr(model, "feature_names_in_")
    assert model.n_features_in_ == 2
    assert model.predict(frame(columns)).shape == (ROWS,)


def test_rows_of_an_array_are_taken_by_position(frame: MakeFrame) -> None:
    columns = mixed_columns()
    model = fit(frame(columns), prices(columns))
    rows = frame(columns).to_numpy()
    with pytest.warns(UserWarning, match="X does not have valid feature names, but BayesRegressor"):
        predictions = model.predict(rows)
    assert_array_equal(predictions, model.predict(frame(columns)))
    with (
        pytest.warns(UserWarning, match="valid feature names"),
        pytest.raises(ValueError, match="X has 5 features, but BayesRegressor is expecting 6"),
    ):
        model.predict(rows[:, :5])


# --- Values that the training rows do not have ---


def test_an_unseen_category_is_none_of_the_known_ones(frame: MakeFrame) -> None:
    columns = mixed_columns()
    model = fit(frame(columns), prices(columns))
    new = columns | {"grade": Categories(["A"] * 89 + ["Z"])}
    with pytest.warns(TableWarning, match="'grade': 1 cells have categories that are not in the"):
        inputs = model._encode(frame(new))
    first = model.table_.features.index("grade=A")
    assert_array_equal(inputs[-1, first : first + 3], 0)
    assert_array_equal(inputs[0, first : first + 3], [1, 0, 0])


def test_an_unseen_category_is_other_where_there_are_many(frame: MakeFrame) -> None:
    shops = [f"s{min(row % 75, 60 if row % 2 else row % 75)}" for row in range(1500)]
    frame_of = {"shop": shops, "size": np.linspace(0, 1, 1500)}
    model = fit(frame(frame_of), np.linspace(0, 1, 1500))
    assert model.table_.features[-2] == "shop=(other)"
    inputs = model._encode(frame({"shop": ["new", shops[0]], "size": [0.1, 0.2]}))
    assert inputs[0, :-1].sum() == inputs[0, -2] == 1


def test_a_missing_number_is_the_median_where_none_was_missing(frame: MakeFrame) -> None:
    columns = without(mixed_columns(), "size") | {"size": np.linspace(0, 10, ROWS)}
    model = fit(frame(columns), prices(columns))
    gaps = columns | {"size": np.full(ROWS, np.nan)}
    with pytest.warns(TableWarning, match="none of them in training; filled with the median 5"):
        predictions = model.predict(frame(gaps))
    median = columns | {"size": np.full(ROWS, 5.0)}
    assert_allclose(predictions, model.predict(frame(median)))


def test_text_in_a_column_of_numbers_counts_as_missing(frame: MakeFrame) -> None:
    columns = mixed_columns()
    model = fit(frame(columns), prices(columns))
    new = columns | {"size": ["large"] * ROWS}
    with pytest.warns(TableWarning, match="90 cells are not numbers .row 1: 'large'"):
        predictions = model.predict(frame(new))
    assert_allclose(predictions, model.predict(frame(columns | {"size": [np.nan] * ROWS})))


def test_integers_are_the_same_as_floats_for_a_category() -> None:
    cells = Categories([row % 3 for row in range(ROWS)])
    model = fit(StandIn({"c": cells}), np.arange(ROWS) % 3)
    new = [{"c": np.array([0, 1, 2], dtype)} for dtype in (int, float)]
    assert_array_equal(*(model.predict(StandIn(columns)) for columns in new))


# --- Settings ---


def test_a_frame_of_numbers_is_as_an_array(frame: MakeFrame) -> None:
    x = np.random.default_rng(0).normal([5, -200], [0.1, 30], size=(ROWS, 2))
    y = x[:, 0] - x[:, 1] / 300
    columns = {"a": x[:, 0], "b": x[:, 1]}
    assert_allclose(fit(frame(columns), y).predict(frame(columns)), fit(x, y).predict(x), rtol=1e-6)


@pytest.mark.parametrize("settings", [{"standardize": False}, {"input_shape": (1, 2)}])
@pytest.mark.peers
def test_a_frame_may_be_a_matrix(settings: dict[str, Any]) -> None:
    x = np.random.default_rng(0).normal(size=(ROWS, 2))
    columns = {"a": x[:, 0], "b": x[:, 1]}
    if "input_shape" in settings:
        settings = settings | {"net": lambda features, outputs: image_network(outputs)}
    model = fit(pandas_frame(columns), x[:, 0], **settings)
    assert model.table_ is None
    expected = fit(x, x[:, 0], **settings).predict(x)
    assert_allclose(model.predict(pandas_frame(columns)), expected, rtol=1e-9)
    with pytest.raises(ValueError, match="could not convert string to float"):
        fit(pandas_frame(columns | {"b": ["a"] * ROWS}), x[:, 0], **settings)


def image_network(outputs: int) -> torch.nn.Module:
    """Return a network of rows (1, 2)."""
    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(2, outputs))


def test_a_function_gets_the_number_of_inputs(frame: MakeFrame) -> None:
    sizes: list[tuple[int, int]] = []

    def network(features: int, outputs: int) -> torch.nn.Module:
        sizes.append((features, outputs))
        return torch.nn.Linear(features, outputs)

    columns = mixed_columns()
    model = fit(frame(columns), prices(columns), net=network, hidden=None)
    assert sizes == [(len(model.table_.features), 1)]


def test_files_hold_the_preprocessing(frame: MakeFrame, tmp_path: Path) -> None:
    columns = mixed_columns()
    new = mixed_columns(seed=3, rows=10)
    model = fit(frame(columns), prices(columns), conformal=0.2)
    model.save(tmp_path / "model.bayou")
    loaded = BayesRegressor.load(tmp_path / "model.bayou")
    assert loaded.table_ == model.table_
    assert loaded.notes_ == model.notes_
    for method in ("predict", "predict_interval"):
        assert_array_equal(getattr(loaded, method)(frame(new)), getattr(model, method)(frame(new)))
    ends = [m.predict_interval(frame(new), conformal=True) for m in (loaded, model)]
    assert_array_equal(*ends)
    with pytest.raises(ValueError, match="yet now missing:\n- city"):
        loaded.predict(frame(without(new, "city")))


def test_statistics_are_those_of_the_rows_of_the_fit(frame: MakeFrame) -> None:
    columns = {"a": np.arange(ROWS) / 10, "b": ["ab"[row % 2] for row in range(ROWS)]}
    model = fit(frame(columns), columns["a"], conformal=0.3)
    encoder = model.table_.columns[0]
    held_out = model.held_x_[:, 0] * encoder.scale + encoder.mean
    is_fitted = ~np.isclose(columns["a"][:, None], held_out).any(1)
    assert is_fitted.sum() == 63
    assert encoder.mean == pytest.approx(columns["a"][is_fitted].mean())
    low, high = model.predict_interval(frame(columns), 0.8, conformal=True)
    assert (low <= high).all()


def test_groups_are_held_out_together(frame: MakeFrame) -> None:
    columns = mixed_columns() | {"group number": np.arange(ROWS) // 9 + 0.5}
    groups = np.arange(ROWS) // 9
    model = BayesRegressor("map", likelihood=NOISE, conformal=0.3, **QUICK)
    model.fit(frame(columns), prices(columns), groups=groups)
    values = model.held_x_[:, model.table_.features.index("group number")]
    assert len(np.unique(values)) * 9 == len(values) == 27


@pytest.mark.parametrize("count", [ROWS - 1, ROWS + 1])
def test_as_many_targets_as_rows(frame: MakeFrame, count: int) -> None:
    with pytest.raises(ValueError, match="inconsistent numbers of samples"):
        fit(frame(mixed_columns()), np.arange(count))


def test_missing_targets_are_an_error(frame: MakeFrame) -> None:
    y = prices(mixed_columns())
    y[3] = np.nan
    with pytest.raises(ValueError, match="Input y contains NaN"):
        fit(frame(mixed_columns()), y)


def test_a_frame_is_no_fitted_state_of_a_clone(frame: MakeFrame) -> None:
    columns = mixed_columns()
    model = fit(frame(columns), prices(columns))
    copied = clone(model)
    assert copied.table_ is None
    assert copied.get_params() == model.get_params()
    again = copied.fit(frame(columns), prices(columns)).predict(frame(columns))
    assert_array_equal(again, model.predict(frame(columns)))


def test_what_is_a_frame() -> None:
    columns = {"a": np.arange(3)}
    assert is_frame(StandIn(columns))
    for source in (columns, np.ones((2, 2)), [[1, 2]], "table.csv", torch.ones(2, 2), None):
        assert not is_frame(source)


def test_a_column_may_hold_any_missing_value() -> None:
    class NA:
        """Equal to nothing and different from nothing, as that of pandas."""

        __hash__ = None  # type: ignore[assignment]

        def __eq__(self, other: object) -> Any:
            return self

        __ne__ = __eq__

        def __bool__(self) -> bool:
            raise TypeError("boolean value of NA is ambiguous")

    column = Column.of(np.array([1, None, np.nan, NA(), "x"], dtype=object))
    assert column.cells == ["1", "", "", "", "x"]


# --- Classes ---


class Ordered:
    """What a pandas Categorical says of its labels."""

    def __init__(self, categories: list[Any], labels: list[Any], *, ordered: bool = True) -> None:
        self.categories = np.array(categories, dtype=object)
        self.codes = np.array([categories.index(label) for label in labels])
        self.ordered = ordered


def class_rows(rows: int = ROWS) -> tuple[Columns, np.ndarray]:
    """Return columns, and ordered classes that depend on them."""
    columns = mixed_columns(rows=rows)
    scores = columns["rooms"] + 2 * columns["garden"]
    y = np.array(ORDER)[np.searchsorted([4, 7], scores)]
    return columns, y


def test_classes_of_a_frame(frame: MakeFrame) -> None:
    columns, y = class_rows()
    model = BayesClassifier("map", **(QUICK | {"steps": 150})).fit(frame(columns), y)
    assert_array_equal(model.classes_, ["high", "low", "medium"])
    assert model.order_ is None
    assert (model.predict(frame(columns)) == y).mean() > 0.8
    assert_allclose(model.predict_proba(frame(columns)).sum(1), 1)


def ordinal(**settings: Any) -> BayesClassifier:
    """Return a small classifier of ordered classes."""
    return BayesClassifier("map", **(QUICK | {"steps": 150, "likelihood": "ordinal"} | settings))


def test_ordered_classes_have_the_probabilities_of_the_cut_points() -> None:
    columns, y = class_rows()
    model = ordinal(order=ORDER).fit(StandIn(columns), y)
    assert_array_equal(model.classes_, ["high", "low", "medium"])
    assert_array_equal(model.order_, ORDER)
    assert model.outputs_ == 1
    p = model.predictive(StandIn(columns))
    free_cuts = p.likelihood.free_cuts.detach().numpy()
    cuts = np.cumsum([free_cuts[0], np.exp(free_cuts[1])])
    below = 1 / (1 + np.exp(p.outputs[..., 0].numpy()[..., None] - cuts))  # P(y ≤ k)
    low, medium = below.mean(0).T
    expected = np.stack([1 - medium, low, medium - low], 1)  # high, low, medium
    probabilities = model.predict_proba(StandIn(columns))
    assert_allclose(probabilities, expected, atol=1e-9)
    assert_array_equal(model.predict(StandIn(columns)), model.classes_[probabilities.argmax(1)])
    assert (model.predict(StandIn(columns)) == y).mean() > 0.8
    lower, upper = model.predict_interval(StandIn(columns), 0.9)
    assert (lower <= probabilities + 1e-9).all()
    assert (probabilities <= upper + 1e-9).all()


def test_a_categorical_says_the_order() -> None:
    columns, y = class_rows()
    labels = Ordered(ORDER, y.tolist())
    given = ordinal(order=ORDER).fit(StandIn(columns), y)
    read = ordinal().fit(StandIn(columns), labels)
    assert_array_equal(read.order_, ORDER)
    assert_array_equal(read.classes_, given.classes_)
    proba = [model.predict_proba(StandIn(columns)) for model in (read, given)]
    assert_array_equal(*proba)
    reverse = ordinal(order=ORDER[::-1]).fit(StandIn(columns), labels)
    assert_array_equal(reverse.order_, ORDER[::-1])


def test_classes_without_an_order_are_sorted() -> None:
    columns, y = class_rows()
    numbers = np.searchsorted(np.sort(ORDER), y) * 5
    model = ordinal().fit(StandIn(columns), numbers)
    assert_array_equal(model.order_, [0, 5, 10])
    unordered = Ordered(ORDER, y.tolist(), ordered=False)
    assert_array_equal(ordinal().fit(StandIn(columns), unordered).order_, sorted(ORDER))


def test_an_order_may_have_classes_without_rows() -> None:
    columns, y = class_rows()
    model = ordinal(order=["none", *ORDER, "huge"]).fit(StandIn(columns), y)
    assert_array_equal(model.order_, ORDER)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"order": ["low", "high"]}, "order must have every class of y once, 'high', 'low', 'med"),
        ({"order": [*ORDER, "low"]}, "order must have every class of y once"),
        ({"likelihood": None, "order": ORDER}, "order is for ordered classes: give likelihood="),
        ({"likelihood": "ordnal"}, "did you mean 'ordinal'"),
        ({"likelihood": "gamma"}, "must be 'categorical' or 'ordinal', .* got 'gamma'"),
        ({"likelihood": bayou.Gaussian(0.1)}, "must be 'categorical' or 'ordinal', .* got Gauss"),
    ],
)
def test_unusable_orders_are_errors(settings: dict[str, Any], message: str) -> None:
    columns, y = class_rows()
    with pytest.raises(ValueError, match=message):
        ordinal(**settings).fit(StandIn(columns), y)


@pytest.mark.parametrize("likelihood", ["categorical", bayou.Categorical(), None])
def test_the_default_is_categorical(likelihood: Any) -> None:
    columns, y = class_rows()
    models = [ordinal(likelihood=spec).fit(StandIn(columns), y) for spec in (likelihood, None)]
    assert models[0].outputs_ == 3
    assert_array_equal(*(model.predict_proba(StandIn(columns)) for model in models))


@pytest.mark.parametrize(
    "likelihood", ["ordinal", bayou.likelihoods.Ordinal(3), bayou.likelihoods.Ordinal(3, (0, 1.0))]
)
def test_files_hold_the_order(likelihood: Any, tmp_path: Path) -> None:
    columns, y = class_rows()
    model = ordinal(likelihood=likelihood, order=ORDER).fit(StandIn(columns), y)
    model.save(tmp_path / "model.bayou")
    loaded = BayesClassifier.load(tmp_path / "model.bayou")
    assert_array_equal(loaded.order_, ORDER)
    assert loaded.get_params()["order"] == ORDER
    proba = [m.predict_proba(StandIn(columns)) for m in (loaded, model)]
    assert_array_equal(*proba)


def test_sets_have_the_order_of_the_classes() -> None:
    columns, y = class_rows()
    model = ordinal(order=ORDER, conformal=0.4).fit(StandIn(columns), y)
    mask = model.predict_set(StandIn(columns), 0.8, empty=False)
    best = model.predict_proba(StandIn(columns)).argmax(1)
    assert mask[np.arange(ROWS), best].all()
    assert mask[np.arange(ROWS), np.searchsorted(model.classes_, y)].mean() > 0.7


def test_arrays_may_have_ordered_classes() -> None:
    x = np.random.default_rng(0).normal(size=(ROWS, 2))
    y = np.digitize(x[:, 0], [-0.5, 0.5])
    model = ordinal().fit(x, y)
    assert (model.predict(x) == y).mean() > 0.85


def test_labels_of_a_categorical_without_rows_of_a_class() -> None:
    labels = Labels.of_series(Ordered(["c", "b", "a"], ["a", "c", "a"]))
    assert labels is not None
    assert_array_equal(labels.classes, ["a", "c"])
    assert_array_equal(labels.codes, [0, 1, 0])
    assert labels.order == ("c", "a")
    assert_array_equal(labels.ranks(None), [1, 0])
    assert_array_equal(labels.ranks(["a", "b", "c"]), [0, 1])


# --- pandas ---


@pytest.mark.peers
@pytest.mark.parametrize("ordered", [False, True])
def test_a_pandas_categorical_of_classes(ordered: bool) -> None:
    import pandas as pd

    columns, y = class_rows()
    labels = pd.Series(pd.Categorical(y, ["none", *ORDER], ordered=ordered))
    model = ordinal().fit(pandas_frame(columns), labels)
    assert_array_equal(model.classes_, sorted(ORDER))
    assert_array_equal(model.order_, ORDER if ordered else sorted(ORDER))
    assert model.score(pandas_frame(columns), labels) > 0.8


@pytest.mark.peers
@pytest.mark.parametrize("dtype", ["boolean", "bool", "Int64", "int8", "string", "object", "float"])
def test_labels_of_any_type_of_pandas(dtype: str) -> None:
    import pandas as pd

    columns = mixed_columns()
    labels = pd.Series(columns["garden"].astype(int)).astype(dtype)
    model = BayesClassifier("map", **QUICK).fit(pandas_frame(columns), labels)
    expected = sorted(set(labels.tolist()))
    assert model.classes_.tolist() == expected
    assert set(model.predict(pandas_frame(columns)).tolist()) <= set(expected)


@pytest.mark.peers
def test_labels_of_objects_of_pandas() -> None:
    import pandas as pd

    columns = mixed_columns()
    bins = pd.Series(pd.cut(prices(columns), [0, 160, 210, 400]))
    model = ordinal().fit(pandas_frame(columns), bins)
    assert_array_equal(model.order_, bins.cat.categories)
    days = pd.Series(np.where(columns["garden"], "2024-01-01", "2023-01-01")).astype(
        "datetime64[s]"
    )
    model = BayesClassifier("map", **QUICK).fit(pandas_frame(columns), days)
    assert model.classes_.tolist() == sorted(set(days.tolist()))


@pytest.mark.peers
@pytest.mark.parametrize("dtype", ["category", "boolean", "object"])
def test_missing_labels_are_an_error(dtype: str) -> None:
    import pandas as pd

    labels = pd.Series([None, *([True, False] * 45)[1:]], dtype=dtype)
    with pytest.raises(
        ValueError, match="y contains NaN: 1 of 90 labels are missing, first in row 1"
    ):
        BayesClassifier("map", **QUICK).fit(pandas_frame(mixed_columns()), labels)


@pytest.mark.peers
def test_nullable_columns_of_pandas() -> None:
    import pandas as pd

    flags = pd.array([True, False, pd.NA] * 30, dtype="boolean")
    counts = pd.array([pd.NA, *range(ROWS - 1)], dtype="Int64")
    zoned = pd.date_range("2024-01-01", periods=ROWS, tz="Europe/Berlin")
    words = pd.array(["a", "b", pd.NA] * 30, dtype="string")
    X = pd.DataFrame({"flag": flags, "count": counts, "day": zoned, "word": words})
    model = fit(X, np.arange(ROWS))
    names = set(model.table_.features)
    assert {"flag=True", "flag=(missing)", "count is missing", "day trend"} <= names
    assert "word=(missing)" in names
    assert "day hour (sine)" not in names


@pytest.mark.peers
def test_cross_validation_and_grid_search() -> None:
    import pandas as pd
    from sklearn.model_selection import GridSearchCV, cross_val_score

    columns, y = class_rows(rows=150)
    X = pandas_frame(columns)
    labels = pd.Series(pd.Categorical(y, ORDER, ordered=True))
    for scoring in ("accuracy", "neg_log_loss"):
        scores = cross_val_score(ordinal(), X, labels, cv=3, scoring=scoring)
        assert (scores > {"accuracy": 0.7, "neg_log_loss": -0.7}[scoring]).all()
    search = GridSearchCV(
        BayesRegressor("map", likelihood=NOISE, **QUICK), {"steps": [1, 80]}, cv=2
    )
    search.fit(X, prices(columns))
    assert search.best_params_ == {"steps": 80}
    assert search.predict(X[X.columns[::-1]]).shape == (150,)


@pytest.mark.peers
def test_pipelines() -> None:
    from sklearn.compose import make_column_selector, make_column_transformer
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    columns = mixed_columns()
    X = pandas_frame(columns)
    scaler = make_column_transformer(
        (StandardScaler(), make_column_selector(dtype_include="number")),
        remainder="passthrough",
        verbose_feature_names_out=False,
    ).set_output(transform="pandas")
    model = BayesRegressor("map", likelihood=NOISE, **QUICK)
    pipeline = make_pipeline(scaler, model).fit(X, prices(columns))
    assert set(pipeline[-1].feature_names_in_) == set(columns)
    assert_allclose(
        pipeline.predict(X[X.columns[::-1]]), pipeline.predict(X)
    )  # the transformer takes them by name
    alone = clone(model).fit(X, prices(columns)).predict(X)
    assert np.corrcoef(alone, pipeline.predict(X))[0, 1] > 0.95


@pytest.mark.peers
def test_rows_of_another_index() -> None:
    columns = mixed_columns()
    X = pandas_frame(columns).set_index(np.arange(ROWS)[::-1] * 2)
    model = fit(X, prices(columns))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert_array_equal(model.predict(X), model.predict(X.reset_index(drop=True)))
