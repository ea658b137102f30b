"""What a run was asked to do: fields = flags of the command line = keys of the saved file. No torch here."""

from __future__ import annotations

import dataclasses
import json
import shlex
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, final

FORMAT = 1


class ConfigError(ValueError):
    """A setting that cannot be used, or a file that is not a config."""


@final
@dataclass(frozen=True)
class Config:
    """The settings of a run. ``None`` leaves a choice to the data set or the method."""

    data: str
    methods: tuple[str, ...] = ("mnf",)
    net: str | None = None
    target: str | None = None
    task: str | None = None
    split: int = 0
    ood: str | None = None
    seed: int = 0
    seeds: int = 1
    steps: int | None = None
    epochs: int | None = None
    batch_size: int = 128
    lr: float | None = None
    members: int = 5
    chains: int = 2
    beta: float = 1.0
    warmup: float = 0.0
    validation: float = 0.0
    patience: int | None = None
    prior: float | str = "fan_in"
    gain: float | None = None
    noise: float = 0.5
    heteroscedastic: bool = False
    samples: int = 100
    device: str = "cpu"
    precision: str = "float32"
    compile: bool | None = None

    def __post_init__(self) -> None:
        if not self.methods:
            raise ConfigError("no methods; give at least one, such as mnf (`bayou list methods` has all)")
        object.__setattr__(self, "methods", tuple(dict.fromkeys(self.methods)))
        for name in ("seeds", "batch_size", "members", "chains", "samples", "steps", "epochs", "patience"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name} must be at least 1, got {value}")
        if self.steps is not None and self.epochs is not None:
            raise ConfigError(f"give steps or epochs, not both: got {self.steps} steps and {self.epochs} epochs")
        if self.precision not in ("float32", "float64", "bf16"):
            raise ConfigError(f"precision must be float32, float64 or bf16, got {self.precision!r}")
        if isinstance(self.prior, str) and self.prior != "fan_in":
            try:
                object.__setattr__(self, "prior", float(self.prior))
            except ValueError:
                raise ConfigError(f"prior must be 'fan_in' or a standard deviation, got {self.prior!r}") from None
        for name in ("lr", "prior", "gain", "noise"):
            value = getattr(self, name)
            if isinstance(value, float | int) and not 0 < value < float("inf"):
                raise ConfigError(f"{name} must be a positive number, got {value:g}")
        for name, top, words in (("beta", float("inf"), "at least 0"), ("warmup", 1.0, "from 0 to 1")):
            if not 0 <= getattr(self, name) <= top:
                raise ConfigError(f"{name} must be {words}, got {getattr(self, name):g}")
        if not 0 <= self.validation < 1:
            raise ConfigError(f"validation is a fraction from 0 to below 1, got {self.validation:g}")
        if self.patience is not None and not self.validation:
            raise ConfigError("patience watches held-out rows; give validation too, for example 0.1")
        if self.task not in (None, "classification", "regression"):
            raise ConfigError(f"task must be classification or regression, got {self.task!r}")

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {"bayou": FORMAT} | dataclasses.asdict(self) | {"methods": list(self.methods)}

    def command(self) -> str:
        """What to type to repeat the run: the settings that are not the defaults."""
        words = ["bayou", "compare", self.data, "--methods", ",".join(self.methods)]
        if len(self.methods) == 1:
            words = ["bayou", "train", self.data, "--method", self.methods[0]]
        for one in fields(self):
            value = getattr(self, one.name)
            if one.name not in ("data", "methods") and value != one.default:
                flag = f"--{one.name.replace('_', '-')}"
                switch = {True: [flag], False: [flag.replace("--", "--no-", 1)]} if isinstance(value, bool) else {}
                words += switch.get(value, [flag, str(value)])
        return shlex.join(words)

    @staticmethod
    def from_json(values: dict[str, Any]) -> Config:
        """The inverse of ``to_json``; unknown keys and wrong types are refused."""
        if not isinstance(values, dict) or "data" not in values:
            raise ConfigError('this is not a config: it needs at least {"data": ...}')
        known = {f.name: f for f in fields(Config)}
        given = {key: value for key, value in values.items() if key != "bayou"}
        odd = [key for key in given if key not in known]
        if odd:
            raise ConfigError(f"{odd[0]!r} is not a setting; the settings are {', '.join(known)}")
        if isinstance(given.get("methods"), str):
            given["methods"] = given["methods"].split(",")
        if "methods" in given:
            given["methods"] = tuple(given["methods"])
        for key, value in given.items():
            _check_type(key, value, str(known[key].type))
        return Config(**given)

    @staticmethod
    def read(path: str | Path) -> Config:
        """A config file, JSON."""
        path = Path(path)
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise ConfigError(f"there is no config file {path}") from None
        except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
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
    if not isinstance(value, allowed) or (isinstance(value, bool) and bool not in allowed):
        raise ConfigError(f"the setting {key!r} must be {wanted}, got {value!r}")
