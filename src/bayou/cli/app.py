"""The command line: ``bayou``. Torch is imported by the commands that need it, so that --help answers at once."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import os
import shlex
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

from bayou.cli.quiet import hush

if TYPE_CHECKING:
    from bayou.runs.config import Config

app = typer.Typer(
    help="Honest uncertainty from neural networks: train, compare and use Bayesian neural networks.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

DataArgument = Annotated[
    str, typer.Argument(metavar="DATA", help="a name (`bayou list data`) or a CSV, TSV, Parquet or NPZ file")
]
RunArgument = Annotated[Path, typer.Argument(metavar="RUN", help="a run folder")]
Samples = Annotated[int | None, typer.Option(help="networks that a prediction averages; by default as in the run")]
Device = Annotated[str, typer.Option(help="cpu, cuda or auto")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="no progress")]

# The settings of a run: every field of Config but the data and the methods, with the words that --help has for it.
SETTINGS: dict[str, Any] = {
    "net": (str | None, typer.Option(help="network, `bayou list nets`; by default one that suits the data")),
    "target": (str | None, typer.Option(help="target column of a file")),
    "task": (str | None, typer.Option(help="classification or regression; by default what the target looks like")),
    "split": (int, typer.Option(help="which of the published or made splits")),
    "ood": (str | None, typer.Option(help="another source of out-of-distribution data, or none")),
    "seed": (int, typer.Option(help="the first seed")),
    "seeds": (int, typer.Option(help="how many seeds; with several the report has standard errors")),
    "steps": (int | None, typer.Option(help="optimizer steps of every method")),
    "epochs": (int | None, typer.Option(help="passes over the data, instead of steps")),
    "batch_size": (int, typer.Option(help="rows in a step")),
    "lr": (float | None, typer.Option(help="learning rate; by default the method's own")),
    "members": (int, typer.Option(help="networks of an ensemble")),
    "chains": (int, typer.Option(help="chains of a sampler")),
    "beta": (float, typer.Option(help="weight of the KL of variational methods; 1 is Bayes")),
    "warmup": (float, typer.Option(help="fraction of the steps over which beta rises from 0")),
    "validation": (float, typer.Option(help="fraction of the training rows held out to pick the best epoch")),
    "patience": (int | None, typer.Option(help="epochs without a better one before a run stops")),
    "prior": (str, typer.Option(help="standard deviation of the prior, or fan_in for gain/√fan_in")),
    "gain": (float | None, typer.Option(help="gain of the fan_in prior; by default 3 for classes, 2 for numbers")),
    "noise": (float, typer.Option(help="where the noise of a regression starts, in units of y's standard deviation")),
    "heteroscedastic": (bool, typer.Option("--heteroscedastic", help="the network says how noisy y is at each x")),
    "samples": (int, typer.Option(help="networks that a prediction averages")),
    "device": (str, typer.Option(help="cpu, cuda or auto")),
    "precision": (str, typer.Option(help="float32, float64 or bf16 (products alone)")),
    "compile": (
        bool | None,
        typer.Option("--compile/--no-compile", help="torch.compile the training step; by default on a GPU"),
    ),
}
RUNNING: dict[str, Any] = {
    "out": (Path | None, typer.Option(help="folder for the run; by default runs/DATA-…"), None),
    "resume": (bool, typer.Option("--resume", help="go on with an interrupted run in the same folder"), False),
    "config": (Path | None, typer.Option(help="take the settings from a saved config.json"), None),
    "quiet": (bool, typer.Option("--quiet", "-q", help="no progress"), False),
}


def settings(function: Callable[..., None]) -> Callable[..., None]:
    """Give a command an option for every setting of ``Config``, whose defaults they have, and those of a run folder."""
    from bayou.runs.config import Config

    defaults = {one.name: one.default for one in dataclasses.fields(Config)}
    missing = set(defaults) - {"data", "methods"} ^ set(SETTINGS)
    assert not missing, f"settings without an option, or options without a setting: {missing}"
    hints = get_type_hints(function, include_extras=True)
    given = inspect.signature(function).parameters.values()
    own = [p.replace(annotation=hints[p.name]) for p in given if p.kind is not p.VAR_KEYWORD]
    more = {name: (Annotated[kind, option], defaults[name]) for name, (kind, option) in SETTINGS.items()}
    more |= {name: (Annotated[kind, option], default) for name, (kind, option, default) in RUNNING.items()}
    keyword = inspect.Parameter.KEYWORD_ONLY
    added = [inspect.Parameter(name, keyword, default=default, annotation=a) for name, (a, default) in more.items()]
    function.__signature__ = inspect.Signature(own + added)  # type: ignore[attr-defined]
    function.__annotations__ = {p.name: p.annotation for p in own + added}
    return function


def _version(asked: bool) -> None:
    if asked:
        from importlib.metadata import version

        typer.echo(f"bayou {version('bayou')}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="say which version this is")
    ] = False,
) -> None:
    """Honest uncertainty from neural networks: train, compare and use Bayesian neural networks."""


@contextmanager
def clear() -> Iterator[None]:
    """Errors of the user's world as one sentence and exit code 2, instead of a traceback."""
    try:
        yield
    except ValueError as error:
        sentence = str(error)
    except BrokenPipeError:  # `bayou list nets | head`: whoever read has gone, and nobody wants a message
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise typer.Exit(0) from None
    except OSError as error:  # a disk that is full, a folder that cannot be written to
        sentence = str(error) if error.filename is None else f"{error.filename}: {error.strerror}"
    else:
        return
    typer.secho(f"bayou: {sentence}", fg="red", err=True)
    raise typer.Exit(2)


