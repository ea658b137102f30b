"""The commands of ``bayou``.

Torch is imported only by the commands that need it, so that --help is fast.
"""

from __future__ import annotations

import dataclasses
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from bayou import __version__
from bayou.app.cli.listing import list_entries
from bayou.app.cli.options import (
    DataArgument,
    Force,
    Level,
    Method,
    Quiet,
    RunArgument,
    Samples,
    Seed,
    Workers,
    run_config,
    run_options,
)
from bayou.app.cli.process import (
    ErrorsAsSentences,
    ignore_harmless_warnings,
    terminate_like_ctrl_c,
    workers,
)
from bayou.app.cli.shift_table import print_shift
from bayou.app.runs.config import default_method
from bayou.core.progress import command_line_spelling

if TYPE_CHECKING:
    from bayou.app.report.page import RunReport
    from bayou.app.runs.folder import Run
    from bayou.app.runs.watching import WatchedRows, WatchedRun

app: typer.Typer = typer.Typer(
    cls=ErrorsAsSentences,
    help="Train, compare and use Bayesian neural networks.",
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(is_requested: bool) -> None:
    """Print the version and exit."""
    if is_requested:
        typer.echo(f"bayou {__version__}")
        raise typer.Exit


WELCOME = """bayou trains, compares and uses Bayesian neural networks.
  bayou train houses.csv --target price                  train on your file; writes a run folder
  bayou predict RUN --input new.csv                      predict new rows with intervals
  bayou compare houses.csv --methods map,laplace,mnf     compare methods; writes a report
  bayou report RUN RUN                                   compare runs, paired over their test rows
  bayou list methods                                     what there is: methods, data, nets, flows
  bayou --help, bayou COMMAND --help                     all commands, all options"""


@app.callback(invoke_without_command=True)
def options(
    ctx: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="print the version")
    ] = False,
) -> None:
    """Train, compare and use Bayesian neural networks."""
    ctx.with_resource(command_line_spelling())
    if ctx.invoked_subcommand is None:
        typer.echo(WELCOME)


@app.command()
@run_options
def compare(
    ctx: typer.Context,
    data: DataArgument = "digits",
    methods: Annotated[
        str, typer.Option(help="names separated by commas, see `bayou list methods`")
    ] = "map,dropout,ensemble,ffg,mnf,laplace,sgld",
    **options: Any,
) -> None:
    """Train several methods on the same data and write one report: report.html in the run
    folder.
    """
    _start(ctx, tuple(name.strip() for name in methods.split(",") if name.strip()))


@app.command()
@run_options
def train(
    ctx: typer.Context,
    data: DataArgument = "digits",
    method: Annotated[
        str | None,
        typer.Option(
            help="name, see `bayou list methods`; by default auto, which mixes several, for a file "
            "of rows, and laplace for built-in data and arrays",
        ),
    ] = None,
    **options: Any,
) -> None:
    """Train one method and write the posterior, its scores and a report to the run folder."""
    _start(ctx, (method or default_method(data),))


@app.command()
def resume(run: RunArgument, executor: Workers = None, quiet: Quiet = False) -> None:
    """Continue an interrupted run with its own settings."""
    from bayou.app.runs.folder import Run

    _work(Run.open(run), quiet, executor)


@app.command()
def predict(
    run: RunArgument,
    input: Annotated[
        Path,
        typer.Option(
            help="a file with the columns of the training data; the target may be missing"
        ),
    ],
    out: Annotated[Path, typer.Option(help="where to write the predictions")] = Path(
        "predictions.csv"
    ),
    method: Method = None,
    seed: Seed = None,
    samples: Samples = None,
    level: Level = 0.9,
    force: Force = False,
    conformal: Annotated[
        Path | None,
        typer.Option(help="labeled rows not used in training, for conformal intervals or sets"),
    ] = None,
    conformal_shift: Annotated[
        str | None,
        typer.Option(
            help="covariate if the inputs differ from those of --conformal, label if the "
            "frequencies of classes do"
        ),
    ] = None,
    conformal_groups: Annotated[
        str | None,
        typer.Option(help="a column of both files, for a guarantee within each of its values"),
    ] = None,
    ood: Annotated[
        bool, typer.Option("--ood", help="add the column unusual: a p-value, small if unusual")
    ] = False,
    exceeds: Annotated[
        str | None,
        typer.Option(help="a threshold: adds the probability that the target is above it"),
    ] = None,
    costs: Annotated[
        Path | None,
        typer.Option(
            help="a table of costs, a row for each action and a column for each class: adds the "
            "action of the lowest expected cost"
        ),
    ] = None,
) -> None:
    """Predict new rows: class and probabilities or mean and interval, entropy, epistemic part."""
    from bayou.app.runs.predictions import write_predictions

    try:
        notes = write_predictions(
            run,
            input,
            out,
            method=method,
            seed=seed,
            samples=samples,
            level=level,
            force=force,
            conformal=conformal,
            conformal_shift=conformal_shift,
            conformal_groups=conformal_groups,
            ood=ood,
            exceeds=exceeds,
            costs=costs,
        )
    except KeyboardInterrupt:
        typer.secho(f"interrupted; nothing was written to {out}", fg="yellow", err=True)
        raise typer.Exit(130) from None
    for note in notes:
        typer.echo(note, err=True)
    typer.echo(f"wrote {out}")


