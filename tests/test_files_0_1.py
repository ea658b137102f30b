"""Files that bayou 0.1 wrote are read by this version, and give the same numbers."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import bayou
from tests.files_0_1.cases import CASES, HERE, network_of, other_predictions, predictions

MAX_BYTES = 50_000
TOLERANCE = 1e-5  # processors and versions of torch round differently, also in float32 noise


@pytest.fixture(scope="module")
def stored():
    return load_file(HERE / "predictions.safetensors")


def test_the_files_are_those_of_the_cases_and_small():
    files = {
        path.name: path for path in HERE.iterdir() if path.suffix in (".bayou", ".safetensors")
    }
    posteriors = {f"{name}.bayou" for name in CASES}
    others = {"conformal.bayou", "estimator.bayou", "flow.safetensors", "predictions.safetensors"}
    assert set(files) == posteriors | others
    assert all(Path(path).stat().st_size < MAX_BYTES for path in files.values())


@pytest.mark.parametrize("name", CASES)
def test_a_posterior_of_0_1_predicts_what_it_predicted(name, stored):
    posterior = bayou.load(HERE / f"{name}.bayou", network_of(name))
    for quantity, value in predictions(posterior).items():
        expected = stored[f"{name}.{quantity}"]
        assert value.isfinite().all()
        torch.testing.assert_close(value, expected, rtol=TOLERANCE, atol=TOLERANCE)


def test_a_flow_a_conformal_prediction_and_an_estimator_of_0_1_give_what_they_gave(stored):
    for name, value in other_predictions().items():
        torch.testing.assert_close(value, stored[name], rtol=TOLERANCE, atol=TOLERANCE)


def test_all_numbers_are_compared(stored):
    names = {f"{name}.{quantity}" for name in CASES for quantity in ("mean", "spread")}
    assert set(stored) == names | {"flow.log_prob", "conformal.interval", "estimator.mean"}
