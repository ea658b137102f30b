"""Laplace: a Gaussian at the mode of the posterior, with the curvature of the log joint there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, replace
from typing import Any, Final, Literal, Self, final

import torch
from torch import Tensor

from bayou.core.files import StrPath
from bayou.core.params import match
from bayou.core.progress import Progress, Show
from bayou.curvature.evidence import Evidence, Hyper
from bayou.curvature.information import KINDS, Kind
from bayou.curvature.joint import JointNormal, with_past
from bayou.curvature.kronecker import KroneckerCurvature
from bayou.curvature.structures import LIMIT, Curvature, DiagonalCurvature, FullCurvature
from bayou.curvature.sweep import Plan, make_plan
from bayou.inference.baseline_checks import compare_with_mode
from bayou.inference.curvature_passes import CurvaturePasses
from bayou.inference.data_checks import LAST, check_first_batch, first_inputs, last_layer
from bayou.inference.method import Method
from bayou.inference.prior_scale import rescale_priors, select_within_chance
from bayou.inference.start import starting_point
from bayou.likelihoods.discrete import FiniteLikelihood
from bayou.methods.point import MAP
from bayou.network import Network, evaluating
from bayou.posteriors.empirical import Empirical
from bayou.posteriors.gaussian import (
    CLOSED,
    PREDICTIVES,
    GaussianPosterior,
    PredictiveKind,
    check_predictive,
)
from bayou.predictive import Predictive
from bayou.priors import BoundNormal, BoundUnitNormal
from bayou.target import Target
from bayou.training.data import Data, Rows, as_data, last_batches
from bayou.training.inputs import Batch
from bayou.training.loop import move
from bayou.training.ranks import current
from bayou.training.seeds import as_int_seed, part_seed

Structure = Literal["full", "diagonal", "kronecker"]
CURVATURES: Final[dict[str, type[Curvature]]] = {
    "full": FullCurvature,
    "diagonal": DiagonalCurvature,
    "kronecker": KroneckerCurvature,
}
SCALES = tuple(
    10 ** (2 * k / 3) for k in range(-4, 4)
)  # candidates for the prior scale, compared on held-out data
SCALE_DRAWS = 20  # functions that predict for each candidate
MIN_HELD_OUT_ROWS = 10  # for the selection of the prior scale
MAX_HELD_OUT_ROWS = 1000  # if ``validation`` was not given
MAX_EXACT_OUTPUTS = 100  # each costs a backward pass
MIN_ROWS_WITH_START = 20  # the same, if the rows are also withheld from the search for the mode


@final
@dataclass(frozen=True)
class Laplace(Method):
    """q(w) = N(w*, Λ⁻¹), Λ = Σ_n J_nᵀ·H_n·J_n + prior precision, at a mode w* (MacKay 1992,
    Daxberger et al. 2021).

    ``structure`` of Λ: ``"kronecker"`` (layer by layer A ⊗ G, Ritter et al. 2018; diagonal for
    embeddings, and for layers with more than 16,384 inputs or outputs), ``"diagonal"``, or
    ``"full"`` (a few thousand weights).
    ``where``: patterns of the tensors that become random, ``"last"`` for those of the last layer;
    the others stay
    points. ``start``: the method that finds w*; None for the network as given, assumed to be at a
    mode.

    ``curvature``: ``"ggn"`` (H the Fisher information of p(y | f), exact: one backward pass for
    each output), ``"fisher"`` (the empirical one) or ``"sampled"`` (unbiased, with ``samples``
    labels drawn from the network): one backward pass for each label. The default is "ggn", but
    "sampled" for a Kronecker structure, where it costs about a third for ten classes, and for more
    than 100 outputs.

    ``prior``: None takes the target's Normal priors, tensor by tensor, and maximizes the evidence
    over those with ``learn=True`` (by unit too; of a Kronecker structure by input unit).
    ``"evidence"`` maximizes it over one factor for all prior precisions, and over the noise of a
    ``Gaussian(learn=True)``; w* does not follow. ``"validation"``: the factor of a grid that
    predicts a held-out fraction best, for classes the one with the highest evidence among those
    whose NLL is within one standard error of the lowest, which a point often has by chance. This is
    also the meaning of None where no prior was given and either ``start`` is None or the network
    has more weights than data.

    A posterior that predicts worse than its own mode raises a ``WorseThanModeWarning``; its history
    has both NLLs.

    ``predictive``: "linearized", "sampled", "probit" or "exact", see ``GaussianPosterior``.
    ``temperature``: Λ/temperature. ``batch_size``: rows in one pass.
    ``posterior.log_evidence`` = log p(D | w*) + log p(w*) + D/2·log 2π − ½·log |Λ|, over the random
    tensors alone.

    >>> Laplace("diagonal", where="last", start=None).structure
    'diagonal'
    """

    structure: Structure = "kronecker"
    _: KW_ONLY
    where: str | tuple[str, ...] = "*"
    start: Method | None = MAP()  # noqa: RUF009 (frozen)
    curvature: Kind | None = None
    samples: int = 1
    prior: Literal["evidence", "validation"] | None = None
    predictive: PredictiveKind = "linearized"
    temperature: float = 1.0
    validation: float = 0.1
    batch_size: int = 128

    def __post_init__(self) -> None:
        self._check_choice("structure", tuple(CURVATURES))
        self._check_choice("predictive", PREDICTIVES)
        self._check_whole("samples", "batch_size")
        self._check_positive("temperature")
        if self.curvature is not None:
            self._check_choice("curvature", KINDS)
        if self.prior is not None:
            self._check_choice("prior", ("evidence", "validation"))
        patterns = (self.where,) if isinstance(self.where, str) else self.where
        if (
            not isinstance(patterns, tuple)
            or not patterns
            or not all(isinstance(p, str) for p in patterns)
        ):
            raise ValueError(
                f"Laplace where must be a pattern or a tuple of patterns, got {self.where!r}"
            )
        self._check_start()
        if not 0 < self.validation < 1:
            raise ValueError(f"Laplace needs 0 < validation < 1, got {self.validation!r}")

    def kind(self, outputs: int) -> Kind:
        """The curvature for a network with this many outputs."""
        costly = self.structure == "kronecker" or outputs > MAX_EXACT_OUTPUTS
        return self.curvature or ("sampled" if costly else "ggn")

    @property
    def without_density(self) -> str | None:
        return None if self.where == "*" else f"Laplace(where={self.where!r})"

    def at_mode(self, noise: float, data: Data) -> Self:
        return replace(self, start=None, prior=None)

    def fit(
        self,
        target: Target,
        data: Any,
        *,
        seed: int = 0,
        checkpoint: StrPath | None = None,
        progress: Show = True,
    ) -> GaussianPosterior:
        """The Gaussian at the mode. ``checkpoint``.start is the file of the run that finds it, if
        any.
        """
        current().note_unshared("the curvature of Laplace")
        seed = as_int_seed(seed)
        batches, held = self._split(target, as_data(data, self.batch_size), seed)
        target = replace(target, n=batches.n)
        check_predictive(self.predictive, target.likelihood)
        plan, check = self._look(target, batches)
        learned = [
            name for name in plan.wanted if any(True for _ in target.priors[name].parameters())
        ]
        target = rescale_priors(
            target, dict.fromkeys(learned, 1.0)
        )  # learned by the evidence, not by the start
        point = starting_point(
            self.start, target, batches, seed=seed, checkpoint=checkpoint, progress=progress
        )
        run = Run(self, CurvaturePasses(self, plan, batches, check, seed, progress))
        return run.posterior(point, learned, held)

    def _split(self, target: Target, data: Data, seed: int) -> tuple[Data, Data | None]:
        """Training data, and held-out data for the selection of the prior scale, if needed."""
        fraction, place = self.validation, part_seed(seed, "validation")
        if self.prior == "validation":
            if not isinstance(data, Rows):
                raise ValueError(
                    "a validation split needs tensors or a Dataset; split a DataLoader's data yourself"
                )
            return data.split(fraction, place)
        given = target.prior_given or getattr(self.start, "l2", None) is not None
        guessed = (
            self.start is None or sum(value.numel() for value in target.start().values()) > data.n
        )
        least = MIN_ROWS_WITH_START if self.start else MIN_HELD_OUT_ROWS
        if self.prior is not None or given or not guessed or data.n * fraction < least:
            return data, None
        if isinstance(data, Rows):
            return data.split(min(fraction, MAX_HELD_OUT_ROWS / data.n), place)
        return last_batches(data, fraction) if self.start is None else (data, None)

    def _look(self, target: Target, data: Data) -> tuple[Plan, Callable[[Batch], None] | None]:
        """Check the network and its priors before any work."""
        network, params = Network(target.net), target.start()
        if not target.free:
            raise ValueError(
                "every parameter of the network is frozen (requires_grad=False): nothing to learn"
            )
        with evaluating(network.net):
            check = check_first_batch(target, data, lambda *inputs: network.call(params, *inputs))
            names = last_layer(target, data) if self.where == LAST else self._names(target)
            plan = make_plan(network.call, params, names, first_inputs(target, data))
        for name in plan.wanted:
            if not isinstance(target.priors[name], BoundNormal):
                kind = type(target.priors[name]).__name__
                raise ValueError(
                    f"Laplace needs Normal priors, and the prior of {name!r} is a {kind}: "
                    "its curvature is not constant and may be negative; use prior=Normal(...), or VI"
                )
        self._check_joint(target, plan)
        learned = target.learned_priors
        idle = [name for name in learned if name not in plan.wanted]
        if idle:
            raise ValueError(
                f"{idle[0]!r} is a point here (where={self.where!r}), so the scale of its prior cannot be learned; "
                "give it learn=False"
            )
        by_output = [name for name in learned if "out" in getattr(target.priors[name], "axes", ())]
        if by_output and self.structure == "kronecker":
            raise ValueError(
                f"a Kronecker-factored posterior has one prior scale for all of {by_output[0]!r}, or one for each of "
                "its inputs, so it cannot learn one by output unit; use learn='in' or learn=True, or "
                "structure='diagonal' or 'full'"
            )
        size = sum(params[name].numel() for name in plan.wanted)
        if self.structure == "full" and size > LIMIT:
            raise ValueError(
                f"a full covariance over {size:,} weights has {size**2:,} entries; at most {LIMIT:,} weights: use "
                "structure='kronecker', or where='last' for the last layer"
            )
        return plan, check

    def _check_joint(self, target: Target, plan: Plan) -> None:
        """A joint prior of several tensors must come from this Laplace on earlier tasks."""
        for coupling in target.couplings:
            density = coupling.density
            kind = (
                density.covariance.kind
                if isinstance(density, JointNormal)
                else type(density).__name__
            )
            known = isinstance(density, JointNormal) and all(
                name in density.base for name in coupling.parts
            )
            if kind != self.structure or self.structure not in ("full", "kronecker") or not known:
                raise ValueError(
                    f"Laplace({self.structure!r}) cannot continue from a joint prior of kind {kind!r}: use the "
                    "structure of the earlier tasks, 'full', 'kronecker' or 'diagonal', or VI"
                )
            if self.prior is not None:
                raise ValueError(
                    f"the prior of earlier tasks has no scale to learn: use prior=None, got {self.prior!r}"
                )
            if points := [name for name in coupling.parts if name not in plan.wanted]:
                raise ValueError(
                    f"where={self.where!r} excludes {points[0]!r}, which has a joint prior with others; include it"
                )

    def _names(self, target: Target) -> list[str]:
        patterns = (self.where,) if isinstance(self.where, str) else self.where
        chosen = match(target.free, dict.fromkeys(patterns, True), default=False)
        return [name for name, wanted in chosen.items() if wanted]


@dataclass(frozen=True)
class Run:
    """One fit, for a planned network and its data; ``posterior`` makes the Gaussian at any
    point.
    """

    method: Laplace
    passes: CurvaturePasses

    def posterior(
        self, point: Empirical, learned: list[str], held: Data | None
    ) -> GaussianPosterior:
        """The Gaussian at a point, with the requested prior and noise."""
        method, target = self.method, replace(point.target, n=self.passes.data.n)
        params = {name: point.stack[name][0] for name in point.network.names}
        shapes = {name: params[name].shape for name in params if name in self.passes.plan.wanted}
        priors = {
            name: prior for name, prior in target.priors.items() if isinstance(prior, BoundNormal)
        }
        precision = {
            name: torch.exp(-2 * priors[name].log_scale.detach().double()) for name in shapes
        }
        joint = [coupling.density for coupling in target.couplings]
        past = [density for density in joint if isinstance(density, JointNormal)]
        for density in past:
            precision |= {name: density.base[name].double() for name in density.names}
        with evaluating(point.network.net):
            found = self.passes.at(point, params)
        tensors = found.tensors
        for density in past:
            tensors = with_past(shapes, tensors, density)
        curvature = CURVATURES[method.structure](shapes, tensors, precision)
        likelihood = target.likelihood
        evidence = Evidence(
            curvature,
            {name: params[name] - priors[name].mean for name in shapes},
            found.log_likelihood, found.residual, likelihood.gaussian_noise or 1.0, found.count,
        )  # fmt: skip
        hyper = Hyper.ones(shapes, next(iter(params.values())))
        groups = self._groups(curvature, learned)
        learnable = likelihood.gaussian_noise is not None and any(
            True for _ in likelihood.parameters()
        )
        noise = method.prior == "evidence" and learnable
        if (
            groups or noise
        ) and point.stopped != "interrupted":  # an unfinished start may have no maximum
            units = {
                n: list(p.axes.values())
                for n, p in priors.items()
                if n in learned and isinstance(p, BoundUnitNormal)
            }
            hyper = evidence.maximize(groups, noise, units=units)
        history = list(point.history)

        def made(hyper: Hyper) -> GaussianPosterior:
            cold, like = 1 / method.temperature, next(iter(params.values()))
            covariance = curvature.covariance(
                {name: cold * value for name, value in hyper.multipliers.items()},
                cold * hyper.scale,
                like,
            )
            changed = {
                name: value
                for name, value in hyper.multipliers.items()
                if bool((value != 1.0).any())
            }
            quieter = rescale_priors(target, changed, float(hyper.noise))
            return GaussianPosterior(
                quieter, point.network, params, covariance, history, predictive=method.predictive
            )

        if held is not None:
            hyper = self._validated(made, hyper, evidence, held, history)
        posterior = made(hyper)
        parts = {name: float(value) for name, value in evidence.parts(hyper).items()}
        if past:  # a joint density of several tensors, not a Normal for each
            log_prior = float(target.log_prior({name: params[name] for name in shapes}))
            parts["log_evidence"] += log_prior - parts["log_prior"]
            parts["log_prior"] = log_prior
        posterior.log_evidence = parts["log_evidence"]
        interrupted = found.interrupted
        if not interrupted and point.stopped != "interrupted":
            rows, seed = (
                self.passes.data if held is None else held,
                part_seed(self.passes.seed, "draws"),
            )
            try:
                parts |= compare_with_mode(posterior, rows, learned=held is None, seed=seed)
            except KeyboardInterrupt:  # only the comparison is skipped
                interrupted = True
        posterior.history = [*history, {"step": _steps(history), **parts}]
        posterior.stopped = "interrupted" if interrupted else point.stopped or "finished"
        return posterior

    def _groups(self, curvature: Curvature, learned: list[str]) -> list[list[str]]:
        """Tensors whose prior precisions share a learned factor."""
        if self.method.prior == "evidence":
            return [list(curvature.shapes)]
        mixed = [
            tie for tie in curvature.ties if 0 < sum(name in learned for name in tie) < len(tie)
        ]
        if mixed and self.method.prior is None:
            raise ValueError(
                f"{' and '.join(mixed[0])} share a scale in a Kronecker structure, so learn=True must be set for both "
                "or neither"
            )
        return (
            [tie for tie in curvature.ties if tie[0] in learned]
            if self.method.prior is None
            else []
        )

    def _validated(
        self,
        made: Callable[[Hyper], GaussianPosterior],
        hyper: Hyper,
        evidence: Evidence,
        held: Data,
        history: list[dict[str, float]],
    ) -> Hyper:
        """Select a scale of the prior by held-out data, and for classes by the evidence among those
        within chance.
        """
        like = next(iter(hyper.multipliers.values()))
        step = _steps(history)
        scores: list[tuple[Hyper, Tensor]] = []
        guess = like.new_zeros(0)
        with Progress("prior scales", len(SCALES), self.passes.progress) as progress:
            for done, scale in enumerate(SCALES):
                tried = Hyper(
                    {name: value / scale**2 for name, value in hyper.multipliers.items()},
                    hyper.noise,
                )
                try:
                    posterior = made(tried)
                except ValueError:  # a prior so wide that the precision is singular
                    continue
                nll, guess = self._held_out_nll(posterior, held, like)
                scores.append((tried, nll))
                mean = float(nll.mean())
                history.append({"step": step, "prior_scale": scale, "validation": mean})
                progress.update(done + 1, nll=mean)
        if not scores:
            made(hyper)  # raises the reason
        if isinstance(posterior.target.likelihood, FiniteLikelihood):
            log_evidence = [float(evidence.parts(tried)["log_evidence"]) for tried, _ in scores]
            return scores[select_within_chance([nll for _, nll in scores], guess, log_evidence)][0]
        return min(scores, key=lambda score: float(score[1].mean()))[0]

    def _held_out_nll(
        self, posterior: GaussianPosterior, held: Data, like: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return −log p of all held-out rows, and the same for outputs that are all zero, (M,)
        each.
        """
        seed = part_seed(self.passes.seed, "draws")
        samples = None if posterior.predictive in CLOSED else SCALE_DRAWS
        nll = []
        guess = []
        for raw in held.ordered():
            x, y = move(raw, like)
            predictive = posterior.predict(x, samples, seed=seed)
            zeros = torch.zeros_like(predictive.outputs[:1])
            nll.append(-predictive.log_prob(y).double())
            guess.append(-Predictive(predictive.likelihood, zeros).log_prob(y).double())
        return torch.cat(nll), torch.cat(guess)


def _steps(history: list[dict[str, float]]) -> float:
    return history[-1]["step"] + 1 if history else 0.0
