"""Typicality: the distance of a log-density from its expectation, with a flow as the density."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from bayou import flows
from bayou.core import rng
from bayou.core.params import under
from bayou.operations.ood.feature_scores import FeatureScore, TrainingFeatures, UnsupportedScore

MAX_DIMENSIONS = 16  # principal components of the features whose density is learned
MIN_VARIANCE = 1e-8  # of a principal component, relative to the largest
EXPECTATION_SHARE = 0.1  # of the training rows, for the expectation
MIN_ROWS = 50  # of the training rows
STEPS = 1000  # of the flow
HIDDEN = (32, 32)  # widths of its networks
LAYERS = 3  # of the flow


@final
@dataclass(frozen=True, eq=False)
class Typicality(FeatureScore):
    """|log p(v) − E log p(v)| of a flow, v the first principal components of features.

    A point of high density can be as unusual as one of low density (Nalisnick et al. 2019): in many
    dimensions nearly all rows have a log-density close to the expectation. v are up to 16 whitened
    principal components, p is a masked autoregressive flow fitted to 90 % of the training rows, and
    the expectation is the mean over the others.

    Args:
        mean: of the features, (D,).
        projection: to the components, (D, d).
        expectation: E log p(v).
        flow: the density of v.
    """

    name = "typicality"
    mean: Tensor
    projection: Tensor
    expectation: Tensor
    flow: flows.Flow

    @classmethod
    @torch.no_grad()
    def fit(cls, rows: TrainingFeatures) -> Typicality:
        z = rows.values
        if len(z) < MIN_ROWS:
            raise UnsupportedScore(
                f"the score 'typicality' fits a flow to {MIN_ROWS} training rows or more, got "
                f"{len(z)}"
            )
        mean = z.mean(0)
        projection = _principal_components(z - mean)
        order = rng.permutation(len(z), rng.fold(rows.seed, "typicality")).to(z.device)
        components = ((z - mean) @ projection)[order]
        held_out = round(EXPECTATION_SHARE * len(z))
        seed = rng.integer(rng.fold(rows.seed, "flow"))
        with rng.isolated(seed, z.device):
            flow = _build_flow(projection.shape[1]).to(z.device, torch.float64)
        with torch.enable_grad():
            flows.fit(flow, components[held_out:], steps=STEPS, seed=seed, progress=False)
        flow.requires_grad_(False).eval()
        expectation = flow.log_prob(components[:held_out]).mean()
        return cls(mean, projection, expectation, flow)

    def of(self, z: Tensor) -> Tensor:
        log_density = self.flow.log_prob((z - self.mean) @ self.projection)
        return (log_density - self.expectation).abs()

    def state(self) -> dict[str, Tensor]:
        tensors = {f"flow.{name}": value for name, value in self.flow.state_dict().items()}
        tensors["mean"] = self.mean
        tensors["projection"] = self.projection
        tensors["expectation"] = self.expectation
        return tensors

    @classmethod
    def restore(cls, tensors: dict[str, Tensor]) -> Typicality:
        projection = tensors["projection"]
        flow = _build_flow(projection.shape[1]).to(projection.device, torch.float64)
        flow.load_state_dict(under("flow.", tensors))
        flow.requires_grad_(False).eval()
        return cls(tensors["mean"], projection, tensors["expectation"], flow)


def _build_flow(size: int) -> flows.Flow:
    """Return a masked autoregressive flow."""
    transform = flows.maf(size, layers=LAYERS, hidden=HIDDEN)
    return flows.Flow(flows.StandardNormal(size), transform)


def _principal_components(centered: Tensor) -> Tensor:
    """Return the projection to whitened principal components, (D, d)."""
    variances, vectors = torch.linalg.eigh(centered.mT @ centered / len(centered))
    largest = variances[-1]
    count = int((variances > MIN_VARIANCE * largest).sum())
    if not float(largest) > 0:
        raise UnsupportedScore("the features of the training rows do not vary: no 'typicality'")
    count = min(count, MAX_DIMENSIONS)
    variances = variances.flip(0)[:count]
    return vectors.flip(1)[:, :count] / variances.sqrt()
