"""Scores of targets under a predictive distribution: with targets from it they are standardized."""

import math

import pytest
import torch

import bayou
from bayou.calibration import QuantileMap
from bayou.diagnostics.target_scores import ENTROPY_DRAWS, target_scores
from bayou.likelihoods.predictive import Predictive

ROWS = 2000
MAP = QuantileMap(torch.tensor([0.0, 0.3, 0.7, 1.0]), torch.tensor([0.0, 0.1, 0.4, 1.0]))


@pytest.mark.parametrize("maps", [False, True])
def test_log_scores_of_targets_from_the_predictive_have_mean_0_and_std_1(maps):
    centers = torch.tensor([-3.0, 0.0, 0.5, 4.0], dtype=torch.float64)
    likelihood = bayou.Gaussian(0.5).bind(dtype=torch.float64)
    one_row = centers[:, None, None]
    if maps:
        likelihood, one_row = MAP.apply(likelihood, one_row)
    y = Predictive(likelihood, one_row).sample(ROWS, seed=0)[:, 0]
    scores = target_scores(Predictive(likelihood, one_row.expand(-1, ROWS, -1)), y, seed=1)
    log_score = scores.log_score[:, 0]
    # The variance of the expectation from 64 draws adds to that of the score of a row.
    error = math.sqrt((1 + 1 / ENTROPY_DRAWS) / ROWS)
    assert abs(float(log_score.mean())) < 4 * error
    fourth = float((log_score - log_score.mean()).pow(4).mean())
    assert abs(float(log_score.var()) - 1) < 4 * math.sqrt((fourth - 1) / ROWS) + 4 / ENTROPY_DRAWS
    # The levels are uniform: mean 1/2, variance 1/12.
    assert abs(float(scores.pit.mean()) - 0.5) < 4 * math.sqrt(1 / 12 / ROWS)