@app.command()
def update(
    run: RunArgument,
    input: Annotated[
        Path, typer.Option(help="a file with the columns of the training data and the target")
    ],
    out: Annotated[
        Path | None, typer.Option(help="folder for the updated run; by default RUN-updated")
    ] = None,
    method: Annotated[
        str | None, typer.Option(help="only this method; by default all that can be updated")
    ] = None,
    forget: Annotated[
        float | None,
        typer.Option(help="weight of all rows before, such as 0.99, for relations that drift"),
    ] = None,
    remove: Annotated[
        bool, typer.Option("--remove", help="remove rows that were learned, instead of learning")
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="update RUN in place")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="print JSON")] = False,
) -> None:
    """Learn new rows without a new fit, or remove rows: writes an updated run folder."""
    from bayou.app.runs.update import update_run

    try:
        path, rows, notes = update_run(
            run, input, out=out, method=method, forget=forget, remove=remove, force=force
        )
    except KeyboardInterrupt:
        typer.secho("interrupted; no run folder is incomplete", fg="yellow", err=True)
        raise typer.Exit(130) from None
    for note in notes:
        typer.echo(note, err=True)
    _print_rows(rows, as_json)
    typer.echo(f"wrote {path}", err=as_json)


@app.command()
def calibrate(
    run: RunArgument,
    input: Annotated[
        Path,
        typer.Option(help="a file of rows with their target that were not used in training"),
    ],
    map: Annotated[
        str,
        typer.Option(
            help="temperature, isotonic, none; of classes also vector, matrix, dirichlet, spline; "
            "auto chooses one by cross-validation"
        ),
    ] = "temperature",
    method: Method = None,
    seed: Seed = None,
    samples: Samples = None,
) -> None:
    """Calibrate a posterior of a run on labeled rows; its predictions and report change."""
    from bayou.app.runs.calibration import calibrate_run

    lines = calibrate_run(run, input, map=map, method=method, seed=seed, samples=samples)
    for line in lines:
        typer.echo(line, err=True)
    typer.echo(f"wrote {run}")


@app.command()
def label(
    run: RunArgument,
    pool: Annotated[
        Path | None, typer.Option(help="a file of rows without target, from which rows are chosen")
    ] = None,
    labeled: Annotated[
        Path | None,
        typer.Option(help="chosen rows with their target, to be added to the training rows"),
    ] = None,
    n: Annotated[int, typer.Option("--n", help="how many rows to choose")] = 20,
    score: Annotated[
        str | None,
        typer.Option(
            help="epig, batchbald or bald, lcmd or determinant (numbers), variance, entropy, "
            "random; by default batchbald for classes, lcmd (or variance) for numbers"
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            help="the file to write; by default to_label.csv, or the training file with a number"
        ),
    ] = None,
    method: Method = None,
    seed: Seed = None,
    samples: Samples = None,
    force: Force = False,
) -> None:
    """Choose the rows of a pool to label next, or add labeled rows to the training file."""
    from bayou.app.runs.labeling import add_labels, choose_rows

    if (pool is None) == (labeled is None):
        raise ValueError(
            "give --pool FILE to choose rows to label, or --labeled FILE to add labeled rows"
        )
    if labeled is not None:
        selection = add_labels(run, labeled, out, force=force)
    elif pool is not None:
        path = out or Path("to_label.csv")
        selection = choose_rows(
            run, pool, path, n, score, method=method, seed=seed, samples=samples, force=force
        )
    for note in selection.notes:
        typer.echo(note, err=True)
    typer.echo(f"wrote {selection.path}")
    typer.echo(f"next: {selection.command}", err=True)


