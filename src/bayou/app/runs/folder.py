"""Run folders: the results of every method and seed of a config, and their posteriors.

RUN/config.json                    the settings that repeat the run
RUN/data.json                      the preprocessing of the data, for new rows
RUN/reference.bayou                rows of a file, with which `bayou watch` compares new ones
RUN/METHOD-SEED/posterior.bayou    the posterior
RUN/METHOD-SEED/result.json        its evaluation (``bayou.app.report.judge``)
RUN/METHOD-SEED-split-SPLIT/       the same for another split, if there are several
RUN/metrics.json, RUN/report.html  all results, updated after every method
RUN/updates.json                   the rows learned or removed after the fits (``bayou update``)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

import torch
from torch import Tensor, nn

import bayou
from bayou.app.runs import nets
from bayou.app.runs.config import DATA, Config
from bayou.app.runs.execution import Execution, TellEvent, fit_job
from bayou.app.runs.interrupt import Interrupted
from bayou.app.runs.jobs import Job
from bayou.app.runs.json_files import RunError, read_json, write_json
from bayou.core.files import StrPath, lock_file, write_text
from bayou.core.progress import Show
from bayou.data import DataError, DataSet, is_path, load
from bayou.data.columns import number
from bayou.data.preprocess import Preprocessor
from bayou.likelihoods import Likelihood
from bayou.likelihoods.named import AUTO, NamedLikelihood, find_likelihood
from bayou.networks import TableLayout
from bayou.posteriors import Posterior
from bayou.select.named import find
from bayou.training.jobs import Executor, PendingResult, send

# Diagnostics and reports are imported by the methods that use them: a prediction needs neither.
if TYPE_CHECKING:
    from bayou.app.report.page import RunReport
    from bayou.diagnostics.baselines import Baseline
    from bayou.diagnostics.reference import ReferenceRows

REFERENCE = "reference.bayou"
LOCK = ".lock"  # a file of the folder, locked by the process that writes to it
UPDATES = "updates.json"  # rows that posteriors learned, or removed, after their fits
DTYPES = {"float32": torch.float32, "float64": torch.float64, "bf16": torch.float32}
WHOLE_TOLERANCE = 1e-4  # of whole targets that were standardized
MAX_NAMED_CLASSES = 10  # in a note about their order
METRICS_KEYS = ("method", "label", "seed", "split", "seconds", "samples", "metrics")


@final
class Run:
    """A run folder.

    Args:
        folder: its path.
        config: the settings of the run.
    """

    def __init__(self, folder: StrPath, config: Config) -> None:
        self.folder: Path = Path(folder)
        self.config = config

    @staticmethod
    def open(folder: StrPath) -> Run:
        """Return the run of an existing folder.

        Args:
            folder: its path.

        Raises:
            RunError: it is not a run folder.
        """
        path = Path(folder) / "config.json"
        if not path.is_file():
            raise RunError(
                f"{folder} is not a run folder: it has no config.json; create one with "
                "`bayou train`"
            )
        return Run(folder, Config.from_json(read_json(path)))

    @staticmethod
    def create(folder: StrPath, config: Config, *, resume: bool = False) -> Run:
        """Return a new run, of which nothing is written before ``work``.

        Args:
            folder: a path that does not exist, or an empty folder.
            config: the settings of the run.
            resume: continue the run in the folder if it has the same settings.

        Raises:
            RunError: the folder is not empty, or has a run with other settings.
        """
        run = Run(folder, config)
        if (run.folder / "config.json").exists():
            if not resume:
                raise RunError(
                    f"{folder} already contains a run; add --resume to continue it, or choose "
                    "another --out"
                )
            run._check_settings()
        elif run.folder.is_file():
            raise RunError(f"{folder} is a file; --out must be a folder for the run")
        elif run.folder.exists() and any(path.name != LOCK for path in run.folder.iterdir()):
            raise RunError(
                f"{folder} is not empty and does not contain a run; choose another --out"
            )
        else:
            run._check_noise()
        return run

    # --- jobs and their parts ------------------------------------------------------------------

    @property
    def jobs(self) -> list[Job]:
        """Every method with every seed, grouped by method; then the same for the next split."""
        config = self.config
        seeds = range(config.seed, config.seed + config.seeds)
        return [
            Job(method, seed, split)
            for split in self.splits
            for method in config.methods
            for seed in seeds
        ]

    @property
    def splits(self) -> list[int | None]:
        """None for the first split, whose posteriors make predictions; the numbers of the rest."""
        return [None, *range(self.config.split + 1, self.config.split + self.config.splits)]

    def split_number(self, job: Job) -> int:
        """Return the number of a job's split, also of the first.

        Args:
            job: a job of the run.
        """
        return self.config.split if job.split is None else job.split

    def job_folder(self, job: Job) -> Path:
        """Return the folder of a job.

        Args:
            job: a job of the run.
        """
        return self.folder / job.name

    def load_data(self, split: int | None = None) -> DataSet:
        """Load the data set of the config on the CPU, in its precision.

        Args:
            split: the number of the split; None for the first of the run.
        """
        config = self.config
        if split is not None:
            config = replace(config, split=split)
        settings = {name: getattr(config, name) for name in config.settings(DATA)}
        named = self._named_likelihood
        if named is not None:
            settings["task"] = config.task or named.task
        needs_units = self.chooses_likelihood or (named is not None and not named.has_shift)
        data = load(config.data, **settings, scale_target=not needs_units)
        self._check_task(data)
        if config.likelihood == "ordinal" and config.order is None:
            data = replace(data, notes=[*data.notes, *_note_order(data.class_names)])
        if needs_units:
            data = _with_original_targets(data)
        ood = None if data.ood is None else data.ood.to(DTYPES[config.precision])
        train = self.convert(*data.train)
        return replace(data, train=train, test=self.convert(*data.test), ood=ood)

    def convert(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """Return rows in the precision of the config.

        Args:
            x: inputs.
            y: targets; classes stay as they are.
        """
        dtype = DTYPES[self.config.precision]
        return x.to(dtype), y.to(dtype) if y.is_floating_point() else y

    def build_net(
        self,
        shape: tuple[int, ...],
        outputs: int,
        net: str,
        job: Job,
        layout: TableLayout | None = None,
    ) -> nn.Module:
        """Build the network of a job, on the device of the config.

        Args:
            shape: of one input.
            outputs: classes, or numbers of one y; the likelihood decides how many outputs it needs.
            net: the name of the network.
            job: its seed draws the initial weights, and its method may change layers.
            layout: of the columns of the training rows, for a network that needs it.
        """
        outputs = self.output_count(outputs)
        module = nets.build(net, shape, outputs, seed=job.seed, layout=layout)
        module = find(job.method).prepare(module)
        return module.to(self.device, DTYPES[self.config.precision])

    @property
    def device(self) -> torch.device:
        """The device of the config; "auto" is a GPU if there is one."""
        name = self.config.device
        if name == "auto":
            name = "cuda" if torch.cuda.is_available() else "cpu"
        if name.startswith("cuda") and not torch.cuda.is_available():
            raise RunError("there is no CUDA device here; use --device cpu")
        try:
            return torch.device(name)
        except RuntimeError:
            raise RunError(f"there is no device {name!r}; use cpu, cuda or auto") from None

    @property
    def _named_likelihood(self) -> NamedLikelihood | None:
        """The entry of the likelihood of the config; None for the default or a choice by rows."""
        name = self.config.likelihood
        if name is None or name == AUTO:
            return None
        return find_likelihood(name)

    def _check_noise(self) -> None:
        """Raise a RunError if a noise was given that no likelihood of the config begins with."""
        config = self.config
        if config.noise == Config.noise:
            return
        name = "heteroscedastic" if config.heteroscedastic else config.likelihood
        if self.chooses_likelihood:
            raise RunError(
                f"--noise {config.noise:g} is the initial noise of --likelihood gaussian, and "
                f"{'--likelihood auto' if name == AUTO else '--method auto'} chooses the "
                "likelihood; give --likelihood gaussian, or leave out --noise"
            )
        if name not in (None, "gaussian"):
            raise RunError(
                f"--noise {config.noise:g} is the initial noise of --likelihood gaussian and has "
                f"no effect with {name}; leave out one of them"
            )

    def check_noise_of(self, data: DataSet) -> None:
        """Raise a RunError if a noise was given and the targets are classes.

        Args:
            data: the data set.
        """
        if self.config.noise != Config.noise and data.task == "classification":
            raise RunError(
                f"--noise {self.config.noise:g} is the initial noise of a regression, and the "
                "target has classes; leave it out, or give --task regression"
            )

    def _check_task(self, data: DataSet) -> None:
        """Raise a RunError unless the likelihood of the config is for this target."""
        name = self.config.likelihood
        is_class = data.task == "classification"
        if self.config.heteroscedastic and is_class:
            raise RunError(
                "--heteroscedastic is for regression; for classes the probabilities model the noise"
            )
        if self.config.order is not None and name != "ordinal":
            raise RunError("--order is for ordered classes: give --likelihood ordinal too")
        if name is None:
            return
        if self.config.heteroscedastic:
            raise RunError(f"give --heteroscedastic or --likelihood {name}, not both")
        named = self._named_likelihood
        if is_class != (named is not None and named.task == "classification"):
            raise RunError(f"--likelihood {name} is not for {data.task}; `bayou list likelihoods`")
        if name == "known-noise":
            raise RunError(
                "--likelihood known-noise needs the noise of each target, which a file cannot "
                "give; use it in Python: bayou.fit, or BayesRegressor with y (N, 2)"
            )
        is_censored = name.startswith("censored-")
        if is_censored != (self.config.observed is not None):
            raise RunError(
                f"--likelihood {name} and --observed do not go together: times with a column of "
                "observed rows need weibull or lognormal, which are censored then, or "
                "censored-weibull or censored-lognormal"
            )

    def output_count(self, outputs: int) -> int:
        """Return how many numbers the network has for one row.

        Args:
            outputs: classes, or numbers of one y.
        """
        name = self.config.likelihood
        if name == "ordinal":
            return 1
        if self.config.heteroscedastic and name is None:
            return 2 * outputs
        if name is None or name == AUTO:
            return outputs
        return find_likelihood(name).make(torch.ones(2, outputs)).outputs(outputs)

    def likelihood(self, data: DataSet) -> Likelihood:
        """Return the likelihood: by default categorical, or Gaussian with a learned noise.

        Args:
            data: the data set.
        """
        named = self._named_likelihood
        if named is not None and named.name not in ("gaussian", "categorical"):
            y = torch.cat((data.train[1], data.test[1]))
            if named.name == "ordinal":
                return bayou.likelihoods.Ordinal(len(data.class_names)).starting_at(y)
            return named.make(y).starting_at(y)
        if data.task == "classification":
            return bayou.Categorical()
        if self.config.heteroscedastic:
            return bayou.HeteroscedasticGaussian()
        return bayou.Gaussian(self.config.noise, learn=True)

    @property
    def chooses_likelihood(self) -> bool:
        """Whether a fit chooses the likelihood of numbers on held-out rows.

        The method auto does, unless a likelihood is given.
        """
        config = self.config
        is_open = config.likelihood is None and not config.heteroscedastic
        return config.likelihood == AUTO or (is_open and AUTO in config.methods)

    def fits_in_units(self, data: DataSet) -> bool:
        """Return whether targets are fitted as they are: classes, or standardized numbers.

        Args:
            data: the data set.
        """
        if data.task == "classification":
            return True
        is_shifted = self.config.likelihood in (None, "gaussian")
        return is_shifted and not self.chooses_likelihood

    def prior(self) -> bayou.Normal | None:
        """Return the prior; None if the method selects its scale on held-out rows."""
        if not isinstance(self.config.prior, str):
            return bayou.Normal(self.config.prior)
        if self.config.gain is None:
            return None
        return bayou.Normal("fan_in", gain=self.config.gain)

    def baselines(self, data: DataSet) -> dict[str, Baseline]:
        """Fit a constant and a linear prediction to the training rows.

        Args:
            data: the rows.
        """
        likelihood = self.likelihood(data).bind()
        outputs = (self.output_count(data.output_size),)
        for _, y in (data.train, data.test):
            likelihood.validate((len(y), *outputs), y)
        return bayou.diagnostics.baselines(likelihood, *data.train, outputs)

    # --- fits ----------------------------------------------------------------------------------

    def work(
        self,
        *,
        tell: TellEvent | None = None,
        show: Show = False,
        note: Callable[[str], None] | None = None,
        announce: Callable[[str], None] | None = None,
        executor: Executor | None = None,
    ) -> list[dict[str, Any]]:
        """Fit and evaluate the jobs that are not finished.

        The failure of a job is recorded and does not stop the next ones. Invalid settings and data
        raise an error before anything is written.

        Args:
            tell: is called with the events of jobs.
            show: the progress of a fit, as of ``bayou.fit``.
            note: is called with each note about the data when a run starts.
            announce: is called with a sentence about the time of the run before the first fit.
            executor: its workers do the jobs, and must share the folder and the data.

        Returns:
            The results of all finished jobs.

        Raises:
            Interrupted: Ctrl-C; finished jobs are in the folder.
            RunError: another process uses the folder, the data have changed, or posteriors of the
                run were updated.
        """
        if self.updates():
            raise RunError(
                f"the posteriors in {self.folder} were updated by new rows (`bayou update`), which "
                "a fit would not have; train on a file with all rows, with another --out"
            )
        execution = Execution(self, tell, show)
        with self.lock():
            execution.start(note)
            return execution.work(announce, executor)

    def submit(self, executor: Executor, job: Job, net: str) -> PendingResult:
        """Send a job to a worker and return its future.

        Args:
            executor: of the workers, which share the folder and the data.
            job: a job of the run.
            net: the name of the network.
        """
        return send(executor, fit_in_worker, self.folder.resolve(), job, net)

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Lock the folder for this process inside the block (not on Windows).

        A RunError is raised if another process has locked it, or has started a run with other
        settings in it.
        """
        with lock_file(self.folder / LOCK) as is_free:
            if not is_free:
                raise RunError(
                    f"another process is using {self.folder}; wait until it ends and continue with "
                    f"`bayou resume {self.folder}`, or choose another --out"
                )
            if (self.folder / "config.json").exists():
                self._check_settings()
            yield

    def _check_settings(self) -> None:
        """Raise a RunError unless the run in the folder has the settings of this one."""
        if Run.open(self.folder).config != self.config:
            raise RunError(
                f"{self.folder} contains a run with other settings; `bayou resume {self.folder}` "
                "continues with those"
            )

    # --- results -------------------------------------------------------------------------------

    def facts(self) -> dict[str, Any]:
        """Return the facts about the data and the network, as in data.json."""
        path = self.folder / "data.json"
        if not path.exists():
            raise RunError(
                f"{self.folder} has no data.json: the run was not started; use "
                f"`bayou resume {self.folder}`"
            )
        facts = read_json(
            path, net=str, task=str, input_shape=list, output_size=int, preprocessor=dict
        )
        sizes = (*facts["input_shape"], facts["output_size"])
        if not all(type(size) is int and size > 0 for size in sizes):
            raise RunError(
                f"{path} has input_shape = {facts['input_shape']!r:.60} and output_size = "
                f"{facts['output_size']}; both must be positive whole numbers; restore it, or run "
                "again"
            )
        return {"split": self.config.split} | facts

    def result(self, job: Job) -> dict[str, Any] | None:
        """Return the evaluation of a job; None if it is not finished.

        Args:
            job: a job of the run.
        """
        path = self.job_folder(job) / "result.json"
        if not path.exists():
            return None
        result: dict[str, Any] = read_json(path, method=str, seed=int, metrics=dict)
        return result

    def results(self) -> list[dict[str, Any]]:
        """Return the results of finished jobs, with their names and splits."""
        results = []
        for job in self.jobs:
            result = self.result(job)
            if result is not None:
                results.append(result | {"split": self.split_number(job), "name": job.name})
        return results

    def failures(self) -> dict[str, str]:
        """Return the errors of failed jobs by name."""
        errors = {}
        for job in self.jobs:
            path = self.job_folder(job) / "error.json"
            if path.exists() and self.result(job) is None:
                errors[job.name] = read_json(path, error=str)["error"]
        return errors

    def finished_jobs(self) -> list[Job]:
        """Return the jobs of the first split with a saved posterior, which can predict new rows."""
        jobs = [job for job in self.jobs if job.split is None]
        return [job for job in jobs if (self.job_folder(job) / "posterior.bayou").exists()]

    def unfinished_jobs(self) -> list[Job]:
        """Return the jobs that have neither a result nor an error.

        The run was interrupted, or is still working on them. In a run that was updated after its
        data were gone, a posterior has no result and is finished.
        """
        failures = self.failures()
        if self.updates():
            finished_jobs = self.finished_jobs()
            return [
                job for job in self.jobs if job not in finished_jobs and job.name not in failures
            ]
        return [job for job in self.jobs if self.result(job) is None and job.name not in failures]

    def updates(self) -> list[dict[str, Any]]:
        """Return the records of ``bayou update``, oldest first; none for a run as it was fitted.

        Each has the file ``input``, whether its rows were ``removed``, the factor ``forget``, the
        numbers of the ``jobs`` and a digest of each of the ``rows``.
        """
        path = self.folder / UPDATES
        if not path.exists():
            return []
        records = read_json(path, updates=list)["updates"]
        for record in records:
            is_record = isinstance(record, dict) and isinstance(record.get("rows"), list)
            if not is_record or not isinstance(record.get("removed"), bool):
                raise RunError(f"{path} has an invalid record, {record!r:.60}; restore it")
        return list(records)

    def write_summary(self) -> list[dict[str, Any]]:
        """Write metrics.json and report.html, and return the finished results."""
        results = self.results()
        metrics = [{name: result[name] for name in METRICS_KEYS} for result in results]
        write_json(self.folder / "metrics.json", metrics)
        if results:
            write_text(self.folder / "report.html", self.report().html(), through_links=False)
        return results

    def report(self) -> RunReport:
        """Return the report on the finished results; a ValueError if there are none."""
        from bayou.app.report.page import RunReport

        facts = self.facts()
        config = {
            "facts": facts,
            "failures": self.failures(),
            "data": Path(self.config.data).name,
            "notes": facts.get("notes", []),
            "split_notes": facts.get("split_notes", []),
            "command": self.config.command(),
        }
        return RunReport(self.results(), config)

    # --- posteriors ----------------------------------------------------------------------------

    def posterior(
        self,
        method: str | None = None,
        seed: int | None = None,
    ) -> tuple[Posterior, Preprocessor, Job]:
        """Load a posterior of the run, and the preprocessor for new rows.

        Args:
            method: which method; by default that of the first finished job.
            seed: which seed; by default the first.

        Returns:
            The posterior, the preprocessor and the job of the posterior.

        Raises:
            RunError: there is no such posterior, or a file was changed.
        """
        jobs = [
            job
            for job in self.finished_jobs()
            if method in (None, job.method) and seed in (None, job.seed)
        ]
        if not jobs:
            raise RunError(self.describe_missing(method, seed))
        job = jobs[0]
        facts = self.facts()
        run = self
        if not torch.cuda.is_available():
            run = Run(self.folder, replace(self.config, device="cpu"))
        layout = None
        if facts.get("layout") is not None:
            layout = TableLayout.from_json(facts["layout"])
        shape = tuple(facts["input_shape"])
        net = run.build_net(shape, facts["output_size"], facts["net"], job, layout)
        posterior = bayou.load(self.job_folder(job) / "posterior.bayou", net)
        return posterior, self.preprocessor(), job

    def save_reference(self, data: DataSet) -> None:
        """Keep rows of a file in the folder, unless the settings say that none are kept.

        Args:
            data: the data set of the first split.
        """
        if self.config.keep_rows and is_path(self.config.data):
            from bayou.data.watched import reference_of

            reference_of(data, self.config.keep_rows).save(self.folder / REFERENCE)

    def saved_reference(self) -> ReferenceRows | None:
        """Return the rows that the folder keeps; None if it keeps none."""
        from bayou.diagnostics.reference import ReferenceRows

        path = self.folder / REFERENCE
        return ReferenceRows.load(path) if path.exists() else None

    def reference(self) -> ReferenceRows:
        """Return the rows that new rows are compared with: those of the folder, or of the data.

        Raises:
            RunError: the folder has none, and the data are no longer available.
        """
        from bayou.data.watched import reference_of
        from bayou.diagnostics.reference import MAX_ROWS

        saved = self.saved_reference()
        if saved is not None:
            return saved
        try:
            data = self.load_data()
        except ValueError as error:
            raise RunError(
                f"{self.folder} keeps no rows of its training data, and these cannot be read "
                f"again: {error}; put the file back, or train again with --keep-rows 2000"
            ) from None
        return reference_of(data, MAX_ROWS)

    def preprocessor(self) -> Preprocessor:
        """Return the preprocessor for new rows."""
        try:
            return Preprocessor.from_json(self.facts()["preprocessor"])
        except DataError as error:
            raise RunError(
                f"{self.folder / 'data.json'}: {error}; restore it, or run again"
            ) from None

    def describe_missing(self, method: str | None, seed: int | None = None) -> str:
        """Return the error message for a posterior that does not exist.

        Args:
            method: the method that was asked for.
            seed: the seed that was asked for.
        """
        finished_jobs = self.finished_jobs()
        names = ", ".join(job.name for job in finished_jobs) or "nothing yet"
        of_seed = "" if seed is None else f" with seed {seed}"
        advice = ""
        if len(finished_jobs) * self.config.splits < len(self.jobs):
            advice = f"; `bayou resume {self.folder}` continues it"
        return (
            f"{self.folder} has no finished {method or 'method'}{of_seed}; it has {names}{advice}"
        )

    def describe_interruption(self, job: Job, posterior: Posterior) -> list[str]:
        """Return notes if a posterior or its run ended before the end of the settings.

        Args:
            job: the method and seed of the posterior.
            posterior: as loaded from the run.
        """
        notes = []
        if posterior.stopped == "interrupted":
            notes.append(
                f"{job.name}: its fit was interrupted before its end, and these are numbers of "
                "what it was then; train it again for those of the finished fit."
            )
        unfinished_jobs = self.unfinished_jobs()
        if unfinished_jobs:
            total = len(self.jobs)
            finished_count = total - len(unfinished_jobs)
            names = ", ".join(unfinished_job.name for unfinished_job in unfinished_jobs)
            not_evaluated = ""
            if job in unfinished_jobs:
                not_evaluated = " It is saved, but was not evaluated and not checked."
            notes.append(
                f"The run in {self.folder} is not finished: {finished_count} of {total} fits are, "
                f"{names} not. These are numbers of {job.name}.{not_evaluated} "
                f"`bayou resume {self.folder}` continues the run."
            )
        return notes


