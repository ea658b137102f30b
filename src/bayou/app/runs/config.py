"""The settings of a run: fields = flags of the command line = keys of the saved file.

This module does not use torch. A setting is declared once, as a field of ``Config``: its type,
default, text for ``--help`` and condition. Commands, saved files and, for the settings of training,
the estimators of ``bayou.adapters.sklearn`` are made from it.
"""

from __future__ import annotations

import dataclasses
import json
import shlex
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, final

from bayou.data.catalogue import TABLE_SUFFIXES
from bayou.select.settings import (
    DEFAULT_METHOD,
    DEFAULT_METHOD_OF_FILES,
    ONE_OR_MORE,
    POSITIVE,
    RUN,
    ConfigError,
    Must,
    Training,
    setting,
)

FORMAT = 1
DATA = "Data"  # a section of --help, as those of ``Training``
MODEL = "Model"  # a section of --help
ARRAYS_SUFFIX = ".npz"
MAX_SEEDS = 1000  # and splits: a run lists every job
UP_TO_MAX: Must = (f"from 1 to {MAX_SEEDS:,}", lambda value: 1 <= value <= MAX_SEEDS)
ZERO_OR_MORE: Must = ("0 or more", lambda value: value >= 0)
PRIOR: Must = ("a positive number", lambda value: value == "fan_in" or 0 < value < float("inf"))


def default_method(data: str) -> str:
    """Return the method of `bayou train` where none is given.

    Rows of a file get the mixture of several methods, which takes ten times as long as one of them
    and is better on most tables. Built-in data sets and arrays (.npz) get one method.

    Args:
        data: a built-in data set, or a file.
    """
    path = str(data).lower()
    if path.endswith(TABLE_SUFFIXES) and not path.endswith(ARRAYS_SUFFIX):
        return DEFAULT_METHOD_OF_FILES
    return DEFAULT_METHOD


def must_be_in(*names: str) -> Must:
    """Return the condition that a value is one of these names.

    Args:
        names: at least two.
    """
    return f"{', '.join(names[:-1])} or {names[-1]}", names.__contains__