@app.command()
@settings
def compare(
    ctx: typer.Context,
    data: DataArgument = "digits",
    methods: Annotated[
        str, typer.Option(help="names with commas between, `bayou list methods`")
    ] = "map,dropout,ensemble,ffg,mnf,laplace,sgld",
    **options: Any,
) -> None:
    """Train several methods on the same data and write one report: report.html in the run folder."""
    with clear():
        _start(ctx, tuple(name.strip() for name in methods.split(",") if name.strip()))


@app.command()
@settings
def train(
    ctx: typer.Context,
    data: DataArgument = "digits",
    method: Annotated[str, typer.Option(help="name, `bayou list methods`")] = "mnf",
    **options: Any,
) -> None:
    """Train one method; the run folder has the posterior, its scores and a report."""
    with clear():
        _start(ctx, (method,))


@app.command()
def resume(run: RunArgument, quiet: Quiet = False) -> None:
    """Go on with an interrupted run, with the settings it was started with."""
    with clear():
        from bayou.runs.folder import Run

        _work(Run.open(run), quiet)


@app.command()
def predict(
    run: RunArgument,
    input: Annotated[
        Path, typer.Option(help="a file with the columns of the training data; the target may be missing")
    ],
    out: Annotated[Path, typer.Option(help="where to write the predictions")] = Path("predictions.csv"),
    method: Annotated[str | None, typer.Option(help="which method of the run; the first unless told")] = None,
    seed: Annotated[int | None, typer.Option(help="which seed of the run")] = None,
    samples: Samples = None,
    level: Annotated[float, typer.Option(help="probability of the intervals")] = 0.9,
    force: Annotated[bool, typer.Option("--force", help="write over an existing file")] = False,
) -> None:
    """Predict new rows: class and probabilities or mean and interval, entropy, mutual information."""
    with clear():
        from bayou.runs import use as serve

        notes = serve.predict(run, input, out, method=method, seed=seed, samples=samples, level=level, force=force)
        for note in notes:
            typer.echo(note, err=True)
        typer.echo(f"wrote {out}")


@app.command()
def evaluate(
    run: RunArgument,
    data: Annotated[str | None, typer.Option(help="a file with the target column; by default the test data")] = None,
    method: Annotated[str | None, typer.Option(help="which method of the run; all unless told")] = None,
    samples: Samples = None,
    as_json: Annotated[bool, typer.Option("--json", help="print JSON")] = False,
) -> None:
    """Score the methods of a run on a file, or on the test data of the run again."""
    with clear():
        from bayou.runs import use as serve

        rows, notes = serve.evaluate(run, data, method=method, samples=samples)
        for note in notes:
            typer.echo(note, err=True)
        _print_rows(rows, as_json)


