"""The digest of what made a row: a changed setting or default gives another one, and the row is
stale.
"""

from __future__ import annotations

import hashlib
import inspect
import json
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import nn

from bayou.app.runs import layers
from bayou.app.runs.nets import NETS
from bayou.core.specs import is_written
from bayou.likelihoods import Categorical
from bayou.methods.vi import Variational
from bayou.network.target import Target
from bayou.select.best_method import HELD_OUT_FRACTION
from bayou.select.ensemble_spread import MIN_TRAINING_ERROR
from bayou.select.folds import FOLDS, SINGLE_FOLD_ROWS
from bayou.select.full_batch import MAX_FULL_BATCH_ROWS
from bayou.select.input_scales import JITTER, LEAST, LOG_STD, MAX_ROWS, PASSES as INPUT_PASSES
from bayou.select.many_rows import LARGE_BATCH, LARGE_EPOCHS, LARGE_HELD_OUT, LARGE_STEPS
from bayou.select.noise import MORE_ROWS, PSEUDO_ROWS, WIDTH_DRAWS
from bayou.select.noise_and_prior import GAIN_OF_CLASSES, GAIN_OF_NUMBERS
from bayou.select.prior_scale import MAX_SCALE_STEPS, MAX_UP_STEPS_RANDOM, SCALE_FACTOR
from bayou.select.random_layers import TRIAL_LENGTH
from bayou.select.ratio import (
    FIRST_LAYER_DIVISORS,
    NOISE_FACTOR,
    NOISE_STEPS,
    WIDE_BIAS_FACTOR,
)
from bayou.select.recipes import MAX_FULL_WEIGHTS
from bayou.select.regularization_path import (
    LOG_PROB_PASSES,
    MIN_GAIN,
    MIN_SIGNAL,
    NUDGE,
    PASSES,
)

IDLE = (
    "log_every",
    "checkpoint_every",
    "random_state",
    "device",
    "verbose",
)  # settings that change no number
# Values that decide what a method by name does, beside the fields of its recipe. A changed value
# makes the rows of all these methods stale.
SELECTION: dict[str, Any] = {
    "folds": [FOLDS, SINGLE_FOLD_ROWS, MAX_FULL_BATCH_ROWS],
    "path": [PASSES, LOG_PROB_PASSES, NUDGE, MIN_SIGNAL, MIN_GAIN],
    "prior scale": [SCALE_FACTOR, MAX_SCALE_STEPS, MAX_UP_STEPS_RANDOM],
    "gains": [GAIN_OF_CLASSES, GAIN_OF_NUMBERS],
    "noise and shape": [NOISE_FACTOR, NOISE_STEPS, WIDE_BIAS_FACTOR, FIRST_LAYER_DIVISORS],
    "noise of the method": [WIDTH_DRAWS, MORE_ROWS, PSEUDO_ROWS, MIN_TRAINING_ERROR],
    "input scales": [MAX_ROWS, INPUT_PASSES, LOG_STD, LEAST, JITTER],
    "many rows": [LARGE_BATCH, LARGE_EPOCHS, LARGE_STEPS, LARGE_HELD_OUT],
    "size": MAX_FULL_WEIGHTS,
    "held-out fraction": HELD_OUT_FRACTION,
}
# The same for the random layers of a method by name, for classes.
LAYERS: list[Any] = [
    TRIAL_LENGTH,
    ["last layer", "wider prior if it was selected", "learned points of VI", "all layers"],
]


def digest(*parts: Any) -> str:
    """Twelve digits of the SHA-256 of these values, each spelled with the defaults of its
    fields.
    """
    return hashlib.sha256(json.dumps([spell(part) for part in parts]).encode()).hexdigest()[:12]


def network(name: str) -> tuple[Any, ...]:
    """The settings and the builder of a network by name."""
    return NETS[name], getattr(layers, NETS[name].builder)


def spell(value: Any) -> Any:
    """A value as JSON: a spec by all its fields, a function or class by its qualified name and its
    defaults.

    A variational method is spelled a second time as it is for a large network, with the prior that
    it chooses there.
    """
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, torch.dtype):
        return str(value)
    if isinstance(value, list | tuple):
        return [spell(item) for item in value]
    if isinstance(value, Mapping):
        return [[spell(key), spell(item)] for key, item in value.items() if key not in IDLE]
    if is_dataclass(value) and not isinstance(value, type):
        if not isinstance(value, Variational):
            return _fields(value)
        large, target = value.adapt_to_size(
            Target.build(nn.Linear(100, 100), Categorical(), None, 1)
        )
        return [_fields(value), _fields(large), spell(target.prior)]
    if callable(value) and hasattr(value, "__qualname__"):
        parameters = inspect.signature(value).parameters.values()
        defaults = {one.name: one.default for one in parameters if one.default is not one.empty}
        return [value.__qualname__, spell(defaults)]
    raise TypeError(
        f"no digest of a {type(value).__name__}: {value!r:.80}; spell it by its settings"
    )


def _fields(spec: Any) -> list[Any]:
    written = {one.name: getattr(spec, one.name) for one in fields(spec) if is_written(one, spec)}
    return [type(spec).__qualname__, spell(written)]
