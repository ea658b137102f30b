"""Posteriors of laplace-torch, read into posteriors of bayou with the same predictions.

la = laplace.Laplace(net, "classification", hessian_structure="kron")
la.fit(loader)
posterior = bayou.from_laplace(la, net)           # or la.state_dict(), also from a file
posterior.predict(x).mean                         # what la(x) returns
"""

from __future__ import annotations

import glob
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from bayou.core.params import Params
from bayou.curvature.covariance import Covariance, Diagonal, Full
from bayou.curvature.kronecker import Kronecker, key
from bayou.likelihoods import Categorical, Gaussian, Likelihood
from bayou.network import Network
from bayou.network.target import Target
from bayou.posteriors.gaussian import GaussianPosterior, PredictiveKind
from bayou.priors import BoundNormal, DensityPrior, Normal, Prior

Shapes = dict[str, torch.Size]
ENTRIES = (
    "cls_name",
    "mean",
    "H",
    "prior_mean",
    "prior_precision",
    "sigma_noise",
    "n_data",
    "likelihood",
    "temperature",
)
STRUCTURES = {  # by the class of laplace-torch
    "FullLaplace": "full",
    "FullLLLaplace": "full",
    "DiagLaplace": "diagonal",
    "DiagLLLaplace": "diagonal",
    "KronLaplace": "kronecker",
    "KronLLLaplace": "kronecker",
}


@torch.no_grad()
def from_laplace(
    source: object, net: nn.Module, *, predictive: PredictiveKind | None = None
) -> GaussianPosterior:
    """Return the Gaussian posterior of a fitted Laplace approximation of laplace-torch.

    N(w*, (H/(σ²·T) + P₀)⁻¹), with the curvature H, the noise σ, the temperature T and the prior
    precision P₀ of laplace-torch. H may be full, diagonal or Kronecker-factored, of all weights or
    of the last layer; ``damping`` of Kronecker factors is not supported. Nothing of laplace-torch
    is imported, so that a state that was saved elsewhere can be read.

    Args:
        source: a fitted ``Laplace`` object, or its ``state_dict()``.
        net: the network, with the weights at which the approximation was made. It is not changed.
        predictive: which function a draw is (see ``GaussianPosterior``); None (the default) for
            that of laplace-torch: "exact" for numbers, "probit" for classes.

    Returns:
        The posterior. ``predict(x).mean`` is ``la(x)`` for classes, and mean and variance of
        numbers are its two results, the variance with the noise σ². A prior with a mean, or with a
        scale for each weight, is a density that ``save`` cannot write.

    Raises:
        ValueError: for another state, and for a network without these weights.

    Example:
        >>> posterior = bayou.from_laplace(torch.load("la.pt", weights_only=True), net)
        >>> posterior.save("posterior.bayou")
    """
    state = _read_state(source)
    likelihood = _likelihood(state)
    mean = _parameters_of_mean(net, torch.as_tensor(state["mean"]))
    shapes: Shapes = {name: value.shape for name, value in mean.items()}
    like = next(iter(mean.values()))
    precision = _prior_precision(state, shapes, like)
    factor = float(_number(state, "sigma_noise") ** -2 / _number(state, "temperature"))
    structure = STRUCTURES[state["cls_name"]]
    covariance = _covariance(structure, state["H"], factor, precision, shapes)
    prior_mean = torch.as_tensor(state["prior_mean"]).to(like).reshape(-1)
    priors = _priors(shapes, precision, prior_mean)
    target = Target.build(net, likelihood, priors, int(_number(state, "n_data")))
    center = {
        name: value.detach().clone()
        for name, value in target.net.named_parameters()
        if value.requires_grad
    }
    if predictive is None:
        predictive = "exact" if state["likelihood"] == "regression" else "probit"
    posterior = GaussianPosterior(
        target, Network(target.net), center, covariance, predictive=predictive
    )
    posterior.stopped = "finished"
    return posterior


def _read_state(source: object) -> Mapping[str, Any]:
    """Return the state of a Laplace object, or a state; an error for anything else."""
    if getattr(source, "damping", False):
        raise ValueError("damping=True of laplace-torch has no posterior in bayou; fit without it")
    is_subnetwork = "Subnet" in type(source).__name__
    state = source.state_dict() if hasattr(source, "state_dict") and not is_subnetwork else source
    if not isinstance(state, Mapping):
        raise ValueError(
            f"expected a Laplace object of laplace-torch or its state_dict(), got "
            f"{type(source).__name__}"
        )
    missing = [name for name in ENTRIES if name not in state]
    if missing or state["cls_name"] not in STRUCTURES:
        name = state.get("cls_name", type(source).__name__)
        raise ValueError(
            f"{name} of laplace-torch cannot be read: expected {', '.join(STRUCTURES)}"
            + (f", and the state has no {missing[0]}" if missing else "")
        )
    return state


def _number(state: Mapping[str, Any], name: str) -> Tensor:
    """Return a positive number of a state in float64."""
    value = torch.as_tensor(state[name], dtype=torch.float64)
    if value.numel() != 1 or not bool((value > 0).all()):
        raise ValueError(f"the state has {name} = {state[name]!r:.60}, expected a positive number")
    return value.reshape(())