@app.command()
def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="run folders on the same data")],
    out: Annotated[Path, typer.Option(help="where to write the page")] = Path("report.html"),
) -> None:
    """One page from one run or several: methods beside each other, seeds joined."""
    with clear():
        from bayou.runs import use as serve

        typer.echo(f"wrote {serve.join_reports(runs, out)}")


@app.command()
def verify() -> None:
    """Check the mathematics on this machine: golden numbers, what was expected and what came out."""
    from bayou.runs.verify import checks

    done: list[bool] = []
    for check in checks():
        done.append(check.passed)
        mark = typer.style("pass", fg="green") if check.passed else typer.style("FAIL", fg="red")
        typer.echo(f"{mark}  {check.name:<66} expected {check.expected:<24} got {check.got}")
    typer.echo(f"{sum(done)} of {len(done)} as they should be")
    raise typer.Exit(0 if all(done) else 1)


@app.command()
def reproduce(
    name: Annotated[str, typer.Argument(help="toy, mnist-fc, mnist-lenet, cifar5, uci, ...; `bayou list experiments`")],
    out: Annotated[Path, typer.Option(help="folder for table, picture and numbers")] = Path("benchmarks/results"),
    seeds: Annotated[int | None, typer.Option(help="seeds, or splits of UCI; by default the experiment's own")] = None,
    length: Annotated[int | None, typer.Option(help="epochs (steps for uci) instead of the experiment's own")] = None,
    jobs: Annotated[int, typer.Option(help="fits at a time, each in a process of its own")] = 1,
    only: Annotated[list[str] | None, typer.Option(help="rows by their label; may be given several times")] = None,
    data: Annotated[list[str] | None, typer.Option(help="some of the data sets; may be given several times")] = None,
    device: Device = "cpu",
    samples: Annotated[int | None, typer.Option(help="networks that a prediction averages; 100, of toy 2,000")] = None,
    again: Annotated[bool, typer.Option("--again", help="run rows again that are there already")] = False,
    redraw: Annotated[bool, typer.Option("--redraw", help="only write table and picture again, from the JSON")] = False,
    quiet: Quiet = False,
) -> None:
    """Run a published experiment and write its table and picture; what is there already is kept and not run again."""
    with clear():
        experiments = _experiments()

        try:
            written = experiments.reproduce(
                name, out, seeds=seeds, length=length, only=only or (), data=data or (), device=device,
                samples=samples, jobs=jobs, again=again, redraw=redraw,
                show=not quiet, tell=typer.echo, command="bayou " + shlex.join(sys.argv[1:]),
            )  # fmt: skip
        except KeyboardInterrupt:
            typer.secho("interrupted; finished rows are kept, and the same command goes on", fg="yellow", err=True)
            raise typer.Exit(130) from None
        for path in written:
            typer.echo(f"wrote {path}")


@app.command("list")
def list_(
    what: Annotated[str, typer.Argument(metavar="data|methods|flows|nets|experiments", help="what to list")],
) -> None:
    """What there is by name."""
    with clear():
        rows = list(_listing(what))
        width = max(len(name) for name, _ in rows)
        for name, text in rows:
            typer.echo(f"{name:<{width}}  {text}")


@app.command()
def download(
    name: Annotated[str, typer.Argument(help="a data set, `bayou list data`")],
    to: Annotated[Path | None, typer.Option(help="folder; by default the cache")] = None,
) -> None:
    """Fetch a public data set into the cache, checking its SHA-256; never done unasked."""
    with clear():
        from bayou.data import download as fetch

        for path in fetch(name, root=to):
            typer.echo(f"have {path}")


def _listing(what: str) -> list[tuple[str, str]]:
    if what == "data":
        from bayou.data import CATALOGUE, available

        return [
            (name, entry.summary + ("" if available(entry) else "  [files not here]"))
            for name, entry in CATALOGUE.items()
        ]
    if what == "methods":
        from bayou.runs.presets import PRESETS

        return [(name, preset.summary) for name, preset in PRESETS.items()]
    if what == "nets":
        from bayou.runs.nets import NETS

        return [(name, net.summary) for name, net in NETS.items()]
    if what == "flows":
        from bayou.flows import catalogue

        return [(name, _first_line(make)) for name, make in catalogue().items()]
    if what == "experiments":
        return [(name, study.title) for name, study in _experiments().studies().items()]
    raise ValueError(f"there is no list of {what!r}; ask for data, methods, flows, nets or experiments")


