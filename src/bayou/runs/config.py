"""What a run was asked to do: fields = flags of the command line = keys of the saved file. No torch here.

A field of ``Config`` is the only place where a setting is declared: its type, its default, what ``--help`` says of it,
what it must be. Commands, saved files and, for the settings of training, the estimators of ``bayou.adapters.sklearn``
are made from it.
"""

from __future__ import annotations

import dataclasses
import json
import shlex
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, final

FORMAT = 1
DIGEST = "digest"  # the key of a saved file's own SHA-256; whoever writes a config by hand needs none
DATA, TRAINING, MODEL, RUN = "Data", "Training", "Model", "Run"  # the parts of --help

Must = tuple[str, Callable[[Any], bool]]  # in words, and as a test
ONE_OR_MORE: Must = ("at least 1", lambda value: value >= 1)
ZERO_OR_MORE: Must = ("at least 0", lambda value: value >= 0)
POSITIVE: Must = ("a positive number", lambda value: 0 < value < float("inf"))
SHARE: Must = ("from 0 to 1", lambda value: 0 <= value <= 1)
FRACTION: Must = ("a fraction from 0 to below 1", lambda value: 0 <= value < 1)


class ConfigError(ValueError):
    """A setting that cannot be used, or a file that is not a config."""


def one_of(*names: str) -> Must:
    """One of some words."""
    return f"{', '.join(names[:-1])} or {names[-1]}", names.__contains__


def setting(default: Any, part: str, help: str, must: Must | None = None) -> Any:
    """A field with the words that --help has for it, and what it must be if it is not None."""
    return field(default=default, metadata={"part": part, "help": help, "must": must})