def _likelihood(state: Mapping[str, Any]) -> Likelihood:
    """Return the likelihood of a state."""
    name = str(getattr(state["likelihood"], "value", state["likelihood"]))
    if name == "classification":
        return Categorical()
    if name == "regression":
        return Gaussian(float(_number(state, "sigma_noise")))
    raise ValueError(f"the likelihood must be classification or regression, got {name!r}")


def _parameters_of_mean(net: nn.Module, mean: Tensor) -> Params:
    """Return the consecutive parameters of a network whose values are the mean of a state."""
    parameters = [(name, p.detach()) for name, p in net.named_parameters() if p.requires_grad]
    for first in range(len(parameters)):
        size = 0
        for last in range(first, len(parameters)):
            size += parameters[last][1].numel()
            if size < len(mean):
                continue
            block = parameters[first : last + 1]
            vector = torch.cat([value.reshape(-1) for _, value in block])
            if size == len(mean) and torch.equal(vector, mean.to(vector)):
                return dict(block)
            break
    raise ValueError(
        f"no consecutive parameters of {type(net).__name__} have the {len(mean):,} values of the "
        "mean of this state; load the weights of the fit into the network first"
    )


def _prior_precision(state: Mapping[str, Any], shapes: Shapes, like: Tensor) -> Tensor:
    """Return the prior precision of every weight, (P,), from one for all, per tensor or weight."""
    value = torch.as_tensor(state["prior_precision"]).to(like).reshape(-1)
    sizes = [shape.numel() for shape in shapes.values()]
    if len(value) == 1:
        return value.expand(sum(sizes)).clone()
    if len(value) == len(sizes):
        return value.repeat_interleave(torch.tensor(sizes, device=value.device))
    if len(value) == sum(sizes):
        return value
    raise ValueError(
        f"the state has {len(value)} prior precisions, expected 1, {len(sizes)} (tensors) or "
        f"{sum(sizes)} (weights)"
    )


def _priors(shapes: Shapes, precision: Tensor, prior_mean: Tensor) -> dict[str, Prior]:
    """Return the normal prior of every tensor, with one standard deviation if that is all."""
    size = sum(shape.numel() for shape in shapes.values())
    means = _split(prior_mean.expand(size) if len(prior_mean) == 1 else prior_mean, shapes)
    priors: dict[str, Prior] = {}
    for name, std in _split(precision.rsqrt(), shapes).items():
        first = std.reshape(-1)[0]
        prior: Prior = Normal(float(first))
        if bool((means[name] != 0).any()) or bool((std != first).any()):
            prior = DensityPrior(BoundNormal(shapes[name], means[name], std.log()))
        priors[glob.escape(name)] = prior
    return priors


def _split(vector: Tensor, shapes: Shapes) -> Params:
    """Return a vector of all weights as tensors by name."""
    pieces = vector.split([shape.numel() for shape in shapes.values()])
    return {
        name: piece.reshape(shape)
        for (name, shape), piece in zip(shapes.items(), pieces, strict=True)
    }


def _covariance(
    structure: str, curvature: Any, factor: float, precision: Tensor, shapes: Shapes
) -> Covariance:
    """Return (factor·H + diag(precision))⁻¹ in its structure."""
    if structure == "kronecker":
        return _kronecker(curvature, factor, precision, shapes)
    curvature = torch.as_tensor(curvature).to(precision)
    if structure == "diagonal":
        return Diagonal(shapes, _split((factor * curvature + precision).rsqrt(), shapes))
    matrix = factor * curvature + precision.diag()
    lower, info = torch.linalg.cholesky_ex(matrix.double())
    if int(info) != 0:
        raise ValueError("the posterior precision of this state is not positive definite")
    identity = torch.eye(len(lower), dtype=lower.dtype, device=lower.device)
    root = torch.linalg.solve_triangular(lower, identity, upper=False).mT  # Σ = L⁻ᵀ·L⁻¹
    return Full(shapes, {"root": root.to(precision).contiguous()})


def _kronecker(
    factors: Sequence[Sequence[Tensor]], factor: float, precision: Tensor, shapes: Shapes
) -> Kronecker:
    """Return (factor·G ⊗ A + δ)⁻¹ of every tensor; a bias has the factor G alone."""
    if len(factors) != len(shapes):
        raise ValueError(f"the state has factors of {len(factors)} tensors, got {len(shapes)}")
    tensors: Params = {}
    for (name, delta), pair in zip(_split(precision, shapes).items(), factors, strict=True):
        if not bool((delta == delta.reshape(-1)[0]).all()):
            raise ValueError(f"Kronecker factors need one prior precision for all of {name!r}")
        output_values, output_vectors = torch.linalg.eigh(pair[0].to(delta).double())
        input_values = torch.ones(1, dtype=torch.float64, device=delta.device)
        input_vectors = torch.ones(1, 1, dtype=torch.float64, device=delta.device)
        if len(pair) == 2:
            input_values, input_vectors = torch.linalg.eigh(pair[1].to(delta).double())
        products = torch.outer(output_values.clamp_min(0.0), input_values.clamp_min(0.0))
        std = (factor * products + delta.reshape(-1)[0].double()).rsqrt()
        block = {
            key("root", [name]): torch.ones_like(input_values),
            key("in", [name]): input_vectors.unsqueeze(0),
            key("out", [name]): output_vectors.unsqueeze(0),
            key("std", [name]): std.unsqueeze(0),
        }
        tensors |= {entry: value.to(delta).contiguous() for entry, value in block.items()}
    return Kronecker(shapes, tensors)
