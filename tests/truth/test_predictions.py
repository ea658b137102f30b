"""Files of predictions: what is written is read, and every mistake is one sentence."""

import numpy as np
import pytest
import torch

from bayou import metrics
from bayou.data import DataError
from bayou.truth import (
    PredictionError,
    class_predictive,
    read_predictions,
    write_predictions,
)

PROBS = np.array([[0.7, 0.2, 0.1], [0.05, 0.05, 0.9]])


@pytest.fixture
def path(tmp_path):
    return tmp_path / "mine.npz"


def test_what_is_written_is_read(path):
    write_predictions(
        path,
        torch.from_numpy(PROBS),
        name="two fits",
        url="https://example.org/a",
        epochs=100,
        minutes=2.5,
        seeds=(3, 4),
    )
    predictions = read_predictions(path)
    assert torch.allclose(predictions.log_probs.exp(), torch.from_numpy(PROBS))
    assert (predictions.name, predictions.url) == ("two fits", "https://example.org/a")
    assert (predictions.epochs, predictions.minutes) == (100.0, 2.5)
    assert predictions.seeds == (3, 4)


@pytest.mark.parametrize("dtype", ["f2", "f4", "f8"])
@pytest.mark.parametrize("key", ["probs", "log_probs"])
def test_probabilities_and_logarithms_of_every_precision_are_the_same_predictions(path, dtype, key):
    values = PROBS if key == "probs" else np.log(PROBS)
    np.savez(path, **{key: values.astype(dtype)})
    predictions = read_predictions(path)
    assert predictions.name == "mine"  # that of the file
    assert (predictions.epochs, predictions.minutes, predictions.seeds) == (None, None, ())
    tolerance = {"f2": 1e-3, "f4": 1e-7, "f8": 1e-15}[dtype]
    np.testing.assert_allclose(predictions.log_probs.exp(), PROBS, atol=tolerance)
    np.testing.assert_allclose(predictions.log_probs.exp().sum(1), 1, atol=1e-15)


def test_a_predictive_has_the_given_probabilities():
    predictive = class_predictive(torch.from_numpy(PROBS).log() + 5)  # up to a constant of the row
    np.testing.assert_allclose(predictive.probabilities, PROBS)
    assert metrics.accuracy(predictive, torch.tensor([0, 1])) == 0.5


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({}, "one of the arrays probs and log_probs, (N, C), got neither; write predictions with"),
        ({"probs": PROBS, "log_probs": np.log(PROBS)}, "got probs and log_probs"),
        ({"probs": PROBS, "epoch": 3}, "an array 'epoch' (did you mean 'epochs'?)"),
        ({"probs": np.array([0, 2])}, "must be floating point, got int64; class probabilities"),
        ({"probs": PROBS[None]}, "got (1, 2, 3); average the probabilities of the draws"),
        ({"probs": PROBS[0]}, "must have the shape (N, C), one row for each test row"),
        (
            {"probs": np.where(PROBS == 0.9, np.nan, PROBS)},
            "NaN in 1 of 2 rows, the first is row 1",
        ),
        ({"probs": np.log(PROBS)}, "must be probabilities in [0, 1], got -0.356675 in row 0"),
        ({"probs": PROBS * [[1], [0.8]]}, "got 0.8 in row 1 (1 of 2 rows are wrong)"),
        ({"log_probs": PROBS}, "must be logarithms of probabilities, got 0.7 in row 0"),
        ({"log_probs": np.log(PROBS) - 1}, "sum to 1 in every row, got 0.367879 in row 0"),
        ({"log_probs": np.full((2, 3), -np.inf)}, "sum to 1 in every row, got 0 in row 0"),
        ({"probs": PROBS, "name": 3.0}, "name of mine.npz must be one line of text"),
        ({"probs": PROBS, "name": "a\nb"}, "name of mine.npz must be one line of text"),
        ({"probs": PROBS, "url": "example.org"}, "must begin with https:// or http://"),
        ({"probs": PROBS, "epochs": "50"}, "epochs of mine.npz must be one number of at least 0"),
        ({"probs": PROBS, "minutes": -1.0}, "minutes of mine.npz must be one number of at least 0"),
        ({"probs": PROBS, "seeds": [0.5]}, "whole numbers (K,), got 0.5"),
    ],
)
def test_a_mistake_says_what_was_got_and_what_was_expected(path, content, message):
    np.savez(path, **content)
    with pytest.raises(PredictionError) as error:
        read_predictions(path)
    assert message in str(error.value)


def test_nothing_in_a_file_is_executed(path):
    np.savez(path, probs=np.array([{"a": 1}], dtype=object))
    with pytest.raises(DataError, match=r"Python objects are not read.*write predictions with"):
        read_predictions(path)


def test_other_files_are_refused(path):
    with pytest.raises(FileNotFoundError):
        read_predictions(path)
    path.write_text("0.7,0.2,0.1")
    with pytest.raises(DataError, match=r"mine\.npz as NPZ: .*write predictions with"):
        read_predictions(path)


def test_wrong_predictions_are_not_written(path):
    with pytest.raises(PredictionError, match="sum to 1"):
        write_predictions(path, PROBS / 2)
    assert not path.exists()
