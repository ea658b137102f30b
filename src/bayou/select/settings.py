"""Settings of all methods by name, declared once for the command line, saved configs and
estimators.

This module does not import torch: ``bayou --help`` reads these fields.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any

from bayou.core.progress import spell

TRAINING, RUN = "Training", "Run"  # sections of --help
# Of built-in data, arrays and the estimators; results/train-defaults.md compares it with others.
DEFAULT_METHOD = "laplace"
DEFAULT_METHOD_OF_FILES = "auto"  # of `bayou train` for a file of rows

Must = tuple[str, Callable[[Any], bool]]  # in words, and as a test
ONE_OR_MORE: Must = ("at least 1", lambda value: value >= 1)
POSITIVE: Must = ("a positive number", lambda value: 0 < value < float("inf"))
SHARE: Must = ("from 0 to 1", lambda value: 0 <= value <= 1)
VALIDATION = "validation"  # the beta that is selected on held-out rows
WEIGHT: Must = (
    f"at least 0, or {VALIDATION}",
    lambda value: value == VALIDATION or (not isinstance(value, str) and value >= 0),
)
FRACTION: Must = ("a fraction from 0 to below 1", lambda value: 0 <= value < 1)


class ConfigError(ValueError):
    """A setting that cannot be used, or a file that is not a config."""


def setting(default: Any, part: str, help: str, must: Must | None = None) -> Any:
    """Declare a field with its section and text in --help.

    Args:
        default: its value by default.
        part: the section.
        help: the text.
        must: the condition that a value other than None must meet, in words and as a test.
    """
    return field(default=default, metadata={"part": part, "help": help, "must": must})


@dataclass(frozen=True, kw_only=True)
class Training:
    """Settings of a method by name. ``None`` leaves the choice to the method."""

    steps: int | None = setting(None, TRAINING, "optimizer steps", ONE_OR_MORE)
    epochs: int | None = setting(
        None, TRAINING, "passes over the data, instead of steps", ONE_OR_MORE
    )
    effort: float = setting(
        1.0, TRAINING, "multiplies the default length of fit and selection", POSITIVE
    )
    batch_size: int = setting(
        128, TRAINING, "rows per step; by default 512 in large regressions", ONE_OR_MORE
    )
    lr: float | None = setting(
        None, TRAINING, "learning rate; by default the method's own", POSITIVE
    )
    members: int | None = setting(
        None, TRAINING, "networks of an ensemble; by default 5, for tabm 16", ONE_OR_MORE
    )
    chains: int | None = setting(
        None, TRAINING, "chains of a sampler; by default the method's own", ONE_OR_MORE
    )
    beta: float | str = setting(
        1.0,
        TRAINING,
        "weight of the KL of variational methods; 1 for the ELBO, validation to select it on "
        "held-out rows by five fits",
        WEIGHT,
    )
    warmup: float = setting(
        0.0, TRAINING, "fraction of the steps over which beta increases from 0", SHARE
    )
    validation: float = setting(
        0.0, TRAINING, "fraction of training rows held out to select the best epoch", FRACTION
    )
    patience: int | None = setting(
        None, TRAINING, "epochs without improvement before a run stops", ONE_OR_MORE
    )
    compile: bool | None = setting(
        None, RUN, "torch.compile the training step; by default on a GPU"
    )

    def __post_init__(self) -> None:
        if isinstance(self.beta, str) and self.beta != VALIDATION:
            with contextlib.suppress(ValueError):  # of the condition below
                object.__setattr__(self, "beta", float(self.beta))
        for option in fields(self):
            value = getattr(self, option.name)
            must = option.metadata.get("must")
            is_plain = isinstance(value, str | int | float) and not isinstance(value, bool)
            if must is not None and value is not None and not (is_plain and must[1](value)):
                name = spell(option.name, f"--{option.name.replace('_', '-')}")
                raise ConfigError(f"{name} must be {must[0]}, got {value!r}")
        if self.steps is not None and self.epochs is not None:
            names = spell("steps or epochs", "--steps or --epochs")
            raise ConfigError(
                f"give {names}, not both: got {self.steps} steps and {self.epochs} epochs"
            )
        if self.patience is not None and not self.validation:
            raise ConfigError(
                spell(
                    "patience needs held-out rows; give validation too, for example 0.1",
                    "--patience needs held-out rows; give --validation too, for example 0.1",
                )
            )

    @property
    def autocast(self) -> bool:
        """Whether matrix products run in bfloat16."""
        return False


_ARGS = "\n".join(f"    {item.name}: {item.metadata['help']}." for item in fields(Training))
Training.__doc__ = f"{Training.__doc__}\n\nArgs:\n{_ARGS}\n"
