"""Rules: the guide spec of every parameter of a network, by patterns on names."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from bayou.core.params import match
from bayou.guides.gaussian import Delta
from bayou.guides.guide import GuideSpec
from bayou.network import NORMS

Rules = GuideSpec | Mapping[str, GuideSpec]


def expand_rules(net: nn.Module, rules: Rules) -> dict[str, GuideSpec]:
    """Return a guide spec for every parameter of the network that is not frozen.

    A single spec covers every weight with two or more axes; vectors (biases) then have a factorized
    Gaussian with a stochastic family and are points with points and gains, and parameters of
    normalization layers are points.

    Args:
        net: the network; parameters with ``requires_grad=False`` are frozen.
        rules: one spec, or patterns of names → specs.

    Raises:
        ValueError: if every parameter is frozen, or a rule is not a valid spec.
    """
    requires_grad = {name: parameter.requires_grad for name, parameter in net.named_parameters()}
    if not any(requires_grad.values()):
        raise ValueError(
            f"every parameter of {type(net).__name__} is frozen (requires_grad=False), "
            "so that there is no posterior; unfreeze some with requires_grad_()"
        )
    for spec in rules.values() if isinstance(rules, Mapping) else [rules]:
        if not isinstance(spec, GuideSpec):
            raise ValueError(
                f"rules must be a family such as MeanField(), or patterns → families, got {spec!r}"
            )
    if isinstance(rules, Mapping):
        frozen = [name for name, is_trained in requires_grad.items() if not is_trained]
        specs = match(requires_grad, rules, frozen=frozen)
    else:
        specs = _assign_by_layer(net, rules)
    for name, spec in specs.items():
        if spec.local not in (True, False, "positions"):
            raise ValueError(
                f'local of {name!r} must be True, False or "positions", got {spec.local!r}'
            )
    return specs


def _assign_by_layer(net: nn.Module, spec: GuideSpec) -> dict[str, GuideSpec]:
    """Assign one spec to the weights, ``for_vectors`` to vectors and points to normalization."""
    owners = dict(net.named_modules())
    specs: dict[str, GuideSpec] = {}
    for name, parameter in net.named_parameters():
        if not parameter.requires_grad:
            continue
        if isinstance(owners.get(name.rpartition(".")[0]), NORMS):
            specs[name] = Delta()
        elif spec.joint or parameter.ndim >= 2:
            specs[name] = spec
        else:
            specs[name] = spec.for_vectors()
    return specs


def group_names(specs: Mapping[str, GuideSpec]) -> list[list[str]]:
    """Return the names of each guide: one tensor, or all with the same object of a joint family.

    Args:
        specs: the guide spec of every tensor.
    """
    groups: dict[object, list[str]] = {}
    for name, spec in specs.items():
        key = id(spec) if spec.joint else name
        groups.setdefault(key, []).append(name)
    return list(groups.values())
