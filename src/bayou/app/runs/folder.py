"""Run folders: fit and evaluate every method and seed of a config, save the results, resume after
an interruption.

RUN/config.json                    the settings that repeat the run
RUN/data.json                      the preprocessing of the data, for new rows
RUN/METHOD-SEED/posterior.bayou    the posterior
RUN/METHOD-SEED/result.json        its evaluation (``bayou.app.report.judge``)
RUN/METHOD-SEED-split-SPLIT/       the same for another split, if there are several
RUN/metrics.json, RUN/report.html  all results, updated after every method
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

import torch
from torch import nn

import bayou
from bayou.app.runs import nets
from bayou.app.runs.config import DATA, Config
from bayou.app.runs.interrupt import raise_if_interrupted
from bayou.app.runs.writing import RunError, read_json, write_json
from bayou.core.files import StrPath, lock_file, write_text
from bayou.core.progress import Show
from bayou.data import DataError, DataSet, load
from bayou.data.preprocess import Preprocessor
from bayou.likelihoods import Likelihood
from bayou.posteriors import Posterior
from bayou.select.named import find
from bayou.select.settings import ConfigError
from bayou.training.inputs import digest
from bayou.training.jobs import Executor, send, wait_for

if (
    TYPE_CHECKING
):  # diagnostics and reports are imported where they are made: a prediction needs neither
    from bayou.app.report.page import Report
    from bayou.app.report.results import Average
    from bayou.diagnostics.baselines import Baseline

Tell = Callable[[str, str, dict[str, Any]], None]  # (method-seed, what happened, numbers)
LOCK = ".lock"  # in a run folder: held by the process that writes to it
DTYPES = {"float32": torch.float32, "float64": torch.float64, "bf16": torch.float32}


class Interrupted(Exception):
    """Ctrl-C: finished methods are in the folder, and the current one in its checkpoint."""


def of_split(split: int | None) -> str:
    """The suffix of names that belong to another split than the first."""
    return "" if split is None else f"-split-{split}"


@final
@dataclass(frozen=True)
class Job:
    """One method with one seed; ``split``: the split, if it is not the first of the run."""

    method: str
    seed: int
    split: int | None = None

    @property
    def name(self) -> str:
        return f"{self.method}-{self.seed}{of_split(self.split)}"


@final
class Run:
    """A run folder."""

    def __init__(self, folder: StrPath, config: Config) -> None:
        self.folder, self.config = Path(folder), config

    @staticmethod
    def open(folder: StrPath) -> Run:
        """An existing run folder."""
        path = Path(folder) / "config.json"
        if not path.is_file():
            raise RunError(
                f"{folder} is not a run folder: it has no config.json; create one with `bayou train`"
            )
        return Run(folder, Config.from_json(read_json(path)))

    @staticmethod
    def create(folder: StrPath, config: Config, *, resume: bool = False) -> Run:
        """A folder for a new run, or with ``resume`` an interrupted one; nothing is written before
        ``work``.
        """
        run = Run(folder, config)
        path = run.folder / "config.json"
        if path.exists():
            if not resume:
                raise RunError(
                    f"{folder} already contains a run; add --resume to continue it, or choose another --out"
                )
            run._check_settings()
        elif run.folder.is_file():
            raise RunError(f"{folder} is a file; --out must be a folder for the run")
        elif run.folder.exists() and any(one.name != LOCK for one in run.folder.iterdir()):
            raise RunError(
                f"{folder} is not empty and does not contain a run; choose another --out"
            )
        return run

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
        """The first split, whose posteriors are used for predictions, and the numbers of the
        others.
        """
        return [None, *range(self.config.split + 1, self.config.split + self.config.splits)]

    def place(self, job: Job) -> Path:
        """The folder of a job."""
        return self.folder / job.name

    def load_data(self, split: int | None = None) -> DataSet:
        """The data set of the config, or another split of it, on the CPU, in its precision."""
        config = self.config if split is None else replace(self.config, split=split)
        data = load(config.data, **{name: getattr(config, name) for name in config.settings(DATA)})
        dtype = DTYPES[config.precision]
        (x, y), (x_test, y_test), away = data.train, data.test, data.ood
        y, y_test = (part.to(dtype) if part.is_floating_point() else part for part in (y, y_test))
        ood = None if away is None else away.to(dtype)
        return replace(data, train=(x.to(dtype), y), test=(x_test.to(dtype), y_test), ood=ood)

    def build_net(self, shape: tuple[int, ...], outputs: int, net: str, job: Job) -> nn.Module:
        """The network of a job, on the device of the config."""
        if self.config.heteroscedastic:
            outputs *= 2
        made = nets.build(net, shape, outputs, seed=job.seed)
        return find(job.method).prepare(made).to(self.device, DTYPES[self.config.precision])

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

    def likelihood(self, task: str) -> Likelihood:
        """Categorical for classes, else Gaussian with a learned noise."""
        if task == "classification":
            return bayou.Categorical()
        if self.config.heteroscedastic:
            return bayou.HeteroscedasticGaussian()
        return bayou.Gaussian(self.config.noise, learn=True)

    # --- doing it ----------------------------------------------------------------------------------------------------

    def work(
        self, *, tell: Tell | None = None, show: Show = False, note: Callable[[str], None] | None = None,
        announce: Callable[[str], None] | None = None, executor: Executor | None = None,
    ) -> list[dict[str, Any]]:  # fmt: skip
        """Fit and evaluate the jobs that are not finished; a failure of one is recorded and does
        not stop the others.

        Invalid settings and data raise an error before anything is written.

        Args:
            tell: is called with the events of jobs.
            show: the progress of a fit, as of ``bayou.fit``.
            note: is called with each note about the data when a run starts.
            announce: is called with a sentence about the time of the run before the first fit.
            executor: its workers do the jobs, and must share the folder and the data.
        """
        for method in self.config.methods:
            find(method)
        tell = tell or (lambda name, what, numbers: None)
        parts = {split: self.load_data(split) for split in self.splits}
        data = parts[None]
        begun = (self.folder / "data.json").exists()
        net = self.config.net or (self.facts()["net"] if begun else nets.default_net(data))
        weights = sum(
            p.numel()
            for p in self.build_net(
                data.input_shape, data.output_size, net, self.jobs[0]
            ).parameters()
        )
        if self.config.heteroscedastic and data.task == "classification":
            raise RunError(
                "--heteroscedastic is for regression; for classes the probabilities model the noise"
            )
        digests = {split: digest((part.train, part.test)) for split, part in parts.items()}
        facts: dict[str, Any] = {
            "net": net,
            "weights": weights,
            "train": data.n,
            "test": len(data.test[1]),
            "ood": data.ood_name,
            "task": data.task,
            "input_shape": list(data.input_shape),
            "output_size": data.output_size,
            "notes": data.notes,
            "preprocessor": data.preprocessor.to_json(),
            "split": self.config.split,
        }
        against = {split: self.baselines(part) for split, part in parts.items()}
        known = self.facts() if begun else {}
        if begun and [known["sha256"], *(one["sha256"] for one in known["splits"].values())] != [
            *digests.values()
        ]:
            raise RunError(
                f"{self.config.data} has changed since {self.folder} was started; its methods would not use the same "
                "data: choose another --out"
            )
        from bayou.app.report.judge import judge_baselines

        scores = {split: judge_baselines(against[split], part) for split, part in parts.items()}
        by_split = {
            split: {
                "sha256": digests[split],
                "baselines": scores[split],
                "targets": _test_targets(part),
            }
            for split, part in parts.items()
        }
        facts |= by_split[None] | {
            "splits": {str(k): one for k, one in by_split.items() if k is not None}
        }
        with self._alone():
            write_json(self.folder / "config.json", self.config.to_json())
            write_json(self.folder / "data.json", facts)
            if note is not None and not begun:
                for text in data.notes:
                    note(text)
            for split, found in scores.items():
                for name, one in found.items():
                    tell(f"{name}{of_split(split)}", "baseline", one["metrics"])
            order = sorted(
                self.jobs, key=lambda job: (self.splits.index(job.split), job.method != "map")
            )
            place, left = (
                self.folder.resolve(),
                [job for job in order if self._finished(job) is None],
            )
            for job in left:
                _refuse_links(self.place(job))
            if announce is not None and left:
                announce(self._describe_duration([job.method for job in left], data, net))
            sent = (
                {}
                if executor is None
                else {job: send(executor, fit_in_worker, place, job, net) for job in left}
            )
            try:
                for job in order:  # MAP first, which the others are compared with
                    self._do(
                        job, parts[job.split], against[job.split], facts, tell, show, sent.get(job)
                    )
            except KeyboardInterrupt:
                raise Interrupted from None
            finally:
                for one in sent.values():
                    one.cancel()
                results = self._write()
            return results

    def _describe_duration(self, methods: list[str], data: DataSet, net: str) -> str:
        """A sentence about the time of these fits, by a few steps of the network."""
        from bayou.app.runs.duration import (
            describe_duration,
            estimate_seconds,
            search_rows,
            step_seconds,
        )

        module = self.build_net(data.input_shape, data.output_size, net, self.jobs[0])
        likelihood = self.likelihood(data.task).bind().to(self.device)
        x, y = (part.to(self.device) for part in data.train)
        counts = min(self.config.batch_size, data.n), search_rows(data.n)
        of_batch, of_search = (
            step_seconds(module, likelihood, x[:count], y[:count]) for count in counts
        )
        seconds = estimate_seconds(methods, self.config, data.n, (of_batch, of_search))
        return describe_duration(methods, seconds, data.n)

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Lock the folder for this process until it ends (not on Windows); a RunError if another
        has locked it.
        """
        with lock_file(self.folder / LOCK) as free:
            if not free:
                raise RunError(
                    f"another process is using {self.folder}; wait until it ends and continue with `bayou resume "
                    f"{self.folder}`, or choose another --out"
                )
            if (self.folder / "config.json").exists():
                self._check_settings()  # of a run that another process has started since
            yield

    def _check_settings(self) -> None:
        if Run.open(self.folder).config != self.config:
            raise RunError(
                f"{self.folder} contains a run with other settings; `bayou resume {self.folder}` continues with those"
            )

    def baselines(self, data: DataSet) -> dict[str, Baseline]:
        """A constant and a linear prediction, fitted to the training rows."""
        return bayou.diagnostics.baselines(
            self.likelihood(data.task).bind(), *data.train, (data.output_size,)
        )

    def _do(
        self, job: Job, data: DataSet, against: dict[str, Baseline], facts: dict[str, Any], tell: Tell, show: Show,
        sent: Any,
    ) -> None:  # fmt: skip
        """Fit and evaluate one job, here or where it was sent, unless it is finished; a failure is
        recorded.
        """
        if sent is not None or self._finished(job) is None:
            try:
                tell(job.name, "fitting", {})
                if sent is None or not wait_for(sent):
                    self._fit(job, data, against, facts["net"], tell, show)
            except (ValueError, FloatingPointError, RuntimeError) as error:
                write_json(
                    self.place(job) / "error.json", {"error": f"{type(error).__name__}: {error}"}
                )
                tell(job.name, "failed", {"error": str(error)})
                return
            self._write()
        result = self._finished(job)
        assert result is not None
        flags = [check for check in result.get("checks", []) if check["status"] != "ok"]
        mixing = {
            name: value
            for name, value in result.get("mixing", {}).items()
            if name in ("r_hat", "ess", "mixed")
        }
        numbers = {
            "seconds": result["seconds"],
            "flags": flags,
            "beside_map": self._beside_map(job),
        } | mixing
        tell(job.name, "done", result["metrics"] | numbers)

    def _beside_map(self, job: Job) -> Average | None:
        """The NLL of a job minus that of MAP with its seed and split; None without MAP."""
        from bayou.app.report.results import Average, paired

        own, other = (self._finished(one) for one in (job, replace(job, method="map")))
        if job.method == "map" or "map" not in self.config.methods or own is None or other is None:
            return None
        rows, others = own.get("rows"), other.get("rows")
        return (
            Average(*paired(rows, others))
            if rows and others and None not in (*rows, *others)
            else None
        )

    def _fit(
        self,
        job: Job,
        data: DataSet,
        against: dict[str, Baseline],
        net: str,
        tell: Tell,
        show: Show,
    ) -> None:
        from bayou.app.report.judge import judge

        config, place, preset = self.config, self.place(job), find(job.method)
        place.mkdir(exist_ok=True)
        (place / "error.json").unlink(missing_ok=True)
        compiled = self.device.type == "cuda" if config.compile is None else config.compile
        start, method = time.monotonic(), preset.make(replace(config, compile=compiled))
        posterior = bayou.fit(
            self.build_net(data.input_shape, data.output_size, net, job),
            (data.train[0].to(self.device), data.train[1].to(self.device)),
            method=method,
            likelihood=self.likelihood(data.task),
            prior=self._prior(),
            seed=job.seed,
            checkpoint=place / "checkpoint",
            progress=show,
        )
        seconds = time.monotonic() - start
        raise_if_interrupted(posterior)
        posterior.save(place / "posterior.bayou")
        tell(job.name, "judging", {})
        start, found = (
            time.monotonic(),
            judge(posterior, data, samples=config.samples, seed=job.seed, against=against),
        )
        result = {
            "method": job.method,
            "label": preset.label,
            "seed": job.seed,
            "split": self._split(job),
            "task": data.task,
            "seconds": round(seconds, 2),
            "history": posterior.history,
            "seconds_to_evaluate": round(time.monotonic() - start, 2),
            "choice": posterior.choice,
            "plan": posterior.plan,
            "selection": list(posterior.selection),
            **found,
        }
        write_json(place / "result.json", result)

    def _prior(self) -> bayou.Normal | None:
        """The prior of the settings; None if the method selects its scale on held-out rows."""
        if not isinstance(self.config.prior, str):
            return bayou.Normal(self.config.prior)
        return None if self.config.gain is None else bayou.Normal("fan_in", gain=self.config.gain)

    def _finished(self, job: Job) -> dict[str, Any] | None:
        path = self.place(job) / "result.json"
        return read_json(path, method=str, seed=int, metrics=dict) if path.exists() else None

    def _split(self, job: Job) -> int:
        return self.config.split if job.split is None else job.split

    def results(self) -> list[dict[str, Any]]:
        """The results of finished jobs."""
        found = ((job, self._finished(job)) for job in self.jobs)
        return [
            result | {"split": self._split(job), "name": job.name}
            for job, result in found
            if result is not None
        ]

    def failures(self) -> dict[str, str]:
        """Failed methods with their errors."""
        found = {}
        for job in self.jobs:
            path = self.place(job) / "error.json"
            if path.exists() and self._finished(job) is None:
                found[job.name] = read_json(path, error=str)["error"]
        return found

    def _write(self) -> list[dict[str, Any]]:
        """Write metrics.json and report.html from the finished results."""
        results = self.results()
        names = ("method", "label", "seed", "split", "seconds", "samples", "metrics")
        write_json(
            self.folder / "metrics.json",
            [{name: result[name] for name in names} for result in results],
        )
        if results:
            write_text(self.folder / "report.html", self.report().html(), through_links=False)
        return results

    def report(self) -> Report:
        """The report on the finished results; a ValueError if there are none."""
        from bayou.app.report.page import Report

        facts, data = self.facts(), Path(self.config.data).name
        shown = {
            "facts": facts,
            "failures": self.failures(),
            "data": data,
            "notes": facts.get("notes", []),
        }
        return Report(self.results(), shown | {"command": self.config.command()})

    # --- using it ----------------------------------------------------------------------------------------------------

    def facts(self) -> dict[str, Any]:
        """Facts about the data and the network."""
        path = self.folder / "data.json"
        if not path.exists():
            raise RunError(
                f"{self.folder} has no data.json: the run was not started; use `bayou resume {self.folder}`"
            )
        facts = read_json(
            path, net=str, task=str, input_shape=list, output_size=int, preprocessor=dict
        )
        if not all(
            type(size) is int and size > 0 for size in (*facts["input_shape"], facts["output_size"])
        ):
            raise RunError(
                f"{path} has input_shape = {facts['input_shape']!r:.60} and output_size = {facts['output_size']}; both "
                "must be positive whole numbers; restore it, or run again"
            )
        return {"split": self.config.split} | facts

    def finished(self) -> list[Job]:
        """The jobs of the first split with a saved posterior, which can predict new rows."""
        mine = [job for job in self.jobs if job.split is None]
        return [job for job in mine if (self.place(job) / "posterior.bayou").exists()]

    def unfinished(self) -> list[Job]:
        """The jobs without a result that did not fail: the run was interrupted, or is still working
        on them.
        """
        failed = self.failures()
        return [job for job in self.jobs if self._finished(job) is None and job.name not in failed]

    def describe_interruption(self, job: Job, posterior: Posterior) -> list[str]:
        """Notes about a posterior that is not what the settings of its run describe, or is not all
        of the run.

        Args:
            job: the method and seed of the posterior.
            posterior: as loaded from the run.
        """
        notes = []
        if posterior.stopped == "interrupted":
            notes.append(
                f"{job.name}: its fit was interrupted before its end, and these are numbers of what it was then; "
                "train it again for those of the finished fit."
            )
        unfinished = self.unfinished()
        if unfinished:
            have = len(self.jobs) - len(unfinished)
            names = ", ".join(one.name for one in unfinished)
            evaluated = (
                " It is saved, but was not evaluated and not checked." if job in unfinished else ""
            )
            notes.append(
                f"The run in {self.folder} is not finished: {have} of {len(self.jobs)} fits are, {names} not. These "
                f"are numbers of {job.name}.{evaluated} `bayou resume {self.folder}` continues the run."
            )
        return notes

    def lacks(self, method: str | None, seed: int | None = None) -> str:
        """The error message for a posterior that does not exist."""
        have = ", ".join(job.name for job in self.finished()) or "nothing yet"
        of = "" if seed is None else f" with seed {seed}"
        on = (
            f"; `bayou resume {self.folder}` continues it"
            if len(self.finished()) * self.config.splits < len(self.jobs)
            else ""
        )
        return f"{self.folder} has no finished {method or 'method'}{of}; it has {have}{on}"

    def posterior(
        self, method: str | None = None, seed: int | None = None
    ) -> tuple[Posterior, Preprocessor, Job]:
        """A posterior of the run (by default the first finished one), and the preprocessor for new
        rows.
        """
        wanted = [
            j for j in self.finished() if method in (None, j.method) and seed in (None, j.seed)
        ]
        if not wanted:
            raise RunError(self.lacks(method, seed))
        job, facts = wanted[0], self.facts()
        here = (
            self
            if torch.cuda.is_available()
            else Run(self.folder, replace(self.config, device="cpu"))
        )
        net = here.build_net(tuple(facts["input_shape"]), facts["output_size"], facts["net"], job)
        posterior = bayou.load(self.place(job) / "posterior.bayou", net)
        try:
            return posterior, Preprocessor.from_json(facts["preprocessor"]), job
        except DataError as error:
            raise RunError(
                f"{self.folder / 'data.json'}: {error}; restore it, or run again"
            ) from None


def fit_in_worker(folder: Path, job: Job, net: str) -> None:
    """Do a job of a run that was started: its folder has the result then."""
    run = Run.open(folder)
    data = run.load_data(job.split)
    run._fit(job, data, run.baselines(data), net, lambda *told: None, False)


def _refuse_links(folder: Path) -> None:
    """Raise a RunError if a folder, or something in it, is a symbolic link, through which a fit
    would write.
    """
    for path in (folder, *folder.rglob("*")):
        if path.is_symlink():
            raise RunError(
                f"{path} is a symbolic link to {os.readlink(path)}; a fit would write through it: remove the link, or "
                "choose another --out"
            )


def _test_targets(data: DataSet) -> list[float]:
    """The y of the test rows in original units, to 6 digits: two runs with the same ones can be
    compared by rows.
    """
    y = data.test[1].double().flatten() * data.y_scale + data.y_mean
    return [float(f"{value:.6g}") for value in y.tolist()]


__all__ = [
    "Config",
    "ConfigError",
    "Interrupted",
    "Job",
    "Run",
    "RunError",
    "read_json",
    "write_text",
]