@app.command()
def serve(
    run: RunArgument,
    host: Annotated[
        str, typer.Option(help="address to listen on; 0.0.0.0 for all addresses")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="port; 0 for any free port")] = 8000,
    method: Method = None,
    seed: Seed = None,
    samples: Samples = None,
    level: Level = 0.9,
    max_rows: Annotated[int, typer.Option(help="maximum rows per request")] = 10_000,
    max_bytes: Annotated[int, typer.Option(help="maximum bytes per request")] = 2**23,
    max_waiting: Annotated[
        int, typer.Option(help="maximum waiting rows; more are answered with 503")
    ] = 100_000,
    timeout: Annotated[float, typer.Option(help="seconds to compute a response, else 503")] = 30.0,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="do not log requests")] = False,
) -> None:
    """Serve predictions over HTTP: POST /predict with JSON rows returns what `bayou predict`
    writes.
    """
    try:
        from bayou.app.runs.batches import Limits
        from bayou.app.runs.serve import Server
    except ModuleNotFoundError as error:
        sentence = (
            f"bayou serve needs {error.name}, which is not installed: pip install 'bayou[serve]'"
        )
        raise ValueError(sentence) from error
    from bayou.app.runs.service import Service

    limits = Limits(max_bytes, max_waiting, timeout)
    service = Service.of(
        run, method=method, seed=seed, samples=samples, level=level, max_rows=max_rows
    )
    for note in service.notes:
        typer.echo(note, err=True)
    with Server(service, host, port, limits=limits, quiet=quiet) as server:
        typer.echo(
            f"serving {service.name} at {server.url} (POST /predict, GET /, GET /healthz, "
            "GET /metrics); Ctrl-C to stop"
        )
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            typer.echo("stopped", err=True)


@app.command()
def evaluate(
    run: RunArgument,
    data: Annotated[
        str | None, typer.Option(help="a file with the target column; by default the test data")
    ] = None,
    method: Annotated[
        str | None, typer.Option(help="which method of the run; by default all")
    ] = None,
    samples: Samples = None,
    as_json: Annotated[bool, typer.Option("--json", help="print JSON")] = False,
) -> None:
    """Score the methods of a run on a file or on the test data of the run."""
    from bayou.app.runs.evaluation import evaluate_run

    rows, notes = evaluate_run(run, data, method=method, samples=samples)
    for note in notes:
        typer.echo(note, err=True)
    _print_rows(rows, as_json)


