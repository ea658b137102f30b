"""A flow over all weights, fitted to the draws of a posterior."""

from __future__ import annotations

import copy
from glob import escape
from typing import Any

import torch
from torch import Tensor, nn

from bayou import flows, rng
from bayou.flows import Chain, Continuous, Flow
from bayou.guides import Delta, JointFlow
from bayou.guides.bayesian import Bayesian
from bayou.guides.joint import JointFlowGuide
from bayou.params import Params
from bayou.posteriors import Guided, Posterior
from bayou.posteriors.posterior import NOISE
from bayou.progress import Show
from bayou.training.seeds import as_int_seed, part_seed

DEFAULT_DRAWS = 4000  # of a posterior that is not a list of points


def to_flow(
    posterior: Posterior,
    family: JointFlow | None = None,
    *,
    samples: int | None = None,
    matching: bool | None = None,
    steps: int = 2000,
    lr: float = 2e-3,
    batch_size: int = 256,
    seed: int = 0,
    progress: Show = True,
) -> Guided:
    """A flow over all weights fitted to the draws of a posterior (HMC, SGHMC, an ensemble), for new draws and files.

    w = μ + σ ⊙ A·T(ε): μ, σ and the triangular A are the mean, the scales and the (shrunk) correlations of the draws;
    the flow T learns the rest, by flow matching if it is continuous in time (Lipman et al. 2023; the default,
    ``JointFlow("continuous")``), else by maximum likelihood. ``JointFlow(None)``: only the Gaussian.

    ``samples``: how many draws to learn from, by default all points of a chain, or 4,000. Frozen tensors stay points;
    so do parameters of the likelihood (a noise that was drawn too), at their mean. The result is
    a variational posterior, with ``log_prob`` and an ELBO. Draws of a chain are correlated, so its held-out draws
    have an optimistic score.

    Args:
        family: ``JointFlow("continuous")`` by default.
        matching: flow matching or maximum likelihood; None is the one above.
        steps: of the optimizer.
        lr: its learning rate.
        batch_size: draws in a step.
        seed: of draws and batches.
        progress: whether to show progress, or a function that is called with it.
    """
    family = JointFlow("continuous") if family is None else family
    if not isinstance(family, JointFlow):
        raise ValueError(f"to_flow fits a JointFlow, a joint density of all weights, got {family!r}")
    if not isinstance(posterior, Posterior):
        raise ValueError(f"to_flow needs a posterior, got {type(posterior).__name__}; fit one first")
    seed = as_int_seed(seed)
    draws = None if samples is not None else posterior.stack
    if draws is None:
        draws = posterior.sample(samples or DEFAULT_DRAWS, seed=rng.fold(seed, "draws"))
    target, net = posterior.target.copy(), posterior.target.net
    names = [name for name, _ in net.named_parameters()]
    others = [name for name in draws if name not in names and not name.startswith(NOISE)]
    if others:
        raise ValueError(f"draws have {', '.join(others)} besides weights, which a flow over weights cannot draw")
    still = {name for name in names if (draws[name] == draws[name][:1]).all()}
    count = len(draws[names[0]])
    if len(still) == len(names):
        raise ValueError(f"all {count} draws are one point; to_flow needs the draws of a chain or of an ensemble")
    with torch.no_grad():
        for name, value in target.likelihood.named_parameters():
            if NOISE + name in draws:
                value.copy_(draws[NOISE + name].mean(0))
    rules = {escape(name): Delta() for name in still} | {"*": family}
    with rng.isolated(part_seed(seed, "start"), next(net.parameters()).device):
        bayesian = Bayesian(_placed(net, {name: draws[name][0] for name in still}), rules, target.prior)
    made = Guided(target, bayesian.eval())
    guide = next(guide for guide in bayesian.guides if isinstance(guide, JointFlowGuide))
    rest = whiten(guide, guide.join(draws))
    inner = list(guide.transform.transforms)[:-1] if isinstance(guide.transform, Chain) else []
    if inner:
        flow = Flow(guide.base, inner[0] if len(inner) == 1 else Chain(*inner))
        found = flows.fit(
            flow, rest, matching=isinstance(flow.transform, Continuous) if matching is None else matching,
            steps=steps, lr=lr, batch_size=batch_size, seed=seed, progress=progress,
        )  # fmt: skip
        made.stopped = found.stopped
        made.history = [{"step": row.step - 1, "loss": row.loss, "validation": row.score} for row in found.history]
    return made


def _placed(net: nn.Module, values: Params) -> nn.Module:
    """A copy of the network with these values of some tensors."""
    net = copy.deepcopy(net)
    with torch.no_grad():
        for name, parameter in net.named_parameters():
            if name in values:
                parameter.copy_(values[name])
    return net


@torch.no_grad()
def whiten(guide: JointFlowGuide, w: Tensor) -> Tensor:
    """Set the mean μ, the scales σ and the correlations A·Aᵀ of a guide to those of draws w (n, D).

    Returns A⁻¹·(w − μ)/σ. Correlations are shrunk towards 0 by Σ Var r_ij / Σ r_ij², so that A also exists for few
    draws of many weights (Schäfer & Strimmer 2005).
    """
    n, dim = w.shape
    mean, std = w.mean(0), w.std(0).clamp_min(torch.finfo(w.dtype).tiny)
    x = ((w - mean) / std).double()
    r = x.T @ x / (n - 1)
    spread = ((x.square().T @ x.square()) / n - ((n - 1) / n * r).square()) * n**2 / (n - 1) ** 3
    off = ~torch.eye(dim, dtype=torch.bool, device=w.device)
    shrink = (spread[off].sum() / r[off].square().sum().clamp_min(1e-300)).clamp(0.0, 1.0) if dim > 1 else 0.0
    factor = torch.linalg.cholesky(torch.where(off, (1 - shrink) * r, 1.0))  # A
    linear: Any = guide.transform.transforms[-1] if isinstance(guide.transform, Chain) else guide.transform
    guide.center.copy_(mean)
    guide.log_std.copy_(std.log())
    linear.weight.lower.copy_(factor / factor.diagonal())
    linear.weight.upper.zero_()
    linear.weight.log_diagonal.copy_(factor.diagonal().log())
    linear.shift.zero_()
    return torch.linalg.solve_triangular(factor, x.T, upper=False).T.to(w)
