"""Options shared by several commands, and options made from the settings of a run."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

from bayou.app.runs.config import Config
from bayou.select.settings import ConfigError

DataArgument = Annotated[
    str,
    typer.Argument(
        metavar="DATA", help="a name (`bayou list data`) or a CSV, TSV, Parquet or NPZ file"
    ),
]
RunArgument = Annotated[Path, typer.Argument(metavar="RUN", help="a run folder")]
Samples = Annotated[
    int | None, typer.Option(help="networks averaged for a prediction; by default as in the run")
]
Method = Annotated[str | None, typer.Option(help="which method of the run; by default the first")]
Seed = Annotated[int | None, typer.Option(help="which seed of the run")]
Level = Annotated[float, typer.Option(help="probability of the intervals")]
Force = Annotated[bool, typer.Option("--force", help="write over an existing file")]
Workers = Annotated[
    str | None,
    typer.Option(help="parallel fits: processes, processes:N, or module:function of yours"),
]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="do not show progress")]
EFFORTS = {"fast": 0.1, "patient": 10.0}  # by option


def _switch(option: str, help: str) -> tuple[Any, Any]:
    """Return the type and the default of an option that is on or off."""
    return Annotated[bool, typer.Option(option, help=help)], False


def _path(help: str) -> tuple[Any, Any]:
    """Return the type and the default of an option with a path."""
    return Annotated[Path | None, typer.Option(help=help)], None


FOLDER_OPTIONS: dict[str, tuple[Any, Any]] = {  # of a run besides its settings: type and default
    **{
        name: _switch(f"--{name}", f"short for --effort {effort:g}")
        for name, effort in EFFORTS.items()
    },
    "out": _path("folder for the run; by default runs/DATA-…"),
    "resume": _switch("--resume", "continue an interrupted run in the same folder"),
    "config": _path("read the settings from a saved config.json"),
    "executor": (Workers, None),
    "quiet": (Quiet, False),
}


def run_options(function: Callable[..., None]) -> Callable[..., None]:
    """Give a command an option for every setting of ``Config``, and those of a run folder.

    Args:
        function: the command.
    """
    hints = get_type_hints(function, include_extras=True)
    types = get_type_hints(Config)
    parameters = [
        parameter.replace(annotation=hints[parameter.name])
        for parameter in inspect.signature(function).parameters.values()
        if parameter.kind is not parameter.VAR_KEYWORD
    ]
    options: dict[str, tuple[Any, Any]] = {
        name: (_option(name, types[name], field), field.default)
        for name, field in Config.settings().items()
    }
    for name, (annotation, default) in (options | FOLDER_OPTIONS).items():
        parameters.append(
            inspect.Parameter(
                name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation
            )
        )
    function.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    function.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return function


def _option(name: str, type_hint: Any, field: dataclasses.Field[Any]) -> Any:
    """Return the annotation of the option of a setting."""
    # A switch has no --no form, unless None is allowed.
    names = [f"--{name}"] if type_hint is bool else []
    # Types that typer does not support.
    replacements: dict[Any, Any] = {float | str: str, tuple[str, ...]: list[str]}
    option = typer.Option(
        *names, help=field.metadata["help"], rich_help_panel=field.metadata["part"]
    )
    return Annotated[replacements.get(type_hint, type_hint), option]


def run_config(ctx: typer.Context, methods: tuple[str, ...]) -> Config:
    """Return the config of a command.

    Options override the file of ``--config``, which overrides the defaults.

    Args:
        ctx: of the command.
        methods: their names.

    Raises:
        ConfigError: several options set the effort.
    """
    typed = {
        name
        for name in ctx.params
        if getattr(ctx.get_parameter_source(name), "name", "") != "DEFAULT"
    }
    settings = {name: ctx.params[name] for name in typed & {"data", *Config.settings()}}
    efforts = {}
    for name in ("effort", *EFFORTS):
        if name in typed:
            efforts[name] = EFFORTS.get(name, ctx.params[name])
    if len(efforts) > 1:
        options = ", ".join(f"--{name}" for name in efforts)
        raise ConfigError(f"give one of {options}: each of them sets the effort")
    if efforts:
        (settings["effort"],) = efforts.values()
    file = ctx.params["config"]
    if file is None:
        defaults = {"data": ctx.params["data"], "methods": methods}
        return Config(**(defaults | settings))
    if typed & {"method", "methods"}:
        settings["methods"] = methods
    return dataclasses.replace(Config.read(file), **settings)