def _note_order(class_names: Sequence[str]) -> list[str]:
    """Return a note about the order of classes that are text, for which none was given."""
    if all(number(name) is not None for name in class_names):
        return []
    first = ", ".join(map(repr, class_names[:MAX_NAMED_CLASSES]))
    dots = ", ..." if len(class_names) > MAX_NAMED_CLASSES else ""
    return [
        f"The classes are ordered by the alphabet, from low to high: {first}{dots}. Is that their "
        "order? --order FIRST,SECOND,... gives another."
    ]


def _with_original_targets(data: DataSet) -> DataSet:
    """Return a data set whose targets are in original units.

    Those of a file are; of a data set by name whole numbers are restored exactly.
    """
    shift = data.y_mean
    scale = data.y_scale
    if data.task == "classification" or (shift, scale) == (0.0, 1.0):
        return data

    def restore(y: Tensor) -> Tensor:
        original = y.double() * scale + shift
        whole = original.round()
        return torch.where((original - whole).abs() < WHOLE_TOLERANCE, whole, original).to(y)

    preprocessor: Any = replace(data.preprocessor, y_mean=0.0, y_scale=1.0)  # type: ignore[type-var]
    train = (data.train[0], restore(data.train[1]))
    test = (data.test[0], restore(data.test[1]))
    return replace(data, train=train, test=test, preprocessor=preprocessor)


def fit_in_worker(folder: Path, job: Job, net: str) -> None:
    """Fit and evaluate a job of a run that was started, and write its result to the folder.

    Args:
        folder: the run folder.
        job: a job of the run.
        net: the name of the network.
    """
    run = Run.open(folder)
    data = run.load_data(job.split)
    fit_job(
        run,
        job,
        data,
        run.baselines(data),
        net,
        tell=lambda name, event, numbers: None,
        show=False,
    )


__all__ = ["Interrupted", "Job", "Run", "RunError"]
