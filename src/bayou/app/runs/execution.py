"""Fit and evaluate the jobs of a run folder that are not finished."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

import bayou
from bayou.app.runs import nets
from bayou.app.runs.interrupt import Interrupted, raise_if_interrupted
from bayou.app.runs.jobs import Job, split_suffix
from bayou.app.runs.json_files import RunError, write_json
from bayou.app.runs.nets import NetChoice
from bayou.core.progress import Show
from bayou.data import DataSet
from bayou.networks.layout import TableLayout
from bayou.posteriors import Posterior
from bayou.select.named import find
from bayou.training.inputs import digest
from bayou.training.jobs import Executor, PendingResult, wait_for

# Diagnostics and reports are imported by the functions that use them: a prediction needs neither.
if TYPE_CHECKING:
    from bayou.app.report.results import Average
    from bayou.app.runs.folder import Run
    from bayou.diagnostics.baselines import Baseline
    from bayou.likelihoods import Likelihood

TellEvent = Callable[[str, str, dict[str, Any]], None]
"""Receives the name of a job, its event (fitting, judging, done, failed) and the numbers of it."""
MIXING_NUMBERS = ("r_hat", "ess", "mixed")


@final
@dataclass(frozen=True)
class PreparedSplit:
    """The rows of one split with the baselines that every method is compared with.

    Args:
        data: the rows.
        sha256: the digest of the training and test rows.
        baselines: a constant and a linear prediction, fitted to the training rows.
        baseline_scores: their evaluation on the test rows, by name.
    """

    data: DataSet
    sha256: str
    baselines: dict[str, Baseline]
    baseline_scores: dict[str, Any]

    def to_json(self) -> dict[str, Any]:
        """Return what data.json records of this split."""
        return {
            "sha256": self.sha256,
            "baselines": self.baseline_scores,
            "targets": _test_targets(self.data),
        }


@final
class Execution:
    """One call of ``Run.work``: the data of all splits, and the jobs that are left.

    Nothing is written before ``start``.

    Args:
        run: the run folder.
        tell: is called with the events of jobs.
        show: the progress of a fit, as of ``bayou.fit``.

    Raises:
        RunError: the settings do not fit the data, or the data have changed since the run began.
    """

    def __init__(self, run: Run, tell: TellEvent | None, show: Show) -> None:
        self.run = run
        self.tell: Callable[[str, str, dict[str, Any]], None] = tell or _ignore_event
        self.show = show
        for method in run.config.methods:
            find(method)
        datasets = {split: run.load_data(split) for split in run.splits}
        self.data: DataSet = datasets[None]
        self.is_new: bool = not (run.folder / "data.json").exists()
        if self.is_new:
            run.check_noise_of(self.data)
        self.choice: NetChoice = self._choose_net()
        self.net: str = self.choice.name
        self.layout: TableLayout | None = nets.layout_for(self.net, self.data.train[0])
        self.weights: int = self._count_weights()
        digests = {split: digest((data.train, data.test)) for split, data in datasets.items()}
        if not self.is_new:
            self._check_digests(list(digests.values()))
        self.splits: dict[int | None, PreparedSplit] = {
            split: _prepare_split(run, data, digests[split]) for split, data in datasets.items()
        }

    def _choose_net(self) -> nets.NetChoice:
        """Return the network of the settings, of the run before, or the default for the data."""
        run = self.run
        data = self.data
        if run.config.net:
            return nets.NetChoice(run.config.net)
        if not self.is_new:
            facts = run.facts()
            return nets.NetChoice(str(facts["net"]), record=facts.get("net_choice"))
        name = nets.default_net(data)
        needs_net = any(find(method).needs_net for method in run.config.methods)
        if not needs_net or not nets.is_compared(data.input_shape, data.n):
            return nets.NetChoice(name)
        from bayou.app.runs.net_choice import choose_net

        x, y = (tensor.to(run.device) for tensor in data.train)
        likelihood = run.likelihood(data) if run.fits_in_units(data) else None
        outputs = run.output_count(data.output_size)
        return choose_net(name, x, y, outputs, likelihood, run.config.seed)

    def _count_weights(self) -> int:
        """Count the parameters of the network of the first job."""
        data = self.data
        job = self.run.jobs[0]
        net = self.run.build_net(data.input_shape, data.output_size, self.net, job, self.layout)
        return sum(parameter.numel() for parameter in net.parameters())

    def _check_digests(self, digests: list[str]) -> None:
        """Raise a RunError if the rows of a split are not those that the run began with."""
        facts = self.run.facts()
        recorded = [facts["sha256"]]
        recorded += [split["sha256"] for split in facts["splits"].values()]
        if recorded != digests:
            raise RunError(
                f"{self.run.config.data} has changed since {self.run.folder} was started; its "
                "methods would not use the same data: choose another --out"
            )

    def facts(self) -> dict[str, Any]:
        """Return what data.json records: the sizes, the preprocessing and the splits."""
        data = self.data
        facts: dict[str, Any] = {
            "net": self.net,
            "weights": self.weights,
            "train": data.n,
            "test": len(data.test[1]),
            "ood": data.ood_name,
            "task": data.task,
            "input_shape": list(data.input_shape),
            "output_size": data.output_size,
            "split_notes": data.split_notes,
            "notes": self._notes(),
            "preprocessor": data.preprocessor.to_json(),
            "split": self.run.config.split,
        }
        if self.layout is not None:
            facts["layout"] = self.layout.to_json()
        if self.choice.record is not None:
            facts["net_choice"] = self.choice.record
        facts |= self.splits[None].to_json()
        facts["splits"] = {
            str(number): split.to_json()
            for number, split in self.splits.items()
            if number is not None
        }
        return facts

    def _notes(self) -> list[str]:
        """Return the notes about the data, and about the network where one was chosen."""
        if not self.is_new:
            notes: list[str] = self.run.facts().get("notes", [])
            return notes
        notes = list(self.data.notes)
        if self.layout is not None:
            notes.append(f"Columns of the network {self.net}: {self.layout.describe()}.")
        if self.choice.note:
            notes.append(self.choice.note)
        return notes

    def start(self, note: Callable[[str], None] | None) -> None:
        """Write the settings and the facts, and tell the notes and the scores of the baselines.

        Args:
            note: is called with each note about the data of a new run.
        """
        write_json(self.run.folder / "config.json", self.run.config.to_json())
        if self.is_new:
            self.run.save_reference(self.data)
        write_json(self.run.folder / "data.json", self.facts())
        if note is not None and self.is_new:
            for text in (*self._notes(), *self.data.split_notes[1:]):
                note(text)
        for number, split in self.splits.items():
            for name, evaluation in split.baseline_scores.items():
                self.tell(f"{name}{split_suffix(number)}", "baseline", evaluation["metrics"])

    def work(
        self,
        announce: Callable[[str], None] | None,
        executor: Executor | None,
    ) -> list[dict[str, Any]]:
        """Fit and evaluate the jobs that are left, here or in workers, and return all results.

        Args:
            announce: is called with a sentence about the time of the run before the first fit.
            executor: its workers do the jobs; None for this process.

        Raises:
            Interrupted: Ctrl-C; finished jobs are in the folder.
        """
        jobs = self._jobs_in_order()
        jobs_left = [job for job in jobs if self.run.result(job) is None]
        for job in jobs_left:
            _refuse_links(self.run.job_folder(job))
        if announce is not None and jobs_left:
            announce(self._describe_duration([job.method for job in jobs_left]))
        futures: dict[Job, PendingResult] = {}
        if executor is not None:
            futures = {job: self.run.submit(executor, job, self.net) for job in jobs_left}
        try:
            for job in jobs:
                self._finish(job, futures.get(job))
        except KeyboardInterrupt:
            raise Interrupted from None
        finally:
            for future in futures.values():
                future.cancel()
            results = self.run.write_summary()
        return results

    def _jobs_in_order(self) -> list[Job]:
        """Return the jobs by split, MAP first, which the other methods are compared with."""
        splits = self.run.splits
        return sorted(
            self.run.jobs,
            key=lambda job: (splits.index(job.split), job.method != "map"),
        )

    def _describe_duration(self, methods: list[str]) -> str:
        """Return a sentence about the time of these fits, estimated by a few steps."""
        from bayou.app.runs.duration import (
            describe_duration,
            estimate_seconds,
            search_rows,
            step_seconds,
        )

        run = self.run
        data = self.data
        job = run.jobs[0]
        net = run.build_net(data.input_shape, data.output_size, self.net, job, self.layout)
        likelihood = run.likelihood(data).bind().to(run.device)
        x, y = (tensor.to(run.device) for tensor in data.train)
        batch_rows = min(run.config.batch_size, data.n)
        batch_seconds = step_seconds(net, likelihood, x[:batch_rows], y[:batch_rows])
        rows = search_rows(data.n)
        search_seconds = step_seconds(net, likelihood, x[:rows], y[:rows])
        seconds = estimate_seconds(methods, run.config, data.n, (batch_seconds, search_seconds))
        return describe_duration(methods, seconds, data.n)

    def _finish(self, job: Job, future: PendingResult | None) -> None:
        """Fit and evaluate a job unless it has a result; record its failure.

        Args:
            job: the job.
            future: of the worker that does it; None if it is to be done here.
        """
        if future is not None or self.run.result(job) is None:
            try:
                self.tell(job.name, "fitting", {})
                if future is None or not wait_for(future):
                    split = self.splits[job.split]
                    fit_job(
                        self.run, job, split.data, split.baselines, self.net, self.tell, self.show
                    )
            except (ValueError, FloatingPointError, RuntimeError) as error:
                message = f"{type(error).__name__}: {error}"
                write_json(self.run.job_folder(job) / "error.json", {"error": message})
                self.tell(job.name, "failed", {"error": str(error)})
                return
            self.run.write_summary()
        result = self.run.result(job)
        if result is None:
            raise RunError(f"{job.name} ended without a result in {self.run.folder}")
        self.tell(job.name, "done", self._summary(job, result))

    def _summary(self, job: Job, result: dict[str, Any]) -> dict[str, Any]:
        """Return the numbers of a finished job: its scores, flags and time."""
        numbers = {
            "seconds": result["seconds"],
            "flags": [check for check in result.get("checks", []) if check["status"] != "ok"],
            "difference_from_map": self._difference_from_map(job, result),
        }
        mixing = result.get("mixing", {})
        numbers |= {name: mixing[name] for name in mixing if name in MIXING_NUMBERS}
        return result["metrics"] | numbers

    def _difference_from_map(self, job: Job, result: dict[str, Any]) -> Average | None:
        """Return the NLL of a job minus that of MAP with its seed and split; None without MAP."""
        from bayou.app.report.results import Results

        map_result = self.run.result(replace(job, method="map"))
        if map_result is None:
            return None
        return Results([result, map_result], {}, {}).difference(result["label"])


def fit_job(
    run: Run,
    job: Job,
    data: DataSet,
    baselines: dict[str, Baseline],
    net: str,
    tell: TellEvent,
    show: Show,
) -> None:
    """Fit and evaluate a job, and save its posterior and its result.

    Args:
        run: the run folder.
        job: the method and its seed.
        data: the rows of the job's split.
        baselines: fitted to the same training rows.
        net: the name of the network.
        tell: is called before the evaluation.
        show: the progress of the fit.

    Raises:
        KeyboardInterrupt: the fit was interrupted; its checkpoint remains.
    """
    folder = run.job_folder(job)
    folder.mkdir(exist_ok=True)
    (folder / "error.json").unlink(missing_ok=True)
    started = time.monotonic()
    posterior = _fit_posterior(run, job, data, net, show)
    fit_seconds = time.monotonic() - started
    raise_if_interrupted(posterior)
    posterior.save(folder / "posterior.bayou")
    tell(job.name, "judging", {})

    from bayou.app.report.judge import judge

    started = time.monotonic()
    evaluation = judge(
        posterior, data, samples=run.config.samples, seed=job.seed, baselines=baselines
    )
    result = {
        "method": job.method,
        "label": find(job.method).label,
        "seed": job.seed,
        "split": run.split_number(job),
        "task": data.task,
        "seconds": round(fit_seconds, 2),
        "history": posterior.history,
        "seconds_to_evaluate": round(time.monotonic() - started, 2),
        "choice": posterior.choice,
        "plan": posterior.plan,
        "selection": list(posterior.selection),
    }
    write_json(folder / "result.json", result | evaluation)


def _fit_posterior(run: Run, job: Job, data: DataSet, net: str, show: Show) -> Posterior:
    """Fit the method of a job to the training rows."""
    from bayou.inference.method import Method
    from bayou.select.recipes import Standardized

    config = run.config
    compiles = config.compile
    if compiles is None:
        compiles = run.device.type == "cuda"
    method = find(job.method).make(replace(config, compile=compiles))
    likelihood: Likelihood | str | None = run.config.likelihood
    if run.fits_in_units(data):
        likelihood = run.likelihood(data)
    elif isinstance(method, Method):
        method = Standardized(method)
    layout = nets.layout_for(net, data.train[0])
    return bayou.fit(
        run.build_net(data.input_shape, data.output_size, net, job, layout),
        (data.train[0].to(run.device), data.train[1].to(run.device)),
        method=method,
        likelihood=likelihood,
        prior=run.prior(),
        groups=data.groups,
        times=data.times,
        seed=job.seed,
        checkpoint=run.job_folder(job) / "checkpoint",
        progress=show,
    )


def _prepare_split(run: Run, data: DataSet, sha256: str) -> PreparedSplit:
    """Fit and evaluate the baselines of a split."""
    from bayou.app.report.judge import judge_baselines

    baselines = run.baselines(data)
    return PreparedSplit(data, sha256, baselines, judge_baselines(baselines, data))


def _ignore_event(name: str, event: str, numbers: dict[str, Any]) -> None:
    """Do nothing with an event of a job."""


def _refuse_links(folder: Path) -> None:
    """Raise a RunError if a fit in a folder would write through a symbolic link."""
    for path in (folder, *folder.rglob("*")):
        if path.is_symlink():
            raise RunError(
                f"{path} is a symbolic link to {os.readlink(path)}; a fit would write through it: "
                "remove the link, or choose another --out"
            )


def _test_targets(data: DataSet) -> list[float]:
    """Return y of the test rows in original units, to 6 digits.

    Two runs with the same ones can be compared row by row.
    """
    y = data.test[1].double().flatten() * data.y_scale + data.y_mean
    return [float(f"{value:.6g}") for value in y.tolist()]
