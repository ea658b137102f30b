"""``check``: measure every property of the contract of a map, in float64."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable, Collection, Mapping

import torch
from torch import Tensor

from bayou import rng
from bayou.flows.checking.case import Case
from bayou.flows.checking.properties import PROPERTIES
from bayou.flows.checking.report import Report, Result
from bayou.flows.core.bases import Base
from bayou.flows.core.transform import Map

CHECKS: tuple[str, ...] = tuple(PROPERTIES)

PERTURB = 0.2  # away from the identity, with root finding still well-conditioned

TOLERANCES: dict[str, float] = {
    "inverse": 1e-10,  # where neither direction iterates
    "inverse iterative": 1e-8,
    "ladj": 1e-9,
    "standard errors": 5.0,  # for a ladj that is compared with draws
    "estimate": 0.05,  # the standard error of 4,096 draws of an estimated ladj, in nats
    "estimate gradient": 0.1,  # and of its gradient, relative
    "density": 1e-3,  # or the error of the grid, if that is larger
    "gradcheck": 1e-5,  # relative, the precision of finite differences
    "gradgradcheck": 1e-6,  # relative, of differences of gradients
    "equal": 1e-10,  # compile, vmap, batch: the same arithmetic in another order
    "equal iterative": 1e-8,
    "float32": 2.0**10 * torch.finfo(torch.float32).eps,
    "bfloat16": 2.0**6 * torch.finfo(torch.bfloat16).eps,
    "tails": 1e-6,
}


def check(
    transform: Map,
    dim: int | tuple[int, ...] | None = None,
    *,
    only: Collection[str] | None = None,
    skip: Collection[str] = (),
    rows: int = 8,
    perturb: float = PERTURB,
    seed: int = 0,
    context: Tensor | None = None,
    compile_backend: str = "inductor",
    tolerances: Mapping[str, float] | None = None,
    fresh: Callable[[], Map] | None = None,
    base: Base | None = None,
) -> Report:
    """Measure every property of the contract on a float64 copy in eval mode; the transform does not
    change.

    Args:
        transform: the map or transform.
        dim: the event of x; sizes that the transform does not determine are 2 by default.
        only, skip: names from ``CHECKS``, by default all.
        rows: the number of random inputs.
        perturb: the standard deviation of Gaussian noise that is added to the parameters of the
            copy, times 1/√fan_in for a matrix. Most flows start at the identity, which hides
            errors. 0 checks the transform as it is.
        context: one context (context_dim,) or one for each row, by default random.
        compile_backend: of ``torch.compile``; "aot_eager" is faster.
        tolerances: entries that replace those of ``TOLERANCES``.
        fresh: builds a new transform of the same architecture, for a stricter state_dict check.
        base: the distribution of x, if it is restricted (positive, ordered, integers); by default
            normal, or uniform on a bounded domain.

    Returns:
        A report with one row per property.
    """
    wanted = _wanted(only, skip)
    if not 0 <= perturb < math.inf:
        raise ValueError(
            f"perturb must be a standard deviation of at least 0, got {perturb}; 0 checks the transform as it is"
        )
    limits = TOLERANCES | dict(tolerances or {})
    if unknown := sorted(limits.keys() - TOLERANCES.keys()):
        raise ValueError(
            f"tolerances has unknown entries {unknown}; choose from {list(TOLERANCES)}"
        )
    event = _event(transform, dim)
    subject = copy.deepcopy(transform).to(torch.float64).eval()
    start = None if base is None else copy.deepcopy(base).to(torch.float64)
    case = Case(subject, event, rows, seed, limits, compile_backend, fresh, context, start)
    results: list[Result] = []
    with (
        rng.isolated(seed, case.like.device),
        warnings.catch_warnings(),
    ):  # a transform may draw in training mode
        # Warnings of other libraries are no failure; those of torch's kernels have the name of the
        # calling module.
        warnings.filterwarnings("ignore", module=r"(?!bayou\b)")
        warnings.filterwarnings("ignore", message=r"(?s).*Triggered internally at")
        moved = perturb > 0 and _perturbed(subject, perturb, seed)
        for name in wanted:
            try:
                for result in PROPERTIES[name](case):
                    results.append(result)
            except Exception as error:  # the other properties are still measured
                note = f"{type(error).__name__}: {error}"
                note = note if len(note) < 2500 else f"{note[:2000]} ... {note[-500:]}"
                results.append(Result(name, False, note=note))
    title = (
        f"{getattr(transform, 'title', type(transform).__name__)} on {'x'.join(map(str, event))}"
    )
    title += f", parameters perturbed by {perturb:g} (seed {seed})" if moved else ""
    return Report(title, tuple(results))


@torch.no_grad()
def _perturbed(transform: Map, scale: float, seed: int) -> bool:
    """Add noise to all trainable parameters, in place; whether there are any."""
    parameters = {
        name: p for name, p in transform.named_parameters() if p.requires_grad and p.numel()
    }
    for name, p in parameters.items():
        fan_in = p[0].numel() if p.ndim > 1 else 1
        p.add_(
            scale
            / math.sqrt(fan_in)
            * rng.normal(1, p.shape, p, rng.fold(seed, "perturb", name))[0]
        )
    return bool(parameters)


def _wanted(only: Collection[str] | None, skip: Collection[str]) -> list[str]:
    for names, what in ((only or (), "only"), (skip, "skip")):
        if isinstance(names, str):
            raise ValueError(
                f"{what} must be a collection of names, got the string {names!r}; pass [{names!r}]"
            )
        unknown = sorted(set(names) - set(CHECKS))
        if unknown:
            raise ValueError(f"{what} has unknown checks {unknown}; choose from {list(CHECKS)}")
    return [name for name in CHECKS if (only is None or name in only) and name not in skip]


def _event(transform: Map, dim: int | tuple[int, ...] | None) -> tuple[int, ...]:
    shape = transform.event_in
    if dim is None:
        return tuple(2 if size is None else size for size in shape)
    sizes = (dim,) if isinstance(dim, int) else tuple(dim)
    # A single number is the size of the leading axis.
    filled = (*sizes, *(2 if size is None else size for size in shape[len(sizes) :]))
    if len(filled) != len(shape) or any(
        want not in (None, got) for got, want in zip(filled, shape, strict=True)
    ):
        raise ValueError(
            f"dim={dim} does not fit {type(transform).__name__} on events {shape}; leave dim out"
        )
    return filled
