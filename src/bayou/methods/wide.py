"""The network of infinite width: exact regression on small tables, its scales by evidence."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, replace
from typing import Any, Final, final

import torch
from torch import Tensor

from bayou.core.params import Params
from bayou.core.progress import Progress
from bayou.core.specs import later_field
from bayou.inference.data_checks import check_first_batch
from bayou.inference.method import BatchedMethod, FitArguments, open_checkpoint
from bayou.inference.rounded_targets import rounding_noise
from bayou.inference.wide_evidence import DISCARDED_DRAWS, WideEvidence
from bayou.likelihoods.continuous import BoundHomoscedastic
from bayou.network import Network, evaluating
from bayou.network.target import Target
from bayou.network.units import units_of, with_units
from bayou.network.wide import (
    UNITS,
    NoiseNetwork,
    PriorScales,
    Units,
    WideNetwork,
    noise_variances,
    solve_rows,
)
from bayou.posteriors import Posterior
from bayou.posteriors.wide import WidePosterior
from bayou.priors import Normal
from bayou.training.checkpoints import Checkpoint
from bayou.training.guards import Interrupt
from bayou.training.inputs import forward_inputs
from bayou.training.ranks import current
from bayou.training.rows import all_rows, some_rows
from bayou.training.seeds import part_seed

MAX_ROWS: Final = 3000  # of which covariances are inverted
PART: Final = 0.8  # of the rows, by which the scales of thresholds are found once
# By so many rows the scales are found. More rows refine them, and know them too well to be drawn.
MAX_SEARCH_ROWS: Final = 500
MAX_DRAWN_COLUMNS: Final = 64  # of more, draws take longer than the search
SCREENING_PASSES: Final = 25  # for each start
REFINING_PASSES: Final = 10  # over all rows, where they are more than those of the search
LOG_STD: Final = 3.0  # of the logs of all scales
# Of standardized y. From a large noise the search may end where no input matters.
START_NOISES: Final = (0.5, 0.1)
# E log z² of a standard normal z, by which the log of a squared residual is below that of its
# variance.
MEAN_LOG_SQUARE: Final = -1.2703628454614782
# Of the mean square, which is added to the squares of residuals: the log of a residual that is 0 by
# chance tells nothing.
MIN_SQUARE: Final = 1e-4
NOISE_UNITS: Final[Units] = "erf"  # bounded far from the rows
NOISE_PASSES: Final = 50  # for the scales of the noise
# Of residuals and the noise fitted to them: those of the first round are of one noise for all rows,
# by which the function is smoothed too much where the noise is small.
NOISE_ROUNDS: Final = 2


@final
@dataclass(frozen=True)
class Wide(BatchedMethod[WidePosterior]):
    r"""A network with one hidden layer in the limit of infinitely many units: exact regression.

        y = f(x) + σ·ε,  f ~ GP(0, K(a, b, s))

    The limit is a Gaussian process (Neal 1996) whose covariance has a closed form, for erf units
    (Williams 1997) and ReLU units (Cho & Saul 2009). Each input i has a prior scale a_i of its
    weights, so that inputs without effect are left out. The scales, the noise and the kind of the
    units are found by the evidence; then the scales are drawn from their posterior by HMC, for up
    to 500 rows of up to 64 columns. With more of either they are the most probable ones; with more
    rows they are found by 500 of them, and refined by all.

    With ``thresholds`` the hidden units also see which thresholds each number is above, between
    quantiles of the training rows, and f may jump there. Each threshold has a prior scale of its
    own, near a scale of its column: the evidence selects the thresholds that matter. So many scales
    are not drawn by HMC: each "draw" is the most probable one for a random part of the rows, four
    fifths and at most 500.

    With ``varied_noise`` the noise depends on x: Var[y | x, f] = σ²·F(x), where log F is such a
    network, too. It is fitted to the logs of squared leave-one-out residuals of a fit with one
    noise for all rows; then the scales are found again, given F of every row (most likely
    heteroscedastic Gaussian process, Kersting et al. 2007). F has no uncertainty.

    Targets of few values, such as ratings, were rounded to steps d: where the noise is learned, its
    variance is σ² + d²/12, so that rows which repeat with their y leave a noise.

    The network of the fit is replaced: only x, y and the noise matter. There is no minibatch:
    time grows as N³, and above 3,000 rows the fit is refused. It is for numbers with Gaussian
    noise; for classes use ``Laplace``.

    Args:
        draws: draws of the prior scales, which predictions average; 1 for the most probable ones.
            Default: 16.
        passes: evaluations of the evidence by which the most probable scales are found. Default:
            100, after 25 of each start.
        units: "erf" (smooth) or "relu" (piecewise linear, grows beyond the data); None (default)
            for those with the larger evidence, or erf with thresholds.
        thresholds: of a column, at most; 0 (default) for none. There is at most one for five rows,
            and all columns together have at most 1,024.
        varied_noise: whether the noise depends on x; False by default.

    Returns:
        ``fit`` returns a ``WidePosterior``.

    Raises:
        ValueError: for more than 3,000 rows, other likelihoods than ``Gaussian``, several inputs,
            a given prior and frozen parameters; with ``varied_noise`` for a noise that is known.

    >>> import bayou, torch
    >>> x = torch.linspace(-1, 1, 20).unsqueeze(1)
    >>> net = torch.nn.Linear(1, 1)
    >>> posterior = bayou.fit(net, (x, x.square()), bayou.methods.Wide(draws=2), progress=False)
    >>> posterior.predict(x).mean.shape
    torch.Size([20, 1])
    """

    draws: int = 16
    passes: int = 100
    units: Units | None = None
    thresholds: int = later_field(0)
    varied_noise: bool = later_field(False)

    def __post_init__(self) -> None:
        self._check(
            ("draws", "passes"),
            lambda value: type(value) is int and value >= 1,
            "a whole number of at least 1",
        )
        self._check(
            ("units",), lambda value: value is None or value in UNITS, "'erf', 'relu' or None"
        )
        self._check(
            ("thresholds",),
            lambda value: type(value) is int and value >= 0,
            "a whole number of at least 0",
        )
        self._check(("varied_noise",), lambda value: isinstance(value, bool), "True or False")
        if self.thresholds and self.varied_noise:
            raise ValueError(
                "Wide has thresholds or a varied noise, not both, got "
                f"thresholds={self.thresholds} and varied_noise=True; omit one of them"
            )

    def check_target(self, target: Target, data: Any) -> None:
        """Raise a ValueError for what has no exact posterior of this kind, or too many rows."""
        likelihood = _gaussian_likelihood(target)
        if self.varied_noise and not any(True for _ in likelihood.parameters()):
            raise ValueError(
                "the noise is known, so that it does not depend on x; use a likelihood with "
                "learn=True, or varied_noise=False"
            )
        if data.n > MAX_ROWS:
            raise ValueError(
                f"wide inverts the covariance of all rows, of which there are {data.n:,}: at most "
                f"{MAX_ROWS:,}; use laplace or ensemble, or give fewer rows"
            )
        if target.prior_given:
            raise ValueError(
                "wide finds its own prior scales and takes no prior; omit prior=, or use laplace"
            )
        if target.frozen:
            raise ValueError(
                f"wide replaces the whole network, and {next(iter(target.frozen))!r} is frozen; "
                "omit where= and unfreeze it, or use laplace"
            )

    def narrowed_to(self, posterior: Posterior) -> Wide:
        """Return this method with the units that a fit to most of the rows has found.

        Args:
            posterior: of that fit.
        """
        if not isinstance(posterior, WidePosterior):
            return self
        return replace(self, units=posterior.wide.units)

    def _fit(self, arguments: FitArguments) -> WidePosterior:
        """Return the posterior of the scales and the functions."""
        current().note_unshared("the evidence of a wide network")
        target = arguments.target
        self.check_target(target, arguments.data)
        _check_rows(target, arguments)
        file = open_checkpoint(arguments.checkpoint, self, target, arguments.data, arguments.seed)
        return _WideFit(self, arguments, file).run()


def _gaussian_likelihood(target: Target) -> BoundHomoscedastic:
    """Return the likelihood, or raise a ValueError unless it is Gaussian noise of one scale.

    Args:
        target: has the likelihood.
    """
    likelihood = target.likelihood
    if not isinstance(likelihood, BoundHomoscedastic) or not likelihood.is_gaussian:
        raise ValueError(
            "wide is for numbers with Gaussian noise, got "
            f"{type(target.likelihood_spec).__name__}; for classes, counts and other noise use "
            "laplace"
        )
    if likelihood.log_scale.numel() > 1 and not likelihood.log_scale.requires_grad:
        raise ValueError(
            f"wide takes one noise for all outputs, got {likelihood.log_scale.numel()}; give their "
            "ratios as units, Gaussian(noise, units=(...)), or use laplace"
        )
    return likelihood


def _check_rows(target: Target, arguments: FitArguments) -> None:
    """Raise a ValueError if network, likelihood and rows do not agree."""
    network = Network(target.net)
    params = target.start()
    with evaluating(network.net):
        check_first_batch(target, arguments.data, lambda *inputs: network.call(params, *inputs))


@final
class _WideFit:
    """A fit: the starts are compared, the best one is followed, and scales are drawn around it.

    Args:
        method: the settings.
        arguments: of the fit.
        file: the checkpoint; None for none.
    """

    def __init__(self, method: Wide, arguments: FitArguments, file: Checkpoint | None) -> None:
        self.method = method
        self.arguments = arguments
        self.file = file
        self.started = time.monotonic()
        self.trials: list[dict[str, Any]] = []
        self.likelihood = _gaussian_likelihood(arguments.target)
        self.learns_noise = any(True for _ in self.likelihood.parameters())
        x, y = all_rows(arguments.data)
        inputs = forward_inputs(x)
        if len(inputs) != 1 or not inputs[0].is_floating_point():
            raise ValueError(
                "wide takes one tensor of real numbers (rows, columns), got "
                f"{', '.join(str(type(item).__name__) for item in inputs)}; use laplace"
            )
        parameter = next(arguments.target.net.parameters())
        self.x = inputs[0].to(parameter.device)
        self.y = y.to(parameter)
        self.dtype = parameter.dtype
        self.wide = self._network("erf")
        if not bool(self.wide.target_spread > 0):
            raise ValueError("y is constant, so that there is nothing to learn; check the target")
        self.kinds = UNITS
        if method.units is not None or method.thresholds:
            self.kinds = (method.units or "erf",)
        self.units = self.kinds[0]
        self.noise: NoiseNetwork | None = None
        # The most probable scales and their draws so far, (1, P) and (S, P).
        self.mode = self._evidence((self.units,), MAX_SEARCH_ROWS).center[None]
        self.points = self.mode

    def _network(self, units: Units) -> WideNetwork:
        """Return the network with the training rows."""
        target_units = self.likelihood.log_units.double().exp()
        thresholds = self.method.thresholds
        wide = WideNetwork(units, self.x, self.y, target_units, self.dtype, thresholds)
        if self.learns_noise:
            wide.rounding = rounding_noise(wide.outputs)
        return wide

    def _evidence(
        self, units: tuple[Units, ...], max_rows: int = MAX_ROWS, part: tuple[int, ...] = ()
    ) -> WideEvidence:
        """Return the evidence of some rows for each kind of units.

        Args:
            units: the kinds.
            max_rows: of which it is the evidence.
            part: a number, for other rows than those of other numbers.
        """
        log_noise = None
        if not self.learns_noise:
            log_noise = float(self.likelihood.log_scale) - float(self.wide.target_spread.log())
        x, y, factors = self._some_rows(self.wide.outputs, max_rows, part)
        return WideEvidence(
            x,
            y,
            LOG_STD,
            units,
            log_noise=log_noise,
            groups=self.wide.groups if self.method.thresholds else None,
            noise_factors=factors,
            rounding=self.wide.rounding,
        )

    def _some_rows(
        self, outputs: Tensor, max_rows: int, part: tuple[int, ...] = ()
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return random rows of x and of outputs, and the factors of their noise.

        Args:
            outputs: standardized, (N, D).
            max_rows: how many rows at most.
            part: a number, for other rows than those of other numbers.
        """
        seed = part_seed(self.arguments.seed, "rows", *part)
        x, chosen = some_rows((self.wide.inputs, outputs), max_rows, seed)
        if self.noise is None:
            return x, chosen, None
        all_factors = self.noise(self.wide.rows).exp()
        _, factors = some_rows((self.wide.inputs, all_factors), max_rows, seed)
        return x, chosen, factors

    def run(self) -> WidePosterior:
        """Return the posterior; after Ctrl-C that of the scales so far."""
        stopped = "finished"
        try:
            with Interrupt():
                self._continue(None if self.file is None else self.file.read())
        except KeyboardInterrupt:
            stopped = "interrupted"
        return self._posterior(stopped)

    def _continue(self, saved: tuple[Params, dict[str, Any]] | None) -> None:
        """Find the scales and draw them, as far as a checkpoint does not have them.

        Args:
            saved: the tensors and the settings of the checkpoint; None for none.
        """
        if saved is not None:
            tensors, config = saved
            self.units = config["units"]
            self.trials = config["trials"]
            self.mode = tensors["mode"].to(self.mode)
            self.points = tensors["points"].to(self.mode)
            if "noise_scales" in tensors:
                self.noise = self._noise_network(tensors["log_squares"], tensors["noise_scales"])
        if self.method.thresholds:
            self._search_parts()
            return
        if saved is None:
            self.units, self.mode = self._search()
            for _ in range(NOISE_ROUNDS if self.method.varied_noise else 0):
                self.noise = self._fit_noise()
                self.mode = self._refine(self.mode)
            self.points = self.mode
            self._save(is_drawn=False)
        if saved is None or not saved[1]["is_drawn"]:
            self.points = self._draw()
            self._save(is_drawn=True)

    def _search_parts(self) -> None:
        """Find the most probable scales of one part of the rows after another."""
        max_rows = min(MAX_SEARCH_ROWS, math.ceil(PART * len(self.x)))
        passes = self.method.passes
        for number in range(len(self.trials), self.method.draws):
            evidence = self._evidence((self.units,), max_rows, (number,))
            title = f"wide network with thresholds, part {number + 1} of the rows"
            with Progress(title, passes, self.arguments.progress) as line:
                point, value = evidence.maximize(passes, report=line.update)
            self.points = point if number == 0 else torch.cat([self.points, point])
            self.mode = self.points[:1]
            log_density = -float(value.nan_to_num(math.inf))
            self.trials.append({"part": number, "log_density": log_density})
            self._save(is_drawn=number + 1 == self.method.draws)

    def _search(self) -> tuple[Units, Tensor]:
        """Return the units with the larger evidence and their most probable scales, (1, P)."""
        candidates = [self._follow(kind) for kind in self.kinds]
        kind, point, _ = max(candidates, key=lambda candidate: candidate[-1])
        if len(self.x) > MAX_SEARCH_ROWS:
            title = "wide network, all rows"
            point = self._maximize(self._evidence((kind,)), REFINING_PASSES, point, title)
        return kind, point

    def _follow(self, kind: Units) -> tuple[Units, Tensor, float]:
        """Return the most probable scales of one kind of units, (1, P), and their log density."""
        point, value = self._climb(
            self._evidence((kind,) * len(START_NOISES), MAX_SEARCH_ROWS),
            self._evidence((kind,), MAX_SEARCH_ROWS),
            self.method.passes,
            f"{kind} units",
        )
        log_density = -float(value.nan_to_num(math.inf))
        self.trials.append({"units": kind, "log_density": log_density})
        return kind, point, log_density

    def _climb(
        self, screening: WideEvidence, evidence: WideEvidence, passes: int, name: str
    ) -> tuple[Tensor, Tensor]:
        """Return the most probable scales from the best of two starts, and −log density there.

        Args:
            screening: the evidence once for each start.
            evidence: the same once.
            passes: evaluations from the best start.
            name: of the network, for the progress.
        """
        noises = torch.tensor(START_NOISES, dtype=torch.float64)
        start = screening.center.repeat(len(noises), 1)
        start[:, -1] = noises.log()
        title = f"wide network, starts of {name}"
        with Progress(title, SCREENING_PASSES, self.arguments.progress) as line:
            points, values = screening.maximize(SCREENING_PASSES, start, line.update)
        best = int(values.nan_to_num(math.inf).argmin())
        title = f"wide network, scales of {name}"
        with Progress(title, passes, self.arguments.progress) as line:
            return evidence.maximize(passes, points[best, None], line.update)

    def _maximize(self, evidence: WideEvidence, passes: int, point: Tensor, title: str) -> Tensor:
        """Return the most probable scales near a point, (1, P)."""
        with Progress(title, passes, self.arguments.progress) as line:
            return evidence.maximize(passes, point, line.update)[0]

    @torch.no_grad()
    def _fit_noise(self) -> NoiseNetwork:
        """Fit a network of infinite width to the logs of squared leave-one-out residuals.

        The squares are multiplied by the share of the noise in the variance of these residuals; the
        rest is that of the function and of the rounding of y.
        """
        scales = PriorScales.from_logs(self._evidence((self.units,)).effective_logs(self.mode[0]))
        factors = None if self.noise is None else self.noise(self.wide.rows).exp()
        root, weights = solve_rows(self.wide, scales, factors)
        precisions = torch.cholesky_inverse(root).diagonal()
        shares = noise_variances(scales, factors) * precisions
        squares = (weights / precisions.unsqueeze(1)).square().mean(1) * shares
        log_squares = (squares + MIN_SQUARE * squares.mean()).log() - MEAN_LOG_SQUARE
        spread = log_squares.std(correction=0).clamp_min(MIN_SQUARE)
        outputs = ((log_squares - log_squares.mean()) / spread).unsqueeze(1)
        x, y, _ = self._some_rows(outputs, MAX_SEARCH_ROWS)
        kinds = (NOISE_UNITS,) * len(START_NOISES)
        screening, evidence = (WideEvidence(x, y, LOG_STD, of) for of in (kinds, kinds[:1]))
        point, _ = self._climb(screening, evidence, NOISE_PASSES, "the noise")
        if len(outputs) > MAX_SEARCH_ROWS:
            everything = WideEvidence(self.wide.inputs, outputs, LOG_STD, kinds[:1])
            title = "wide network, noise of all rows"
            point = self._maximize(everything, REFINING_PASSES, point, title)
        return self._noise_network(log_squares, evidence.effective_logs(point[0]))

    def _noise_network(self, log_squares: Tensor, log_scales: Tensor) -> NoiseNetwork:
        """Return the network of the noise for the training rows."""
        return NoiseNetwork(NOISE_UNITS, self.wide.rows, log_squares, log_scales)

    def _refine(self, point: Tensor) -> Tensor:
        """Return the most probable scales given the factors of the noise, (1, P)."""
        title = "wide network, scales with this noise"
        some = self._evidence((self.units,), MAX_SEARCH_ROWS)
        point = self._maximize(some, NOISE_PASSES, point, title)
        if len(self.x) > MAX_SEARCH_ROWS:
            point = self._maximize(self._evidence((self.units,)), REFINING_PASSES, point, title)
        return point

    def _draw(self) -> Tensor:
        """Return draws of the scales, or their mode where draws are too expensive or not wanted."""
        count, columns = self.wide.rows.shape
        is_cheap = count <= MAX_SEARCH_ROWS and columns <= MAX_DRAWN_COLUMNS
        draws = self.method.draws
        if draws == 1 or not is_cheap:
            return self.mode
        evidence = self._evidence((self.units,))
        seed = part_seed(self.arguments.seed, "scales")
        total = DISCARDED_DRAWS + draws
        with Progress("wide network, draws", total, self.arguments.progress) as line:
            return evidence.draw(self.mode[0], draws, seed, line.update)

    def _save(self, *, is_drawn: bool) -> None:
        """Write what is done to the checkpoint, if there is one."""
        if self.file is not None:
            config = {"units": self.units, "is_drawn": is_drawn, "trials": self.trials}
            tensors = {"mode": self.mode, "points": self.points}
            if self.noise is not None:
                network = self.noise.network
                tensors["noise_scales"] = network.log_scales.detach()
                tensors["log_squares"] = network.targets[:, 0]
            self.file.write(tensors, config)

    def _posterior(self, stopped: str) -> WidePosterior:
        """Return the posterior with these draws of the scales."""
        arguments = self.arguments
        wide = self._network(self.units)
        fit_units = units_of(arguments.target.net)
        if fit_units is not None:
            wide = with_units(wide, fit_units)
        target = Target.build(
            wide, arguments.target.likelihood_spec, Normal(1.0), arguments.target.n
        )
        evidence = self._evidence((self.units,))  # given the noise of each row, where it varies
        # of y, and not of standardized y
        log_scale = float(wide.target_scale.log().mean())
        log_evidence = evidence.log_evidence(self.mode[0]) - self.y.numel() * log_scale
        seconds = time.monotonic() - self.started
        history = [
            {"step": float(self.method.passes), "log_evidence": log_evidence, "seconds": seconds}
        ]
        posterior = WidePosterior(
            target,
            Network(target.net),
            evidence.effective_logs(self.points),
            history,
            log_evidence=log_evidence,
            noise=self.noise,
        )
        posterior.network.net.eval()
        posterior.set_noise()
        posterior.stopped = stopped
        stage = "scales" if self.method.thresholds else "units"
        posterior.selection = [{"stage": stage, "seconds": seconds, "trials": self.trials}]
        return posterior