@app.command()
def watch(
    run: RunArgument,
    input: Annotated[
        Path, typer.Option(help="new rows with the columns of the training data; y may be missing")
    ],
    alpha: Annotated[float, typer.Option(help="largest probability of a false alarm")] = 0.01,
    time: Annotated[
        str | None, typer.Option(help="a column of dates or numbers: test a trend in its order")
    ] = None,
    state: Annotated[
        Path | None,
        typer.Option(help="a file that adds up the evidence of every call, for a stream of rows"),
    ] = None,
    every: Annotated[
        int | None, typer.Option(help="rows of a stream after which the evidence is shown")
    ] = None,
    method: Method = None,
    seed: Seed = None,
    samples: Samples = None,
    out: Annotated[Path | None, typer.Option(help="where to write a page with plots")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print JSON")] = False,
    force: Force = False,
) -> None:
    """Compare new rows with the training rows: have inputs shifted, has the relation changed?

    Exit code 0 if all is as expected, 1 if something shifted or changed, 3 for too few rows.
    """
    from bayou.app.runs import watching

    watching.check_options(input, out, is_stream=bool(state or every), force=force)
    watched = watching.WatchedRun.open(run, method=method, seed=seed, samples=samples)
    rows = watched.read(input, time)
    for note in (*watched.notes, *rows.notes):
        typer.echo(note, err=True)
    if state is not None or every is not None:
        _watch_stream(watched, rows, alpha, state, every, as_json)
        return
    result = watched.compare(rows, alpha)
    commands = watching.next_commands(result, watched, rows, input)
    print_shift(result, commands, as_json)
    if out is not None:
        from bayou.app.runs.watch_page import write_page

        write_page(out, watched, rows, result, commands)
        typer.echo(f"wrote {out}", err=as_json)
    raise typer.Exit(watching.exit_code(result.verdict))


def _watch_stream(
    watched: WatchedRun,
    rows: WatchedRows,
    alpha: float,
    state: Path | None,
    every: int | None,
    as_json: bool,
) -> None:
    """Print the evidence of a stream after each part of its rows."""
    from bayou.app.runs.streams import look_row, looks
    from bayou.app.runs.watching import exit_code

    tests = list(looks(watched, rows, alpha, state, every))
    _print_rows([look_row(test) for test in tests], as_json)
    raise typer.Exit(exit_code(tests[-1].verdict))


@app.command()
def report(
    runs: Annotated[
        list[Path], typer.Argument(metavar="RUN...", help="run folders; the first is the reference")
    ],
    out: Annotated[
        Path | None,
        typer.Option(help="where to write the page; by default RUN/report.html or comparison.html"),
    ] = None,
    force: Force = False,
) -> None:
    """Write the report of a run again, or one page that compares runs, paired over their common
    test rows.
    """
    from bayou.app.runs.comparison import write_report

    path, conclusion = write_report(runs, out, force=force)
    typer.echo("\n".join(conclusion), err=True)
    typer.echo(f"wrote {path}")


@app.command()
def score(
    predictions: Annotated[
        list[Path],
        typer.Argument(
            metavar="PREDICTIONS...",
            help="NPZ files with probs (N, C) or log_probs; several are repetitions of one method",
        ),
    ],
    against: Annotated[str, typer.Option(help="a reference, `bayou list references`")],
    out: Annotated[
        Path | None, typer.Option(help="where to write the row of the predictions, as JSON")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print JSON")] = False,
    force: Force = False,
) -> None:
    """Score class probabilities beside a reference (long HMC runs) and all committed rows."""
    from bayou.app.report.truth import board_rows, summarize_board
    from bayou.app.runs.json_files import check_output, write_json
    from bayou.truth import score as score_predictions

    if out is not None:
        check_output(out, force)
    board = score_predictions(predictions, against)
    if as_json:
        rows = [dataclasses.asdict(row) | {"scored": row is board.row} for row in board.rows]
        _print_rows(rows, as_json)
    else:
        _print_rows(board_rows(board), as_json)
    typer.echo(summarize_board(board), err=True)
    if out is not None:
        write_json(out, board.entry())
        typer.echo(f"wrote {out}", err=as_json)


@app.command()
def verify() -> None:
    """Check the mathematics on this machine against known values."""
    from bayou.app.runs.verify import known_values

    results: list[bool] = []
    for value in known_values():
        results.append(value.passed)
        mark = typer.style("pass", fg="green") if value.passed else typer.style("FAIL", fg="red")
        typer.echo(f"{mark}  {value.name:<66} expected {value.expected:<24} got {value.got}")
    typer.echo(f"{sum(results)} of {len(results)} checks passed")
    raise typer.Exit(0 if all(results) else 1)


@app.command("list")
def list_(
    what: Annotated[
        str,
        typer.Argument(
            metavar="data|methods|likelihoods|flows|nets|references", help="what to list"
        ),
    ],
) -> None:
    """List data sets, methods, likelihoods, flows, networks or references of `bayou score`."""
    rows = list_entries(what)
    width = max(len(name) for name, _ in rows)
    for name, text in rows:
        typer.echo(f"{name:<{width}}  {text}")


@app.command()
def download(
    name: Annotated[str, typer.Argument(help="a data set, `bayou list data`")],
    to: Annotated[Path | None, typer.Option(help="folder; by default the cache")] = None,
) -> None:
    """Download a public data set into the cache and verify its SHA-256. No other command downloads
    data.
    """
    from bayou.data import download as fetch

    for path in fetch(name, root=to):
        typer.echo(f"available: {path}")


def _start(ctx: typer.Context, methods: tuple[str, ...]) -> None:
    """Start a run in its folder."""
    from bayou.app.runs.folder import Run
    from bayou.data import is_path

    config = run_config(ctx, methods)
    if is_path(config.data):  # so that the run can be resumed and repeated from any folder
        config = dataclasses.replace(config, data=str(Path(config.data).expanduser().resolve()))
    name = f"{Path(config.data).stem}-{'-'.join(config.methods[:3])}"
    folder = ctx.params["out"] or Path("runs") / name
    run = Run.create(folder, config, resume=ctx.params["resume"])
    _work(run, ctx.params["quiet"], ctx.params["executor"])


def _work(run: Run, quiet: bool, executor: str | None) -> None:
    """Fit the jobs of a run, print what came of them, and exit with 1 if one failed."""
    from bayou.app.cli.live import FitBoard
    from bayou.app.runs.folder import Interrupted

    board = FitBoard([job.name for job in run.jobs], quiet)
    try:
        with workers(executor) as pool, board:
            run.work(
                tell=board.tell,
                show=board.show,
                note=board.note,
                announce=None if quiet else board.announce,
                executor=pool,
            )
    except KeyboardInterrupt:
        typer.secho("interrupted before the first fit", fg="yellow", err=True)
        raise typer.Exit(130) from None
    except Interrupted:
        typer.secho(
            f"interrupted; `bayou resume {run.folder}` continues the run", fg="yellow", err=True
        )
        raise typer.Exit(130) from None
    failures = run.failures()
    for name, error in failures.items():
        typer.secho(f"{name} failed: {error}", fg="red", err=True)
    results = run.results()
    for result in results:
        _print_choice_and_flags(result)
    if results:
        typer.echo(f"wrote {run.folder / 'report.html'}")
    if results and not quiet:
        for line in _conclusion(run):
            typer.echo(line, err=True)
    raise typer.Exit(1 if failures else 0)


def _print_choice_and_flags(result: dict[str, Any]) -> None:
    """Print what a method selected, and its checks that are not ok."""
    from bayou.posteriors.checks import describe_flag

    if result.get("choice"):
        typer.echo(f"{result['name']}: {result['choice']}", err=True)
    for check in result.get("checks", []):
        if check["status"] != "ok":
            text = describe_flag(check["name"], check["status"], check["text"])
            color = "red" if check["status"] == "failed" else "yellow"
            typer.secho(f"{result['name']}: {text}", fg=color, err=True)


def _conclusion(run: Run) -> list[str]:
    """Return the last lines of a run.

    They have the three numbers that matter, the conclusion in a sentence, and the next command.
    """
    report = run.report()
    numbers = []
    for head, cell in report.key_numbers:
        name, _, unit = head.name.partition(", ")
        error = f" ± {cell.se}" if cell.se else ""
        numbers.append(f"{name} {cell.text}{error}{unit and f' {unit}'} ({head.hint})")
    command = _next_command(run, report)
    return [f"{report.best}: {', '.join(numbers)}", *report.verdict[:1], f"next: {command}"]


def _next_command(run: Run, report: RunReport) -> str:
    """Return the command to continue with: a prediction, or other methods if a check failed."""
    from bayou.app.runs.config import DATA, MODEL, Config

    config = run.config
    if report.best and report.results.status(report.best) == "failed":
        settings = {name: getattr(config, name) for name in config.settings(DATA, MODEL)}
        command = Config(config.data, ("map", "laplace", "ensemble"), **settings).command()
        return f"{command} --out {shlex.quote(f'{run.folder}-compare')}"
    methods = (result["method"] for result in run.results() if result["label"] == report.best)
    method = next(methods, config.methods[0])
    method_option = f" --method {method}" if len(config.methods) > 1 else ""
    inputs = "new.npz" if len(run.facts()["input_shape"]) > 1 else "new.csv"
    folder = shlex.quote(str(run.folder))
    return f"bayou predict {folder} --input {inputs}{method_option}"


def _print_rows(rows: list[dict[str, Any]], as_json: bool) -> None:
    """Print JSON, or columns that are as wide as they must be.

    A pipe and a narrow window get every digit.
    """
    if as_json:
        import json

        typer.echo(json.dumps(rows, indent=1))
        return
    lines = [list(rows[0])]
    for row in rows:
        lines.append([f"{v:.6g}" if isinstance(v, float) else str(v) for v in row.values()])
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for name, *cells in lines:
        padded_cells = (f"  {cell:>{width}}" for cell, width in zip(cells, widths[1:], strict=True))
        typer.echo(f"{name:<{widths[0]}}{''.join(padded_cells)}")


def main() -> None:
    """Run the ``bayou`` command."""
    terminate_like_ctrl_c()
    ignore_harmless_warnings()
    app()


if __name__ == "__main__":
    main()
