"""``check``: measure the properties of a map, in float64."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Collection, Mapping

import torch
from torch import Tensor

from bayou.core import rng
from bayou.flows.checking.case import Case
from bayou.flows.checking.properties import PROPERTIES, Property
from bayou.flows.checking.report import Report, Result
from bayou.flows.core.bases import Base
from bayou.flows.core.transform import Map

# The standard deviation of changes of parameters: away from the identity, with root finding still
# well-conditioned.
PERTURB = 0.2

TOLERANCES: dict[str, float] = {
    "inverse": 1e-10,  # where neither direction iterates
    "inverse iterative": 1e-8,
    "ladj": 1e-9,
    "standard errors": 5.0,  # for a ladj that is compared with draws
    "estimate": 0.05,  # the standard error of 4,096 draws of an estimated ladj, in nats
    "estimate gradient": 0.1,  # and of its gradient, relative
    "density": 1e-3,  # or the error of the grid, if that is larger
    "gradcheck": 1e-5,  # relative, the precision of finite differences
    "equal": 1e-10,  # the same arithmetic in another order
    "equal iterative": 1e-8,
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
    tolerances: Mapping[str, float] | None = None,
    base: Base | None = None,
) -> Report:
    """Measure whether a map computes what it states, on a float64 copy in eval mode.

    The map itself does not change. The properties are: f⁻¹(f(x)) = x; ladj = log|det ∂y/∂x|; the
    density integrates to 1; gradients agree with finite differences; far from the origin results
    are finite and inverted; rows of a batch are independent.

    Args:
        transform: the map or transform.
        dim: the shape of an event of x, or its leading axis; sizes that the transform does not
            determine are 2 by default.
        only: the names of the properties to measure, of "inverse", "ladj", "density", "gradcheck",
            "tails" and "batch"; by default all.
        skip: the names of properties to leave out; none by default.
        rows: the number of random inputs; 8 by default.
        perturb: the standard deviation of Gaussian noise that is added to the parameters of the
            copy, times 1/√fan_in for a matrix; 0.2 by default. Most flows start at the identity,
            which hides errors. 0 checks the transform as it is.
        seed: of inputs, noise and perturbation; 0 by default.
        context: one context (context_dim,) or one for each row, (rows, context_dim); by default
            random.
        tolerances: entries that replace those of ``TOLERANCES``; none by default.
        base: the distribution of x, if it is restricted (positive, ordered, integers); by default
            normal, or uniform on a bounded domain.

    Returns:
        A report with one or more rows per property.

    Raises:
        ValueError: if ``only`` or ``skip`` has an unknown name, ``perturb`` is negative,
            ``tolerances`` has an unknown entry, or ``dim`` does not fit the transform.

    Example:
        >>> import bayou.flows as flows
        >>> print(flows.check(flows.realnvp(3), only=["gradcheck"]))
        Chain on 3, parameters perturbed by 0.2 (seed 0): all 2 passed
        check                  error  allowed
        gradcheck forward  ok      -        -
        gradcheck inverse  ok      -        -
    """
    case = prepare_case(
        transform, dim, rows=rows, seed=seed, context=context, tolerances=tolerances, base=base
    )
    return measure(select_properties(PROPERTIES, only, skip), case, perturb)


def prepare_case(
    transform: Map,
    dim: int | tuple[int, ...] | None = None,
    *,
    rows: int = 8,
    seed: int = 0,
    context: Tensor | None = None,
    tolerances: Mapping[str, float] | None = None,
    base: Base | None = None,
) -> Case:
    """Return a copy of a map with what ``check`` needs to know of it.

    Args:
        transform: the map or transform.
        dim: as for ``check``.
        rows: as for ``check``.
        seed: as for ``check``.
        context: as for ``check``.
        tolerances: as for ``check``.
        base: as for ``check``.

    Raises:
        ValueError: if ``tolerances`` has an unknown entry, or ``dim`` does not fit the transform.
    """
    limits = TOLERANCES | dict(tolerances or {})
    if unknown := sorted(limits.keys() - TOLERANCES.keys()):
        raise ValueError(
            f"tolerances has unknown entries {unknown}; choose from {list(TOLERANCES)}"
        )
    return Case(
        transform=copy.deepcopy(transform).to(torch.float64).eval(),
        event=resolve_event(transform, dim),
        rows=rows,
        seed=seed,
        tolerances=limits,
        fixed_context=context,
        fixed_base=None if base is None else copy.deepcopy(base).to(torch.float64),
    )


def measure(properties: Mapping[str, Property], case: Case, perturb: float = PERTURB) -> Report:
    """Measure properties of a map with perturbed parameters.

    Args:
        properties: generators of the rows of each property, by name.
        case: the map, whose parameters change.
        perturb: the standard deviation of the noise that is added to the parameters.

    Raises:
        ValueError: if ``perturb`` is negative or not finite.
    """
    if not 0 <= perturb < math.inf:
        raise ValueError(
            f"perturb must be a standard deviation of at least 0, got {perturb}; "
            "0 checks the transform as it is"
        )
    title = getattr(case.transform, "title", type(case.transform).__name__)
    subject = f"{title} on {'x'.join(map(str, case.event))}"
    results: list[Result] = []
    # The generator is isolated since a transform may draw in training mode.
    with rng.isolated(case.seed, case.reference.device), warnings.catch_warnings():
        # Warnings of other libraries are no failure; those of torch's kernels have the name of the
        # calling module.
        warnings.filterwarnings("ignore", module=r"(?!bayou\b)")
        warnings.filterwarnings("ignore", message=r"(?s).*Triggered internally at")
        if perturb > 0 and perturb_parameters(case.transform, perturb, case.seed):
            subject += f", parameters perturbed by {perturb:g} (seed {case.seed})"
        for name, measure_property in properties.items():
            results += _collect_rows(name, measure_property, case)
    return Report(subject, tuple(results))


def _collect_rows(name: str, measure_property: Property, case: Case) -> list[Result]:
    """Measure a property; an error is a row that failed, so that the others are still measured."""
    results: list[Result] = []
    try:
        results.extend(measure_property(case))
    except Exception as error:
        results.append(Result(name, False, note=f"{type(error).__name__}: {error}"))
    return results


@torch.no_grad()
def perturb_parameters(transform: Map, scale: float, seed: int) -> bool:
    """Add Gaussian noise to all trainable parameters, in place.

    Args:
        transform: the map, which changes.
        scale: the standard deviation of the noise; 1/√fan_in of it for a matrix.
        seed: of the noise.

    Returns:
        Whether there are trainable parameters.
    """
    has_parameters = False
    for name, parameter in transform.named_parameters():
        if not (parameter.requires_grad and parameter.numel()):
            continue
        fan_in = parameter[0].numel() if parameter.ndim > 1 else 1
        noise = rng.normal(1, parameter.shape, parameter, rng.fold(seed, "perturb", name))[0]
        parameter.add_(scale / math.sqrt(fan_in) * noise)
        has_parameters = True
    return has_parameters


def select_properties(
    properties: Mapping[str, Property],
    only: Collection[str] | None,
    skip: Collection[str],
) -> dict[str, Property]:
    """Return the properties to measure, in their order.

    Args:
        properties: all of them, by name.
        only: the names of those to measure; None for all.
        skip: the names of those to leave out.

    Raises:
        ValueError: for a string in place of a collection, or an unknown name.
    """
    for option, names in (("only", only or ()), ("skip", skip)):
        if isinstance(names, str):
            raise ValueError(
                f"{option} must be a collection of names, got the string {names!r}; "
                f"pass [{names!r}]"
            )
        unknown = sorted(set(names) - properties.keys())
        if unknown:
            raise ValueError(
                f"{option} has unknown checks {unknown}; choose from {list(properties)}"
            )
    return {
        name: measure_property
        for name, measure_property in properties.items()
        if (only is None or name in only) and name not in skip
    }


def resolve_event(transform: Map, dim: int | tuple[int, ...] | None) -> tuple[int, ...]:
    """Return the shape of an event of x, with 2 for sizes that nothing determines.

    Args:
        transform: the map.
        dim: the leading sizes; None for those of the map.

    Raises:
        ValueError: if they do not fit the map.
    """
    shape = transform.event_in
    if dim is None:
        return tuple(2 if size is None else size for size in shape)
    sizes = (dim,) if isinstance(dim, int) else tuple(dim)
    # A single number is the size of the leading axis.
    event = (*sizes, *(2 if size is None else size for size in shape[len(sizes) :]))
    if len(event) != len(shape) or any(
        expected not in (None, size) for size, expected in zip(event, shape, strict=True)
    ):
        raise ValueError(
            f"dim={dim} does not fit {type(transform).__name__} on events {shape}; leave dim out"
        )
    return event