def _experiments() -> Any:
    """The module ``experiments.reproduce`` of the clone that this bayou was installed from, or that one stands in."""
    for root in (Path(__file__).parents[3], Path.cwd()):
        if (root / "experiments" / "reproduce.py").is_file():
            if str(root) not in sys.path:
                sys.path.insert(0, str(root))
            return importlib.import_module("experiments.reproduce")
    raise ValueError("the experiments are not part of the package: run this command in a clone of the repository")


def _first_line(thing: Any) -> str:
    options = ", ".join(f"{name}={value!r}" for name, value in getattr(thing, "keywords", {}).items())
    text = (inspect.getdoc(getattr(thing, "func", thing)) or "").splitlines() or [""]  # func: what a partial calls
    return text[0] + (f" ({options})" if options else "")


def _settings(ctx: typer.Context, methods: tuple[str, ...]) -> Config:
    """The config of a command: what was typed, over what a file says, over the defaults."""
    from bayou.runs.config import Config

    file = ctx.params["config"]
    typed = {name for name in ctx.params if getattr(ctx.get_parameter_source(name), "name", "") != "DEFAULT"}
    given = {name: ctx.params[name] for name in typed & {"data", *SETTINGS}}
    if file is None:
        return Config(**({"data": ctx.params["data"], "methods": methods} | given))
    if typed & {"method", "methods"}:
        given["methods"] = methods
    return dataclasses.replace(Config.read(file), **given)


def _start(ctx: typer.Context, methods: tuple[str, ...]) -> None:
    """A run in its folder."""
    from bayou.data import is_path
    from bayou.runs.folder import Run

    config, out = _settings(ctx, methods), ctx.params["out"]
    if is_path(config.data):  # so that the run can go on, and be repeated, from any folder
        config = dataclasses.replace(config, data=str(Path(config.data).expanduser().resolve()))
    folder = out or Path("runs") / f"{Path(config.data).stem}-{'-'.join(config.methods[:3])}"
    _work(Run.create(folder, config, resume=ctx.params["resume"]), ctx.params["quiet"])


def _work(run: Any, quiet: bool) -> None:
    from bayou.cli.live import LiveTable
    from bayou.runs.folder import Interrupted

    table = LiveTable([job.name for job in run.jobs], quiet)
    try:
        with table:
            run.work(tell=table.tell, show=table.show)
    except KeyboardInterrupt:
        typer.secho("interrupted before anything was begun", fg="yellow", err=True)
        raise typer.Exit(130) from None
    except Interrupted:
        typer.secho(f"interrupted; nothing is lost: `bayou resume {run.folder}` goes on", fg="yellow", err=True)
        raise typer.Exit(130) from None
    failures = run.failures()
    for name, why in failures.items():
        typer.secho(f"{name} failed: {why}", fg="red", err=True)
    page = run.folder / "report.html"
    if page.exists():
        typer.echo(f"wrote {page}")
    raise typer.Exit(1 if failures else 0)


def _print_rows(rows: list[dict[str, Any]], as_json: bool) -> None:
    if as_json:
        import json

        typer.echo(json.dumps(rows, indent=1))
        return
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, header_style="bold")
    for name in rows[0]:
        table.add_column(name, justify="left" if name == "method" else "right")
    for row in rows:
        table.add_row(*(f"{value:.4f}" if isinstance(value, float) else str(value) for value in row.values()))
    Console().print(table)


def main() -> None:
    """The entry point of the ``bayou`` command."""
    signal.signal(signal.SIGTERM, _on_termination)
    hush()
    app()


def _on_termination(number: int, frame: FrameType | None) -> None:
    """What a scheduler sends is the same as Ctrl-C, so that a run saves first."""
    if signal.getsignal(signal.SIGINT) in (signal.SIG_IGN, None):
        raise KeyboardInterrupt  # a job in the background of a script does not hear Ctrl-C
    signal.raise_signal(signal.SIGINT)


if __name__ == "__main__":
    main()
