"""The ratio of noise and prior scale of a regression, and the shape of its prior.

The mode of a regression depends on noise²/scale² only. Modes follow a path of falling ratios, each
from the previous one, for several shapes of the prior.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from bayou.core.params import Params
from bayou.core.progress import Progress
from bayou.inference.point import PointModel
from bayou.network.target import Target
from bayou.posteriors.posterior import Stage
from bayou.select.budget import shares_passes
from bayou.select.folds import Fold, held_out_masks
from bayou.select.input_scales import Scales, input_scales
from bayou.select.noise import initial_noise
from bayou.select.noise_and_prior import NoiseAndPrior, first_layer, takes_columns
from bayou.select.regularization_path import PathSpec, path_passes, search_paths
from bayou.select.search_run import SearchRun, stage_record, stop_at_network
from bayou.training.data import Rows
from bayou.training.guards import Interrupt

NOISE_FACTOR: Final = 2.0  # between two candidates for the noise
NOISE_STEPS: Final = (2, 1, 0, -1, -2, -3, -4, -5, -6)  # such factors from the given noise
WIDE_BIAS_FACTOR: Final = 10.0  # of the candidate with a wider prior of biases
# Factors by which the first layer's priors are narrower and the others wider.
FIRST_LAYER_DIVISORS: Final = (1.0, 2.0, 4.0)


def select_ratio_and_shape(
    target: Target, rows: Rows, folds: Sequence[Fold], run: SearchRun
) -> tuple[NoiseAndPrior, Params, list[Stage]]:
    """Select the ratio and the shape whose modes predict held-out rows best.

    Args:
        target: with a learned Gaussian noise and fixed Normal priors.
        rows: all rows.
        folds: training and held-out rows.
        run: of the search.

    Returns:
        The settings; the modes of the training rows of the first fold and of all rows, (2, ...);
        the records of the stages.

    Raises:
        SearchInterrupted: after Ctrl-C, with the network as given.
    """
    noise = initial_noise(target)
    PointModel(run.start, target).check_first_batch(rows)
    is_deep = len(first_layer(target)) < len(target.free)
    noises = candidate_noises(noise)
    scales_by_fold: Scales = [()] * (len(folds) + 1)
    stages: list[Stage] = []
    with Progress("choosing noise and prior", len(noises), run.progress) as line, Interrupt():
        try:
            line.announce()
            if is_deep:
                scales_by_fold, stages = _select_input_scales(target, rows, folds, run)
            started = time.perf_counter()
            first = NoiseAndPrior(
                noise, input_scales=scales_by_fold[-1], fold_input_scales=scales_by_fold[0]
            )
            shapes = [first]
            if shares_passes(target, rows):
                shapes = prior_shapes(first, is_deep)
            multipliers = [
                [
                    replace(shape, input_scales=scales).multipliers(target)
                    for scales in scales_by_fold
                ]
                for shape in shapes
            ]
            path_target = NoiseAndPrior(noise).apply(target)
            steps = path_steps(noises, noise)
            passes = path_passes(path_target, run.effort)
            search = search_paths(path_target, rows, folds, multipliers, steps, line, passes)
        except KeyboardInterrupt:
            raise stop_at_network(target) from None
    selected_noise = math.sqrt(float(search.errors.mean()))
    settings = replace(
        shapes[search.prior],
        noise=selected_noise,
        scale=selected_noise / noises[search.step],
        fold_error=float(search.errors[: folds[0][1].n].mean()),
    )
    trials = [
        _describe_trial(shapes[prior], noises[step], error)
        for (prior, step), error in search.trials.items()
    ]
    modes = {name: value[[0, -1]] for name, value in search.modes.items()}
    return settings, modes, [*stages, stage_record("noise and prior", started, trials)]


def _select_input_scales(
    target: Target, rows: Rows, folds: Sequence[Fold], run: SearchRun
) -> tuple[Scales, list[Stage]]:
    """Select prior scales by input for each fold and for all rows.

    There are none where the first layer has no weight for every column.
    """
    started = time.perf_counter()
    masks = held_out_masks(rows, folds)
    x, y = next(rows.with_batch_size(rows.n).epoch())
    if not takes_columns(target, x):
        return [()] * len(masks), []
    scales, trials = input_scales(x, y, masks, run.part_seed("inputs"))
    return scales, [stage_record("prior by input", started, list(trials))]


def prior_shapes(first: NoiseAndPrior, is_deep: bool) -> list[NoiseAndPrior]:
    """Return the shapes of the prior that a search compares.

    Args:
        first: the prior as it is.
        is_deep: whether there are layers after the first.

    Returns:
        Priors with wider biases and narrower first layers.
    """
    divisors = FIRST_LAYER_DIVISORS if is_deep else (1.0,)
    return [
        replace(first, bias_factor=bias_factor, first_layer_divisor=divisor)
        for divisor in divisors
        for bias_factor in (WIDE_BIAS_FACTOR, 1.0)
    ]


def path_to(settings: NoiseAndPrior, target: Target) -> PathSpec:
    """Return the path of modes that ends at selected settings.

    Args:
        settings: the selected settings.
        target: before the search.
    """
    noise = initial_noise(target)
    last = 0.99 * settings.noise / settings.scale
    noises = [candidate for candidate in candidate_noises(noise) if candidate > last]
    return PathSpec(
        NoiseAndPrior(noise).apply(target),
        replace(settings, scale=1.0).multipliers(target),
        path_steps(noises, noise),
    )


def candidate_noises(noise: float) -> list[float]:
    """Return the noises that are compared at a fixed prior scale, from large to small.

    Args:
        noise: the initial noise.
    """
    return [noise * NOISE_FACTOR**step for step in NOISE_STEPS]


def path_steps(noises: Sequence[float], noise: float) -> list[float]:
    """Return multipliers of prior precisions that give the modes of some noises at another one.

    Args:
        noises: the noises.
        noise: the noise of the target.
    """
    return [(candidate / noise) ** 2 for candidate in noises]


def _describe_trial(shape: NoiseAndPrior, noise: float, error: float) -> dict[str, float]:
    """Return the settings of a trial and its error, by names that a report shows."""
    trial = {"noise at this prior scale": noise}
    if shape.bias_factor != 1:
        trial["bias prior wider by"] = shape.bias_factor
    if shape.first_layer_divisor != 1:
        trial["first layer's prior narrower by"] = shape.first_layer_divisor
    return trial | {"mse": error}
