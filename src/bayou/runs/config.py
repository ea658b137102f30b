"""The settings of a run: fields = flags of the command line = keys of the saved file. This module
does not use torch.

A setting is declared once, as a field of ``Config``: its type, default, text for ``--help`` and
condition. Commands, saved files and, for the settings of training, the estimators of
``bayou.adapters.sklearn`` are made from it.
"""

from __future__ import annotations

import dataclasses
import json
import shlex
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, final

from bayou.select.settings import (
    DEFAULT_METHOD,
    ONE_OR_MORE,
    POSITIVE,
    RUN,
    ConfigError,
    Must,
    Training,
    setting,
)

FORMAT = 1
DIGEST = "digest"  # the key of a saved file's own SHA-256; optional in a config written by hand
DATA, MODEL = "Data", "Model"  # sections of --help, beside those of ``Training``
MAX_SEEDS = 1000  # and splits: a run lists every job
UP_TO_MAX: Must = (f"from 1 to {MAX_SEEDS:,}", lambda value: 1 <= value <= MAX_SEEDS)
PRIOR: Must = ("a positive number", lambda value: value == "fan_in" or 0 < value < float("inf"))


def one_of(*names: str) -> Must:
    """The condition that a value is one of these names."""
    return f"{', '.join(names[:-1])} or {names[-1]}", names.__contains__


@final
@dataclass(frozen=True)
class Config(Training):
    """The settings of a run, in addition to those of ``Training``. ``None``: chosen by the data set
    or the method.
    """

    data: str = "digits"
    methods: tuple[str, ...] = (DEFAULT_METHOD,)
    # fmt: off
    target: str | None = setting(None, DATA, "target column of a file")
    task: str | None = setting(None, DATA, "classification or regression; by default inferred from the target",
                               one_of("classification", "regression"))
    drop: tuple[str, ...] = setting((), DATA, "a column of a file to leave out; repeatable")
    id: str | None = setting(None, DATA, "a column that identifies rows: not an input, copied to predictions")
    split: int = setting(0, DATA, "number of the published or generated split")
    ood: str | None = setting(None, DATA, "another source of out-of-distribution data, or none")
    seed: int = setting(0, RUN, "the first seed")
    seeds: int = setting(1, RUN, "number of seeds; with several the report has standard errors", UP_TO_MAX)
    splits: int = setting(1, RUN, "number of splits of the data, from --split on; with several the report has means "
                          "and standard errors over them", UP_TO_MAX)
    net: str | None = setting(None, MODEL, "network, see `bayou list nets`; by default chosen by the data")
    prior: float | str = setting("fan_in", MODEL, "standard deviation of the prior, or fan_in for gain/√fan_in", PRIOR)
    gain: float | None = setting(None, MODEL, "gain of the fan_in prior; by default by held-out rows", POSITIVE)
    noise: float = setting(0.5, MODEL, "initial noise of a regression, in standard deviations of y", POSITIVE)
    heteroscedastic: bool = setting(False, MODEL, "the network also predicts the noise of y at each x")
    samples: int = setting(100, RUN, "networks averaged for a prediction", ONE_OR_MORE)
    device: str = setting("cpu", RUN, "cpu, cuda or auto")
    precision: str = setting("float32", RUN, "float32, float64 or bf16 (matrix products only)",
                             one_of("float32", "float64", "bf16"))
    # fmt: on

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
        super().__post_init__()

    @property
    def autocast(self) -> bool:
        return self.precision == "bf16"

    @classmethod
    def settings(cls, *parts: str) -> dict[str, dataclasses.Field[Any]]:
        """The fields that are settings, all but data and methods, by name; of some parts or of
        all.
        """
        chosen = [
            one
            for one in fields(cls)
            if one.metadata and (not parts or one.metadata["part"] in parts)
        ]
        return {one.name: one for one in chosen}

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        values = dataclasses.asdict(self)
        return {"bayou": FORMAT} | {
            k: list(v) if isinstance(v, tuple) else v for k, v in values.items()
        }

    def command(self) -> str:
        """The command that repeats the run, with the settings that are not the defaults."""
        words = ["bayou", "compare", self.data, "--methods", ",".join(self.methods)]
        if len(self.methods) == 1:
            words = ["bayou", "train", self.data, "--method", self.methods[0]]
        for name, one in self.settings().items():
            value, flag = getattr(self, name), name.replace("_", "-")
            if value == one.default:
                continue
            if isinstance(value, bool):
                words.append(f"--{flag}" if value else f"--no-{flag}")
            else:
                words += [
                    w
                    for each in (value if isinstance(value, tuple) else (value,))
                    for w in (f"--{flag}", str(each))
                ]
        return shlex.join(words)

    @staticmethod
    def from_json(values: dict[str, Any]) -> Config:
        """The inverse of ``to_json``; unknown keys and wrong types are refused."""
        if not isinstance(values, dict) or "data" not in values:
            raise ConfigError('this is not a config: it needs at least {"data": ...}')
        known = {f.name: f for f in fields(Config)}
        plain = {key: value for key, value in values.items() if key not in ("bayou", DIGEST)}
        given: dict[str, Any] = {
            key: tuple(v) if isinstance(v, list) else v for key, v in plain.items()
        }
        odd = [key for key in given if key not in known]
        if odd:
            raise ConfigError(f"{odd[0]!r} is not a setting; the settings are {', '.join(known)}")
        if isinstance(given.get("methods"), str):
            given["methods"] = tuple(given["methods"].split(","))
        for key, value in given.items():
            _check_type(key, value, str(known[key].type))
        return Config(**given)

    @staticmethod
    def read(path: str | Path) -> Config:
        """A config file, JSON."""
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


def _check_type(key: str, value: Any, wanted: str) -> None:
    """A ConfigError unless a value of JSON has the type that the field is declared with."""
    kinds: dict[str, tuple[type, ...]] = {
        "int": (int,),
        "float": (int, float),
        "str": (str,),
        "bool": (bool,),
        "None": (type(None),),
        "tuple[str, ...]": (tuple,),
    }
    allowed = tuple(kind for name in wanted.split(" | ") for kind in kinds[name])
    words = not isinstance(value, tuple) or all(isinstance(word, str) for word in value)
    if (
        not isinstance(value, allowed)
        or not words
        or (isinstance(value, bool) and bool not in allowed)
    ):
        raise ConfigError(f"the setting {key!r} must be {wanted}, got {value!r}")
