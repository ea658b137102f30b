"""What files of all posteriors have in common: the target, and the checks of what a file holds."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from bayou.core.files import FileError, StrPath, no_grad_state, restore_state
from bayou.core.modules import M
from bayou.core.params import Params, under
from bayou.core.specs import from_json, to_json
from bayou.likelihoods import Likelihood
from bayou.network import Network, output_of, shared_copy
from bayou.network.units import Units, units_of, with_units
from bayou.priors import Prior
from bayou.target import PriorRules, Target

if TYPE_CHECKING:
    from bayou.posteriors.posterior import Posterior


def target_state(posterior: Posterior, **parts: Params) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """What every file of a posterior holds: its kind, target, likelihood and history; and its own
    tensors, by part.
    """
    target = posterior.target
    config = {
        "kind": posterior.kind,
        "prior": to_json(target.prior),
        "likelihood": to_json(target.likelihood_spec),
        "n": target.n,
        "shapes": {name: list(value.shape) for name, value in target.net.named_parameters()},
        "free": target.free,
        "history": posterior.history,
        "stopped": posterior.stopped,
    } | temperature_state(posterior)
    if (output := output_of(target.net)) is not None:
        config["output"] = to_json(output)
    units = units_of(target.net)
    if units is not None and units.is_active:
        config["units"] = units.to_json()
    parts = {
        "likelihood": no_grad_state(target.likelihood),
        "net": changed_buffers(target, posterior.network),
    } | parts
    return {
        f"{part}.{name}": value
        for part, tensors in parts.items()
        for name, value in tensors.items()
    }, config


def changed_buffers(target: Target, network: Network) -> Params:
    """The buffers of a network for a file: all of them, or where parameters are frozen those that
    the fit changed.
    """
    before = target.network.buffers() if target.frozen else {}
    found = network.buffers().items()
    return {
        n: value
        for n, value in found
        if n not in before or not torch.equal(value, before[n].to(value))
    }


def temperature_state(posterior: Posterior) -> dict[str, float]:
    """The temperature of a posterior that was calibrated."""
    return {} if posterior.temperature == 1.0 else {"temperature": posterior.temperature}


def _whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _all(values: Iterable[Any], kind: type) -> bool:
    return all(isinstance(value, kind) for value in values)


def _records(value: Any) -> bool:
    return isinstance(value, list) and _all(value, dict)


KEYS = {
    "mixture": ("components",),
    "empirical": ("chains",),
    "masked": ("p",),
}  # additional keys by kind
EXPECTED: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "history": ("a list of records", _records),
    "stopped": ("a word", lambda value: isinstance(value, str)),
    "n": ("a positive whole number", _whole),
    "shapes": (
        "the shapes of parameters",
        lambda value: isinstance(value, dict) and _all(value.values(), list),
    ),
    "free": ("the names of parameters", lambda value: isinstance(value, list) and _all(value, str)),
    "components": ("a list of posteriors", _records),
    "chains": ("a positive whole number", _whole),
    "shared": (
        "the names of tensors",
        lambda value: isinstance(value, list) and _all(value, str),
    ),
    "p": (
        "a rate or nothing",
        lambda value: value is None or (isinstance(value, float) and 0 < value < 1),
    ),
    "temperature": (
        "a positive number",
        lambda value: isinstance(value, float) and 0 < value < math.inf,
    ),
}


def check_contents(tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
    """A FileError for a file with missing or invalid entries."""
    path, kind = config["path"], config["kind"]
    optional = [key for key in ("temperature", "shared") if key in config]
    usual = ("history", "stopped", *(() if kind == "mixture" else ("n", "shapes", "free")))
    for key in (*usual, *KEYS.get(kind, ()), *optional):
        what, holds = EXPECTED[key]
        if key not in config or not holds(config[key]):
            raise FileError(f"{path} has {key} = {config.get(key)!r:.60}, expected {what}")
    for (
        name,
        value,
    ) in (
        tensors.items()
    ):  # buffers may hold any value; components of a mixture are checked one by one
        if kind != "mixture" and not name.startswith("net.") and not bool(value.isfinite().all()):
            what = "NaN" if bool(value.isnan().any()) else "infinite numbers"
            raise FileError(
                f"{path} has {what} in {name!r}, so that nothing can be predicted with it; fit again"
            )
        if name.startswith("covariance.") and not value.is_floating_point():
            raise FileError(
                f"{path} has {value.dtype} in {name!r}, expected numbers with fractions; fit again"
            )


def check_made(
    posterior: Posterior, tensors: dict[str, Tensor], config: dict[str, Any], net: nn.Module
) -> None:
    """A FileError unless a draw has every parameter in its shape, and the file has the dtypes of
    the posterior.
    """
    path, draw, made = config["path"], posterior.sample(1, seed=0), posterior.state()[0]
    for name in config.get("free", ()):
        got = list(draw[name].shape) if name in draw else "missing"
        shape = [1, *config["shapes"].get(name, [])]
        if got != shape:
            raise FileError(
                f"{path} does not fit its own network: a draw of {name!r} is {got}, expected {shape}"
            )
    own = {**dict(net.named_parameters()), **dict(net.named_buffers())}
    noise = posterior.target.likelihood.state_dict(prefix="likelihood.")
    parts = ("mean", "stack", "weights", "covariance")
    like = made | {
        f"{part}.{name}": value for part in parts for name, value in (own | noise).items()
    }
    for name, value in tensors.items():
        if name in like and value.is_floating_point() != like[name].is_floating_point():
            raise FileError(
                f"{path} has {value.dtype} in {name!r}, expected {like[name].dtype}; fit again"
            )
        part, _, inner = name.partition(".")
        axes = value.ndim - (part == "stack")  # a stack has one for its points
        if part in parts and name in like and axes != like[name].ndim:
            raise FileError(
                f"{path} has {list(value.shape)} in {name!r}, one axis too many or too few for {inner!r} of shape "
                f"{list(like[name].shape)}; fit again"
            )
    _check_points(path, under("stack.", tensors), config.get("shared"))
    for part in (
        "net.",
        "mean.",
        "stack.",
        "weights.",
    ):  # a draw may have another dtype than its mean
        draw = draw | under(part, tensors)
    _check_dtypes(path, {name: value.dtype for name, value in draw.items() if name in own}, own)


def _check_points(path: StrPath, stack: Params, shared_names: list[str] | None) -> None:
    """Raise a FileError unless all tensors of a stack have as many points.

    Args:
        path: the file.
        stack: the tensors of the file, (points, *shape).
        shared_names: tensors with one point that all share; None in files of an earlier version,
            which do not name them.
    """
    points = max((len(value) for value in stack.values()), default=0)
    for name, value in stack.items():
        is_shared = len(value) == 1 and (shared_names is None or name in shared_names)
        if len(value) != points and not is_shared:
            raise FileError(f"{path} has {len(value)} of {points} points in {name!r}; fit again")


def _check_dtypes(path: StrPath, dtypes: dict[str, torch.dtype], own: Params) -> None:
    """Raise a FileError unless tensors that have one dtype in the network have one in the file,
    maybe another.
    """
    first: dict[torch.dtype, str] = {}
    for name, dtype in dtypes.items():
        other = first.setdefault(own[name].dtype, name)
        if dtype != dtypes[other]:
            raise FileError(
                f"{path} has {dtype} in {name!r} and {dtypes[other]} in {other!r}, which are both {own[name].dtype} in "
                "this network; build the network with the dtypes it was fitted with, or fit again"
            )


def restore_target(
    tensors: dict[str, Tensor],
    config: dict[str, Any],
    net: nn.Module,
    prior: PriorRules | None = None,
    likelihood: Likelihood | None = None,
) -> Target:
    """The target of a file for the network it was fitted to."""
    path = config["path"]
    shapes = {name: list(value.shape) for name, value in net.named_parameters()}
    odd = [n for n in [*config["shapes"], *shapes] if shapes.get(n) != config["shapes"].get(n)]
    if odd:
        raise FileError(
            f"{path} belongs to another network: {odd[0]!r} is {config['shapes'].get(odd[0], 'not')} in the file "
            f"and {shapes.get(odd[0], 'not')} here; build the network it was fitted to"
        )
    if unknown := [name for name in config["free"] if name not in shapes]:
        raise FileError(f"{path} has draws of {unknown[0]!r}, which is no parameter; fit again")
    prior = restore_spec(path, "prior", config["prior"], Prior) if prior is None else prior
    if likelihood is None:
        likelihood = restore_spec(path, "likelihood", config["likelihood"], Likelihood)
    if "units" in config:
        net = restore_units(path, config["units"], net)
    net = shared_copy(net, config["free"])  # the file decides what is frozen
    target = Target.build(net, likelihood, prior, config["n"])
    load_state(target.likelihood, under("likelihood.", tensors), path, "likelihood")
    return target


def restore_units(path: StrPath, value: Any, net: nn.Module) -> nn.Module:
    """Return the network with the units of a file, active."""
    try:
        units = Units.from_json(value)
    except (ValueError, TypeError, KeyError, RuntimeError) as error:
        raise FileError(f"{path} has units that cannot be read ({error}); fit again") from None
    units.activate(next(net.parameters()))
    return with_units(net, units)


def with_dtypes(module: M, like: Params) -> M:
    """The module, where each of its tensors that is in ``like`` is a copy in that dtype."""
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if name in like:
            dtype = like[name].dtype if like[name].is_floating_point() else tensor.dtype
            tensor.data = tensor.data.to(dtype, copy=True)
    return module


def load_state(
    module: nn.Module, state: Params, path: StrPath, what: str, known: Params | None = None
) -> None:
    """Give a module the tensors of a file, in their dtypes; ``known``: these with those that the
    file does not have.
    """
    try:
        restore_state(with_dtypes(module, state), known or state)
    except RuntimeError as error:
        raise FileError(f"{path} does not fit this {what}: {error}") from None


def restore_buffers(
    network: Network, target: Target, tensors: dict[str, Tensor], path: StrPath
) -> None:
    """Give a network the buffers of a file; where parameters are frozen, those missing there are as
    they are here.
    """
    state = under("net.", tensors)
    load_state(
        network.net, state, path, "network", network.buffers() | state if target.frozen else None
    )


def restore_network(target: Target, tensors: dict[str, Tensor], config: dict[str, Any]) -> Network:
    """The network of a file as a function, with the buffers that it had."""
    network = Network(target.net)
    like = next((v for v in tensors.values() if v.is_floating_point()), None)
    if like is not None and not target.frozen:
        network.net.to(like.dtype)
    restore_buffers(network, target, tensors, config["path"])
    network.net.eval()
    return network


def with_state(net: nn.Module, state: Params) -> nn.Module:
    """A network with these parameters and buffers; it shares the others with ``net``."""
    net = with_dtypes(
        shared_copy(net).to(next(iter(state.values()), next(net.parameters())).device), state
    )
    restore_state(net, state, partial=True)  # a tied weight comes once
    return net


def check_base(target: Target, base: Any, path: StrPath) -> None:
    """A FileError unless the frozen tensors of the network are those that a posterior was fitted
    with.
    """
    if not isinstance(base, dict):
        raise FileError(f"{path} has base = {base!r:.60}, expected the digests of frozen tensors")
    here = target.base()
    if odd := [name for name in here if here[name] != base.get(name)]:
        raise FileError(
            f"{path} belongs to a network with other values of {odd[0]!r} ({len(odd)} of {len(here)} frozen tensors "
            "differ); the file has only what was fitted: load the base first that it was fitted with"
        )


def restore_spec(path: StrPath, what: str, value: Any, family: type) -> Any:
    """A spec of a file (or specs by pattern); a FileError that asks for it as an option if it
    cannot be read.
    """
    try:
        found = from_json(value, family)
        for spec in found.values() if isinstance(found, dict) else [found]:
            if not isinstance(spec, family):
                raise ValueError(f"its {what} is {spec!r:.60}, not a {family.__name__}")
        return found
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise FileError(
            f"{path}: {error}; pass the {what} it was fitted with: load(..., {what}=...)"
        ) from None