@final
@dataclass(frozen=True)
class Config:
    """The settings of a run. ``None`` leaves a choice to the data set or the method."""

    data: str = "digits"
    methods: tuple[str, ...] = ("mnf",)
    # fmt: off
    target: str | None = setting(None, DATA, "target column of a file")
    task: str | None = setting(None, DATA, "classification or regression; by default what the target looks like",
                               one_of("classification", "regression"))
    drop: tuple[str, ...] = setting((), DATA, "a column of a file to leave out; may be given several times")
    id: str | None = setting(None, DATA, "a column that names the rows: no input, copied to predictions")
    split: int = setting(0, DATA, "which of the published or made splits")
    ood: str | None = setting(None, DATA, "another source of out-of-distribution data, or none")
    seed: int = setting(0, RUN, "the first seed")
    seeds: int = setting(1, RUN, "how many seeds; with several the report has standard errors", ONE_OR_MORE)
    splits: int = setting(1, RUN, "how many splits of the data, from --split on; with several the report has means "
                          "and standard errors over them", ONE_OR_MORE)
    steps: int | None = setting(None, TRAINING, "optimizer steps of every method", ONE_OR_MORE)
    epochs: int | None = setting(None, TRAINING, "passes over the data, instead of steps", ONE_OR_MORE)
    batch_size: int = setting(128, TRAINING, "rows in a step", ONE_OR_MORE)
    lr: float | None = setting(None, TRAINING, "learning rate; by default the method's own", POSITIVE)
    members: int = setting(5, TRAINING, "networks of an ensemble", ONE_OR_MORE)
    chains: int = setting(2, TRAINING, "chains of a sampler", ONE_OR_MORE)
    beta: float = setting(1.0, TRAINING, "weight of the KL of variational methods; 1 is Bayes", ZERO_OR_MORE)
    warmup: float = setting(0.0, TRAINING, "fraction of the steps over which beta rises from 0", SHARE)
    validation: float = setting(0.0, TRAINING, "fraction of training rows held out to pick the best epoch", FRACTION)
    patience: int | None = setting(None, TRAINING, "epochs without a better one before a run stops", ONE_OR_MORE)
    net: str | None = setting(None, MODEL, "network, `bayou list nets`; by default one that suits the data")
    prior: float | str = setting("fan_in", MODEL, "standard deviation of the prior, or fan_in for gain/√fan_in")
    gain: float | None = setting(None, MODEL, "gain of the fan_in prior; else by held-out rows", POSITIVE)
    relevance: bool = setting(False, MODEL, "variational methods learn a prior for every unit: which inputs matter?")
    noise: float = setting(0.5, MODEL, "where the noise of a regression starts, in standard deviations of y", POSITIVE)
    heteroscedastic: bool = setting(False, MODEL, "the network says how noisy y is at each x")
    calibrate: float = setting(0.0, RUN, "fraction of training rows held out to calibrate predictions by", FRACTION)
    samples: int = setting(100, RUN, "networks that a prediction averages", ONE_OR_MORE)
    device: str = setting("cpu", RUN, "cpu, cuda or auto")
    precision: str = setting("float32", RUN, "float32, float64 or bf16 (products alone)",
                             one_of("float32", "float64", "bf16"))
    compile: bool | None = setting(None, RUN, "torch.compile the training step; by default on a GPU")
    # fmt: on

    def __post_init__(self) -> None:
        if not self.methods:
            raise ConfigError("no methods; give at least one, such as mnf (`bayou list methods` has all)")
        for name in ("methods", "drop"):
            object.__setattr__(self, name, tuple(dict.fromkeys(getattr(self, name))))
        if isinstance(self.prior, str) and self.prior != "fan_in":
            try:
                object.__setattr__(self, "prior", float(self.prior))
            except ValueError:
                raise ConfigError(f"prior must be 'fan_in' or a standard deviation, got {self.prior!r}") from None
        musts = {one.name: one.metadata.get("must") for one in fields(self)}
        for name, must in (musts | {"prior": POSITIVE if self.prior != "fan_in" else None}).items():
            value = getattr(self, name)
            if must is not None and value is not None and not must[1](value):
                shown = repr(value) if isinstance(value, str) else f"{value:g}"
                raise ConfigError(f"{name} must be {must[0]}, got {shown}")
        if self.steps is not None and self.epochs is not None:
            raise ConfigError(f"give steps or epochs, not both: got {self.steps} steps and {self.epochs} epochs")
        if self.patience is not None and not self.validation:
            raise ConfigError("patience watches held-out rows; give validation too, for example 0.1")

    @classmethod
    def settings(cls, *parts: str) -> dict[str, dataclasses.Field[Any]]:
        """The fields that are settings, all but data and methods, by name; of some parts or of all."""
        chosen = [one for one in fields(cls) if one.metadata and (not parts or one.metadata["part"] in parts)]
        return {one.name: one for one in chosen}

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        values = dataclasses.asdict(self)
        return {"bayou": FORMAT} | {k: list(v) if isinstance(v, tuple) else v for k, v in values.items()}

    def command(self) -> str:
        """What to type to repeat the run: the settings that are not the defaults."""
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
                    w for each in (value if isinstance(value, tuple) else (value,)) for w in (f"--{flag}", str(each))
                ]
        return shlex.join(words)

    @staticmethod
    def from_json(values: dict[str, Any]) -> Config:
        """The inverse of ``to_json``; unknown keys and wrong types are refused."""
        if not isinstance(values, dict) or "data" not in values:
            raise ConfigError('this is not a config: it needs at least {"data": ...}')
        known = {f.name: f for f in fields(Config)}
        plain = {key: value for key, value in values.items() if key not in ("bayou", DIGEST)}
        given: dict[str, Any] = {key: tuple(v) if isinstance(v, list) else v for key, v in plain.items()}
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
            raise ConfigError(f"{path} is no file; give a JSON file of settings, such as RUN/config.json")
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
    if not isinstance(value, allowed) or not words or (isinstance(value, bool) and bool not in allowed):
        raise ConfigError(f"the setting {key!r} must be {wanted}, got {value!r}")
