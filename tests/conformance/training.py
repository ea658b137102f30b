"""Checks of maps that have left their initialization, by a few steps of training."""

import copy
import math

import torch

from bayou.core import rng
from bayou.flows import Cost, Transform
from bayou.flows.checking.case import map_into
from bayou.flows.checking.check import resolve_event
from tests.conformance.flow_properties import check


def check_trained(
    transform,
    dim=None,
    *,
    train_steps=0,
    seed=0,
    **options,
):
    """``check``, of a copy that was trained for some steps instead of perturbed; with 0 steps,
    ``check`` itself.
    """
    if train_steps:
        transform = copy.deepcopy(transform).to(torch.float64).eval()
        with rng.isolated(seed, torch.device("cpu")):  # a transform may draw in training mode
            random_training(transform, resolve_event(transform, dim), train_steps, seed)
        options["perturb"] = 0.0
    return check(transform, dim, seed=seed, **options)


def random_training(
    transform,
    event,
    steps,
    seed=0,
    rows=64,
):
    """A few Adam steps in place, towards a shifted, correlated Gaussian; whether any parameter has
    an effect.

    By reverse KL where the forward direction is analytic, else by maximum likelihood.
    """
    parameters = [p for p in transform.parameters() if p.requires_grad]
    if not parameters:
        return False
    like = parameters[0].detach()
    out = event if isinstance(transform, Transform) else transform.event_out
    size = math.prod(out)
    mean = 0.5 * rng.normal(1, (size,), like, rng.fold(seed, "mean"))[0]
    mixing = (
        torch.eye(size).to(like)
        + 0.4 * rng.normal(size, (size,), like, rng.fold(seed, "mixing")) / size**0.5
    )
    optimizer = torch.optim.Adam(parameters, lr=0.02)
    training = transform.training
    transform.train()
    for step in range(steps):
        context = None
        if transform.context_dim:
            context = rng.normal(
                rows, (transform.context_dim,), like, rng.fold(seed, "context", step)
            )
        analytic = transform.forward_kind is Cost.analytic
        noise = rng.normal(rows, event if analytic else out, like, rng.fold(seed, "noise", step))
        if analytic:
            y, ladj = transform.forward(map_into(noise, transform.domain), context)
            residual = torch.linalg.solve(mixing, (y.reshape(rows, size) - mean).unsqueeze(-1))
            loss = (0.5 * residual.square().sum((-2, -1)) - ladj).mean()
        else:
            y = map_into(
                (noise.reshape(rows, size) @ mixing.T + mean).reshape(noise.shape),
                transform.codomain,
            )
            x, ladj = transform.inverse(y, context)
            loss = (0.5 * x.flatten(1).square().sum(-1) - ladj).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if not loss.isfinite():
            raise ArithmeticError(f"the loss of training step {step} is {loss.item()}")
    transform.train(training)
    gradients = [p.grad for p in parameters if p.grad is not None and p.numel()]
    return any(float(gradient.abs().max()) > 1e-12 for gradient in gradients)  # less is rounding
