"""Options shared by several commands, and options made from the settings of a run."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

from bayou.runs.config import Config
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
Device = Annotated[str, typer.Option(help="cpu, cuda or auto")]
Workers = Annotated[
    str | None,
    typer.Option(help="parallel fits: processes, processes:N, or module:function of yours"),
]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="do not show progress")]
EFFORTS = {"fast": 0.1, "patient": 10.0}
FOLDER: dict[str, tuple[Any, Any]] = {  # options of a run besides its settings: type and default
    **{
        name: (
            Annotated[bool, typer.Option(f"--{name}", help=f"short for --effort {effort:g}")],
            False,
        )
        for name, effort in EFFORTS.items()
    },
    "out": (
        Annotated[Path | None, typer.Option(help="folder for the run; by default runs/DATA-…")],
        None,
    ),
    "resume": (
        Annotated[
            bool, typer.Option("--resume", help="continue an interrupted run in the same folder")
        ],
        False,
    ),
    "config": (
        Annotated[Path | None, typer.Option(help="read the settings from a saved config.json")],
        None,
    ),
    "executor": (Workers, None),
    "quiet": (Quiet, False),
}


def run_options(function: Callable[..., None]) -> Callable[..., None]:
    """Give a command an option for every setting of ``Config``, with its default, and those of a
    run folder.
    """
    hints, kinds = get_type_hints(function, include_extras=True), get_type_hints(Config)
    given = inspect.signature(function).parameters.values()
    own = [p.replace(annotation=hints[p.name]) for p in given if p.kind is not p.VAR_KEYWORD]
    options = {
        name: (_option(name, kinds[name], one), one.default)
        for name, one in Config.settings().items()
    }
    keyword = inspect.Parameter.KEYWORD_ONLY
    added = [
        inspect.Parameter(name, keyword, default=default, annotation=kind)
        for name, (kind, default) in (options | FOLDER).items()
    ]
    function.__signature__ = inspect.Signature(own + added)  # type: ignore[attr-defined]
    function.__annotations__ = {p.name: p.annotation for p in own + added}
    return function


def _option(name: str, kind: Any, one: dataclasses.Field[Any]) -> Any:
    flag = (
        [f"--{name}"] if kind is bool else []
    )  # a switch without a --no form, unless None is allowed
    known = {float | str: str, tuple[str, ...]: list[str]}  # types that typer does not support
    help, part = one.metadata["help"], one.metadata["part"]
    return Annotated[known.get(kind, kind), typer.Option(*flag, help=help, rich_help_panel=part)]


def run_config(ctx: typer.Context, methods: tuple[str, ...]) -> Config:
    """The config of a command: options given override the file, which overrides the defaults."""
    file = ctx.params["config"]
    typed = {
        name
        for name in ctx.params
        if getattr(ctx.get_parameter_source(name), "name", "") != "DEFAULT"
    }
    given = {name: ctx.params[name] for name in typed & {"data", *Config.settings()}}
    efforts = {
        name: EFFORTS.get(name, ctx.params[name]) for name in ("effort", *EFFORTS) if name in typed
    }
    if len(efforts) > 1:
        raise ConfigError(
            f"give one of {', '.join(f'--{name}' for name in efforts)}: each of them sets the effort"
        )
    if efforts:
        (given["effort"],) = efforts.values()
    if file is None:
        return Config(**({"data": ctx.params["data"], "methods": methods} | given))
    if typed & {"method", "methods"}:
        given["methods"] = methods
    return dataclasses.replace(Config.read(file), **given)