@final
@dataclass(frozen=True)
class Config(Training):
    """The settings of a run, in addition to those of ``Training``.

    ``None`` is chosen by the data set or the method.

    Args:
        data: a built-in data set, or a file.
        methods: their names.
        target: the target column of a file.
        task: "classification" or "regression"; by default inferred from the target.
        drop: columns of a file that are not used.
        id: a column that identifies rows: not an input, copied to predictions.
        group: a column whose groups of rows are not divided by a split: not an input.
        split_by_time: a column by which the latest rows are held out.
        split: number of the published or generated split.
        ood: another source of out-of-distribution data, or "none".
        seed: the first seed.
        seeds: number of seeds.
        splits: number of splits of the data, from ``split`` on.
        net: the name of the network.
        prior: standard deviation of the prior, or "fan_in" for gain/√fan_in.
        gain: of the "fan_in" prior; by default selected on held-out rows.
        noise: initial Gaussian noise of a regression, in standard deviations of y.
        likelihood: the name of the distribution of y; by default Gaussian or categorical.
        observed: a column that says which rows of a survival target were observed, not censored.
        order: the classes of an ordered target, from the lowest to the highest.
        heteroscedastic: the network also predicts the noise of y at each x.
        samples: networks averaged for a prediction.
        device: "cpu", "cuda" or "auto".
        precision: "float32", "float64" or "bf16" (matrix products only).
        keep_rows: random rows of a file, of training and of test, that the run folder keeps for
            `bayou watch`; 0 for none.
    """

    data: str = "digits"
    methods: tuple[str, ...] = (DEFAULT_METHOD,)
    target: str | None = setting(None, DATA, "target column of a file")
    task: str | None = setting(
        None,
        DATA,
        "classification or regression; by default inferred from the target",
        must_be_in("classification", "regression"),
    )
    drop: tuple[str, ...] = setting((), DATA, "a column of a file to leave out; repeatable")
    id: str | None = setting(
        None, DATA, "a column that identifies rows: not an input, copied to predictions"
    )
    group: str | None = setting(
        None, DATA, "a column of groups, such as patients: all rows of one are held out, or none"
    )
    split_by_time: str | None = setting(
        None, DATA, "a column of dates or numbers: the latest rows are held out"
    )
    observed: str | None = setting(
        None,
        DATA,
        "column with two values that says whether the event of a row was observed (the larger "
        "value) or the row was censored: for survival times",
    )
    order: str | None = setting(
        None, DATA, 'classes of an ordered target from low to high: "Fair,Good,Very Good"'
    )
    split: int = setting(0, DATA, "number of the published or generated split")
    ood: str | None = setting(None, DATA, "another source of out-of-distribution data, or none")
    seed: int = setting(0, RUN, "the first seed")
    seeds: int = setting(
        1, RUN, "number of seeds; with several the report has standard errors", UP_TO_MAX
    )
    splits: int = setting(
        1,
        RUN,
        "number of splits of the data, from --split on; with several the report has means "
        "and standard errors over them",
        UP_TO_MAX,
    )
    net: str | None = setting(
        None, MODEL, "network, see `bayou list nets`; by default chosen by the data"
    )
    prior: float | str = setting(
        "fan_in", MODEL, "standard deviation of the prior, or fan_in for gain/√fan_in", PRIOR
    )
    gain: float | None = setting(
        None, MODEL, "gain of the fan_in prior; by default by held-out rows", POSITIVE
    )
    noise: float = setting(
        0.5, MODEL, "initial Gaussian noise of a regression, in standard deviations of y", POSITIVE
    )
    likelihood: str | None = setting(
        None,
        MODEL,
        "distribution of y, see `bayou list likelihoods`, or auto: gaussian, student-t or "
        "lognormal, whichever predicts held-out rows best",
    )
    heteroscedastic: bool = setting(
        False, MODEL, "the network also predicts the noise of y: --likelihood heteroscedastic"
    )
    samples: int = setting(100, RUN, "networks averaged for a prediction", ONE_OR_MORE)
    device: str = setting("cpu", RUN, "cpu, cuda or auto")
    precision: str = setting(
        "float32",
        RUN,
        "float32, float64 or bf16 (matrix products only)",
        must_be_in("float32", "float64", "bf16"),
    )
    keep_rows: int = setting(
        2000,
        RUN,
        "rows of a file, of training and of test, kept in the run folder for `bayou watch`; 0: "
        "none, then it reads the file again",
        ZERO_OR_MORE,
    )

    def __post_init__(self) -> None:
        if not self.methods:
            raise ConfigError(
                "no methods given; give at least one, such as mnf (`bayou list methods` shows all)"
            )
        for name in ("methods", "drop"):
            object.__setattr__(self, name, tuple(dict.fromkeys(getattr(self, name))))
        if isinstance(self.prior, str) and self.prior != "fan_in":
            try:
                object.__setattr__(self, "prior", float(self.prior))
            except ValueError:
                raise ConfigError(
                    f"prior must be 'fan_in' or a standard deviation, got {self.prior!r}"
                ) from None
        censored = {"weibull": "censored-weibull", "lognormal": "censored-lognormal"}
        if self.observed is not None and self.likelihood in (None, *censored):
            name = censored[self.likelihood or "weibull"]
            object.__setattr__(self, "likelihood", name)
        super().__post_init__()

    @property
    def autocast(self) -> bool:
        """Whether matrix products are computed in bfloat16."""
        return self.precision == "bf16"

    @classmethod
    def settings(cls, *sections: str) -> dict[str, dataclasses.Field[Any]]:
        """Return the fields that are settings by name: all but data and methods.

        Args:
            sections: only those of these sections of --help; all by default.
        """
        return {
            field.name: field
            for field in fields(cls)
            if field.metadata and (not sections or field.metadata["part"] in sections)
        }

    def to_json(self) -> dict[str, Any]:
        """Return the settings as plain values."""
        values: dict[str, Any] = {"bayou": FORMAT}
        for name, value in dataclasses.asdict(self).items():
            values[name] = list(value) if isinstance(value, tuple) else value
        return values

    def command(self) -> str:
        """Return the command that repeats the run, with the settings that are not the defaults."""
        words = ["bayou", "compare", self.data, "--methods", ",".join(self.methods)]
        if len(self.methods) == 1:
            words = ["bayou", "train", self.data, "--method", self.methods[0]]
        for name, field in self.settings().items():
            value = getattr(self, name)
            option = name.replace("_", "-")
            if value == field.default:
                continue
            if isinstance(value, bool):
                words.append(f"--{option}" if value else f"--no-{option}")
                continue
            items = value if isinstance(value, tuple) else (value,)
            for item in items:
                words += [f"--{option}", str(item)]
        return shlex.join(words)

    @staticmethod
    def from_json(values: dict[str, Any]) -> Config:
        """Return the config of plain values, the inverse of ``to_json``.

        Args:
            values: settings by name.

        Raises:
            ConfigError: a key is not a setting, or a value has the wrong type.
        """
        if not isinstance(values, dict) or "data" not in values:
            raise ConfigError('this is not a config: it needs at least {"data": ...}')
        known = {field.name: field for field in fields(Config)}
        settings: dict[str, Any] = {}
        for key, value in values.items():
            if key not in ("bayou", "digest"):  # the format, and a key of older files
                settings[key] = tuple(value) if isinstance(value, list) else value
        unknown = [key for key in settings if key not in known]
        if unknown:
            raise ConfigError(
                f"{unknown[0]!r} is not a setting; the settings are {', '.join(known)}"
            )
        if isinstance(settings.get("methods"), str):
            settings["methods"] = tuple(settings["methods"].split(","))
        for key, value in settings.items():
            _check_type(key, value, str(known[key].type))
        return Config(**settings)

    @staticmethod
    def read(path: str | Path) -> Config:
        """Read a config file.

        Args:
            path: a JSON file, such as RUN/config.json.

        Raises:
            ConfigError: there is no such file, or it is not a config.
        """
        path = Path(path)
        if path.exists() and not path.is_file():
            raise ConfigError(
                f"{path} is not a file; give a JSON file of settings, such as RUN/config.json"
            )
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise ConfigError(f"there is no config file {path}") from None
        except (OSError, ValueError, RecursionError) as error:
            raise ConfigError(f"{path} is not a readable JSON file: {error}") from None
        return Config.from_json(values)


def _check_type(key: str, value: object, expected: str) -> None:
    """Raise a ConfigError unless a value of JSON has the declared type of its field."""
    types: dict[str, tuple[type, ...]] = {
        "int": (int,),
        "float": (int, float),
        "str": (str,),
        "bool": (bool,),
        "None": (type(None),),
        "tuple[str, ...]": (tuple,),
    }
    allowed: list[type] = []
    for name in expected.split(" | "):
        allowed += types[name]
    is_allowed = isinstance(value, tuple(allowed))
    if isinstance(value, bool) and bool not in allowed:
        is_allowed = False
    if isinstance(value, tuple) and not all(isinstance(word, str) for word in value):
        is_allowed = False
    if not is_allowed:
        raise ConfigError(f"the setting {key!r} must be {expected}, got {value!r}")
