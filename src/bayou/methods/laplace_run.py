"""One run of Laplace: the Gaussian at a mode, with the requested prior and noise."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

import torch
from torch import Tensor

from bayou.core.progress import Progress
from bayou.curvature.evidence import Evidence, Hyper
from bayou.curvature.factor import LowRankCurvature, to_matrix
from bayou.curvature.joint import JointNormal, add_past_curvature
from bayou.curvature.kronecker import KroneckerCurvature
from bayou.curvature.structures import Curvature, DiagonalCurvature, FullCurvature
from bayou.inference.baseline_checks import compare_with_mode
from bayou.inference.curvature_passes import CurvaturePasses, DataPass
from bayou.inference.prior_scale import rescale_priors, select_within_chance
from bayou.likelihoods.discrete import FiniteLikelihood
from bayou.likelihoods.predictive import Predictive
from bayou.network import evaluating
from bayou.network.target import Target
from bayou.posteriors.empirical import Empirical
from bayou.posteriors.gaussian import CLOSED, GaussianPosterior
from bayou.priors import BoundNormal, BoundUnitNormal
from bayou.training.data import Data, Rows
from bayou.training.loop import move
from bayou.training.seeds import part_seed

if TYPE_CHECKING:
    from bayou.methods.laplace import Laplace

CURVATURES: Final[dict[str, type[Curvature]]] = {
    "full": FullCurvature,
    "diagonal": DiagonalCurvature,
    "kronecker": KroneckerCurvature,
}
# candidates for the prior scale, compared on held-out data
SCALES = tuple(10 ** (2 * k / 3) for k in range(-4, 4))
SCALE_DRAWS = 20  # functions that predict for each candidate
BATCH_OF_HELD_OUT_ROWS: Final = 1000  # that are predicted at a time


class LaplaceRun:
    """The Gaussians at a mode, as a function of the prior precisions and the noise.

    Args:
        method: the settings.
        passes: computes the curvature of the data at a point.
        point: the mode.
        learned: the names of the tensors whose prior scale maximizes the evidence.
    """

    def __init__(
        self, method: Laplace, passes: CurvaturePasses, point: Empirical, learned: list[str]
    ) -> None:
        self.method = method
        self.passes = passes
        self.point = point
        self.learned = learned
        self.target: Target = replace(point.target, n=passes.data.n)
        self.params: dict[str, Tensor] = {
            name: point.stack[name][0] for name in point.network.names
        }
        self.like: Tensor = next(iter(self.params.values()))
        self.normal_priors: dict[str, BoundNormal] = {
            name: prior
            for name, prior in self.target.priors.items()
            if isinstance(prior, BoundNormal)
        }
        densities = [coupling.density for coupling in self.target.couplings]
        self.earlier_tasks: list[JointNormal] = [d for d in densities if isinstance(d, JointNormal)]
        self.history: list[dict[str, float]] = list(point.history)
        with evaluating(point.network.net):
            self.data_pass: DataPass = passes.at(point, self.params)
        self.evidence: Evidence = self._evidence()

    def _evidence(self) -> Evidence:
        """Return the evidence as a function of the prior precisions and the noise."""
        wanted = self.passes.plan.wanted
        shapes = {name: value.shape for name, value in self.params.items() if name in wanted}
        precision = {
            name: torch.exp(-2 * self.normal_priors[name].log_scale.detach().double())
            for name in shapes
        }
        tensors = self.data_pass.tensors
        if self.earlier_tasks:
            tensors = to_matrix(tensors)
        for density in self.earlier_tasks:
            precision |= {name: density.base[name].double() for name in density.names}
            tensors = add_past_curvature(shapes, tensors, density)
        curvature = CURVATURES[self.method.structure]
        if "factor" in tensors:
            curvature = LowRankCurvature
        return Evidence(
            curvature(shapes, tensors, precision),
            {name: self.params[name] - self.normal_priors[name].mean for name in shapes},
            self.data_pass.log_likelihood,
            self.data_pass.residual,
            self.target.likelihood.gaussian_noise or 1.0,
            self.data_pass.count,
        )

    def posterior(self, held_out: Data | None) -> GaussianPosterior:
        """Return the Gaussian with the requested prior and noise.

        Args:
            held_out: rows that select the scale of all priors; None without.
        """
        hyper = self._maximize()
        if held_out is not None:
            hyper = self._select_scale(hyper, held_out)
        posterior = self._gaussian(hyper)
        record = self._evidence_record(hyper)
        posterior.log_evidence = record["log_evidence"]
        interrupted = self.data_pass.interrupted
        if not interrupted and self.point.stopped != "interrupted":
            rows = self.passes.data if held_out is None else held_out
            seed = part_seed(self.passes.seed, "draws")
            try:
                record |= compare_with_mode(posterior, rows, learned=held_out is None, seed=seed)
            except KeyboardInterrupt:  # only the comparison is skipped
                interrupted = True
        posterior.history = [*self.history, {"step": self._next_step(), **record}]
        posterior.stopped = self.point.stopped or "finished"
        if interrupted:
            posterior.stopped = "interrupted"
        return posterior

    def _gaussian(self, hyper: Hyper) -> GaussianPosterior:
        """Return the Gaussian for these multipliers; a ValueError if its precision is singular."""
        coldness = 1 / self.method.temperature
        multipliers = {name: coldness * value for name, value in hyper.multipliers.items()}
        covariance = self.evidence.curvature.covariance(
            multipliers, coldness * hyper.scale, self.like
        )
        changes = {
            name: value for name, value in hyper.multipliers.items() if bool((value != 1.0).any())
        }
        return GaussianPosterior(
            rescale_priors(self.target, changes, float(hyper.noise)),
            self.point.network,
            self.params,
            covariance,
            self.history,
            predictive=self.method.predictive,
        )

    def _maximize(self) -> Hyper:
        """Return the prior precisions and the noise of largest evidence, or those of the target."""
        curvature = self.evidence.curvature
        hyper = Hyper.ones(curvature.shapes, self.like)
        groups = self._groups(curvature)
        likelihood = self.target.likelihood
        learns_noise = (
            self.method.prior == "evidence"
            and likelihood.gaussian_noise is not None
            and any(True for _ in likelihood.parameters())
        )
        # an unfinished start may have no maximum
        if self.point.stopped == "interrupted" or not (groups or learns_noise):
            return hyper
        units = {
            name: list(prior.axes.values())
            for name, prior in self.normal_priors.items()
            if name in self.learned and isinstance(prior, BoundUnitNormal)
        }
        return self.evidence.maximize(groups, learns_noise, units=units)

    def _groups(self, curvature: Curvature) -> list[list[str]]:
        """Return groups of tensors whose prior precisions share a learned factor."""
        if self.method.prior == "evidence":
            return [list(curvature.shapes)]
        if self.method.prior is not None:
            return []
        for tie in curvature.ties:
            if 0 < sum(name in self.learned for name in tie) < len(tie):
                raise ValueError(
                    f"{' and '.join(tie)} share a scale in a Kronecker structure, so learn=True "
                    "must be set for both or neither"
                )
        return [tie for tie in curvature.ties if tie[0] in self.learned]

    def _evidence_record(self, hyper: Hyper) -> dict[str, float]:
        """Return the log evidence and its terms, for the history."""
        record = {name: float(value) for name, value in self.evidence.parts(hyper).items()}
        if self.earlier_tasks:  # not a Normal for each tensor
            random = {name: self.params[name] for name in self.evidence.curvature.shapes}
            log_prior = float(self.target.log_prior(random))
            record["log_evidence"] += log_prior - record["log_prior"]
            record["log_prior"] = log_prior
        return record

    def _select_scale(self, hyper: Hyper, held_out: Data) -> Hyper:
        """Select the scale of the prior by held-out data.

        For classes it is the one with the highest evidence among those within chance.
        """
        step = self._next_step()
        scores: list[tuple[Hyper, Tensor]] = []
        log_evidence: list[float] = []
        is_of_classes = isinstance(self.target.likelihood, FiniteLikelihood)
        guess_nll = self.like.new_zeros(0)
        with Progress("prior scales", len(SCALES), self.passes.progress) as progress:
            for number, scale in enumerate(SCALES):
                multipliers = {name: value / scale**2 for name, value in hyper.multipliers.items()}
                candidate = Hyper(multipliers, hyper.noise)
                try:
                    posterior = self._gaussian(candidate)
                except ValueError:  # a prior so wide that the precision is singular
                    continue
                nll, guess_nll = self._held_out_nll(posterior, held_out)
                scores.append((candidate, nll))
                if is_of_classes:  # here the curvature has the decomposition of this candidate
                    log_evidence.append(float(self.evidence.parts(candidate)["log_evidence"]))
                mean = float(nll.mean())
                self.history.append({"step": step, "prior_scale": scale, "validation": mean})
                progress.update(number + 1, nll=mean)
        if not scores:
            self._gaussian(hyper)  # raises the reason
        if is_of_classes:
            index = select_within_chance([nll for _, nll in scores], guess_nll, log_evidence)
            return scores[index][0]
        return min(scores, key=lambda score: float(score[1].mean()))[0]

    def _held_out_nll(self, posterior: GaussianPosterior, held_out: Data) -> tuple[Tensor, Tensor]:
        """Return −log p of all held-out rows, and of zero outputs for them, (M,) each."""
        seed = part_seed(self.passes.seed, "draws")
        samples = None if posterior.predictive in CLOSED else SCALE_DRAWS
        nll = []
        guess_nll = []
        if isinstance(held_out, Rows):  # every batch draws all functions again
            held_out = held_out.with_batch_size(max(held_out.batch_size, BATCH_OF_HELD_OUT_ROWS))
        for batch in held_out.epoch():
            x, y = move(batch, self.like)
            predictive = posterior.predict(x, samples, seed=seed)
            zeros = torch.zeros_like(predictive.outputs[:1])
            guess = Predictive(predictive.likelihood, zeros)
            nll.append(-predictive.log_prob(y).double())
            guess_nll.append(-guess.log_prob(y).double())
        return torch.cat(nll), torch.cat(guess_nll)

    def _next_step(self) -> float:
        """Return the step after the last record."""
        return self.history[-1]["step"] + 1 if self.history else 0.0
