"""What files of all posteriors have in common: the target, and the checks of their contents."""

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
from bayou.network.target import PriorRules, Target
from bayou.network.units import Units, units_of, with_units
from bayou.priors import Prior

if TYPE_CHECKING:
    from bayou.posteriors.posterior import Posterior


def target_state(
    posterior: Posterior, **groups: Params
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return what every file of a posterior holds, with the tensors of its kind.

    Args:
        posterior: its kind, target, likelihood and history are in the file.
        groups: tensors of its kind; those of the group ``mean`` are named ``mean.NAME``.

    Returns:
        The tensors and the JSON of the file.
    """
    target = posterior.target
    config: dict[str, Any] = {
        "kind": posterior.kind,
        "prior": to_json(target.prior),
        "likelihood": to_json(target.likelihood_spec),
        "n": target.n,
        "shapes": {name: list(value.shape) for name, value in target.net.named_parameters()},
        "free": target.free,
        "history": posterior.history,
        "stopped": posterior.stopped,
    }
    config |= temperature_state(posterior)
    output = output_of(target.net)
    if output is not None:
        config["output"] = to_json(output)
    units = units_of(target.net)
    if units is not None and units.is_active:
        config["units"] = units.to_json()
    all_groups = {
        "likelihood": no_grad_state(target.likelihood),
        "net": changed_buffers(target, posterior.network),
    }
    all_groups |= groups
    state: dict[str, Tensor] = {}
    for group, tensors in all_groups.items():
        for name, value in tensors.items():
            state[f"{group}.{name}"] = value
    return state, config


def changed_buffers(target: Target, network: Network) -> Params:
    """Return the buffers of a network for a file.

    All of them, or where parameters are frozen those that the fit changed.

    Args:
        target: has the network before the fit.
        network: after the fit.
    """
    before = target.network.buffers() if target.frozen else {}
    changed: Params = {}
    for name, value in network.buffers().items():
        if name not in before or not torch.equal(value, before[name].to(value)):
            changed[name] = value
    return changed


def temperature_state(posterior: Posterior) -> dict[str, float]:
    """Return the temperature of a posterior that was calibrated, for its file.

    Args:
        posterior: without a temperature, the entry is left out.
    """
    return {} if posterior.temperature == 1.0 else {"temperature": posterior.temperature}


def _is_positive_count(value: Any) -> bool:
    """Return whether a value is a positive whole number."""
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _have_type(values: Iterable[Any], expected: type) -> bool:
    """Return whether all values are of one type."""
    return all(isinstance(value, expected) for value in values)


def _are_records(value: Any) -> bool:
    """Return whether a value is a list of dictionaries."""
    return isinstance(value, list) and _have_type(value, dict)


# Entries of all files but mixtures, and further ones of some kinds of posteriors.
USUAL_KEYS = ("n", "shapes", "free")
KEYS_BY_KIND = {
    "mixture": ("components",),
    "empirical": ("chains",),
    "masked": ("p",),
}
OPTIONAL_KEYS = ("temperature", "shared")
# What an entry must be, in words and as a test.
EXPECTED: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "history": ("a list of records", _are_records),
    "stopped": ("a word", lambda value: isinstance(value, str)),
    "n": ("a positive whole number", _is_positive_count),
    "shapes": (
        "the shapes of parameters",
        lambda value: isinstance(value, dict) and _have_type(value.values(), list),
    ),
    "free": (
        "the names of parameters",
        lambda value: isinstance(value, list) and _have_type(value, str),
    ),
    "components": ("a list of posteriors", _are_records),
    "chains": ("a positive whole number", _is_positive_count),
    "shared": (
        "the names of tensors",
        lambda value: isinstance(value, list) and _have_type(value, str),
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
    """Raise a FileError for a file with missing or invalid entries.

    Args:
        tensors: of the file.
        config: its JSON, with the name of the file as "path".
    """
    path = config["path"]
    is_mixture = config["kind"] == "mixture"
    keys = ["history", "stopped"]
    if not is_mixture:
        keys += USUAL_KEYS
    keys += KEYS_BY_KIND.get(config["kind"], ())
    keys += [key for key in OPTIONAL_KEYS if key in config]
    for key in keys:
        description, is_valid = EXPECTED[key]
        if key not in config or not is_valid(config[key]):
            raise FileError(f"{path} has {key} = {config.get(key)!r:.60}, expected {description}")
    for name, value in tensors.items():
        # Buffers may hold any value, and components of a mixture are checked one by one.
        must_be_finite = not is_mixture and not name.startswith("net.")
        if must_be_finite and not bool(value.isfinite().all()):
            problem = "NaN" if bool(value.isnan().any()) else "infinite numbers"
            raise FileError(
                f"{path} has {problem} in {name!r}, so that nothing can be predicted with it; "
                "fit again"
            )
        if name.startswith("covariance.") and not value.is_floating_point():
            raise FileError(
                f"{path} has {value.dtype} in {name!r}, expected numbers with fractions; fit again"
            )


def check_restored(
    posterior: Posterior, tensors: dict[str, Tensor], config: dict[str, Any], net: nn.Module
) -> None:
    """Raise a FileError unless a restored posterior fits its file and its network.

    A draw must have every parameter in its shape, and the file the dtypes of the posterior.

    Args:
        posterior: restored from the file.
        tensors: of the file.
        config: its JSON, with the name of the file as "path".
        net: the network of the user.
    """
    path = config["path"]
    draw = posterior.sample(1, seed=0)
    restored = posterior.state()[0]
    for name in config.get("free", ()):
        shape = list(draw[name].shape) if name in draw else "missing"
        expected = [1, *config["shapes"].get(name, [])]
        if shape != expected:
            raise FileError(
                f"{path} does not fit its own network: a draw of {name!r} is {shape}, "
                f"expected {expected}"
            )
    network_tensors = {**dict(net.named_parameters()), **dict(net.named_buffers())}
    noise = posterior.target.likelihood.state_dict(prefix="likelihood.")
    _check_axes(path, tensors, restored, network_tensors | noise)
    _check_points(path, under("stack.", tensors), config.get("shared"))
    for group in ("net.", "mean.", "stack.", "weights."):
        draw = draw | under(group, tensors)  # a draw may have another dtype than its mean
    dtypes = {name: value.dtype for name, value in draw.items() if name in network_tensors}
    _check_dtypes(path, dtypes, network_tensors)


def _check_axes(path: StrPath, tensors: Params, restored: Params, network_tensors: Params) -> None:
    """Raise a FileError for a tensor of a file with another number of axes or type of numbers."""
    groups = ("mean", "stack", "weights", "covariance")
    expected = dict(restored)
    for group in groups:
        for name, value in network_tensors.items():
            expected[f"{group}.{name}"] = value
    for name, value in tensors.items():
        if name not in expected:
            continue
        if value.is_floating_point() != expected[name].is_floating_point():
            raise FileError(
                f"{path} has {value.dtype} in {name!r}, expected {expected[name].dtype}; fit again"
            )
        group, _, inner_name = name.partition(".")
        axes = value.ndim - (group == "stack")  # a stack has one for its points
        if group in groups and axes != expected[name].ndim:
            raise FileError(
                f"{path} has {list(value.shape)} in {name!r}, one axis too many or too few for "
                f"{inner_name!r} of shape {list(expected[name].shape)}; fit again"
            )


def _check_points(path: StrPath, stack: Params, shared_names: list[str] | None) -> None:
    """Raise a FileError unless all tensors of a stack have as many points.

    Args:
        path: of the file.
        stack: the tensors of the file, (points, *shape).
        shared_names: tensors with one point that all share; None in files of an earlier version,
            which do not name them.
    """
    points = max((len(value) for value in stack.values()), default=0)
    for name, value in stack.items():
        is_shared = len(value) == 1 and (shared_names is None or name in shared_names)
        if len(value) != points and not is_shared:
            raise FileError(f"{path} has {len(value)} of {points} points in {name!r}; fit again")


def _check_dtypes(path: StrPath, dtypes: dict[str, torch.dtype], network_tensors: Params) -> None:
    """Raise a FileError unless tensors of one dtype in the network have one in the file.

    It may be another than that in the network.
    """
    first_names: dict[torch.dtype, str] = {}
    for name, dtype in dtypes.items():
        network_dtype = network_tensors[name].dtype
        first = first_names.setdefault(network_dtype, name)
        if dtype != dtypes[first]:
            raise FileError(
                f"{path} has {dtype} in {name!r} and {dtypes[first]} in {first!r}, which are both "
                f"{network_dtype} in this network; build the network with the dtypes it was fitted "
                "with, or fit again"
            )


def restore_target(
    tensors: dict[str, Tensor],
    config: dict[str, Any],
    net: nn.Module,
    prior: PriorRules | None = None,
    likelihood: Likelihood | None = None,
) -> Target:
    """Return the target of a file for the network it was fitted to.

    Args:
        tensors: of the file.
        config: its JSON, with the name of the file as "path".
        net: the network.
        prior: instead of that of the file.
        likelihood: instead of that of the file.

    Raises:
        FileError: if the network is another one, or a spec cannot be read.
    """
    path = config["path"]
    shapes = {name: list(value.shape) for name, value in net.named_parameters()}
    for name in (*config["shapes"], *shapes):
        if shapes.get(name) != config["shapes"].get(name):
            raise FileError(
                f"{path} belongs to another network: {name!r} is "
                f"{config['shapes'].get(name, 'not')} in the file and {shapes.get(name, 'not')} "
                "here; build the network it was fitted to"
            )
    for name in config["free"]:
        if name not in shapes:
            raise FileError(f"{path} has draws of {name!r}, which is no parameter; fit again")
    if prior is None:
        prior = restore_spec(path, "prior", config["prior"], Prior)
    if likelihood is None:
        likelihood = restore_spec(path, "likelihood", config["likelihood"], Likelihood)
    if "units" in config:
        net = restore_units(path, config["units"], net)
    net = shared_copy(net, config["free"])  # the file decides what is frozen
    target = Target.build(net, likelihood, prior, config["n"])
    load_state(target.likelihood, under("likelihood.", tensors), path, "likelihood")
    return target


def restore_units(path: StrPath, value: Any, net: nn.Module) -> nn.Module:
    """Return the network with the units of a file, active.

    Args:
        path: of the file.
        value: the units as JSON.
        net: the network.

    Raises:
        FileError: if they cannot be read.
    """
    try:
        units = Units.from_json(value)
    except (ValueError, TypeError, KeyError, RuntimeError) as error:
        raise FileError(f"{path} has units that cannot be read ({error}); fit again") from None
    units.activate(next(net.parameters()))
    return with_units(net, units)


def with_dtypes(module: M, dtypes_of: Params) -> M:
    """Return a module with copies of some tensors in other dtypes.

    Args:
        module: is changed in place.
        dtypes_of: tensors by name, whose dtypes those of the module get; integers change nothing.
    """
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if name in dtypes_of:
            dtype = tensor.dtype
            if dtypes_of[name].is_floating_point():
                dtype = dtypes_of[name].dtype
            tensor.data = tensor.data.to(dtype, copy=True)
    return module


def load_state(
    module: nn.Module, state: Params, path: StrPath, owner: str, complete: Params | None = None
) -> None:
    """Give a module the tensors of a file, in their dtypes.

    Args:
        module: is changed in place.
        state: the tensors of the file.
        path: of the file.
        owner: what the module is, for an error.
        complete: the state with those tensors that the file does not have; None if it has all.

    Raises:
        FileError: if they do not fit.
    """
    try:
        restore_state(with_dtypes(module, state), complete or state)
    except RuntimeError as error:
        raise FileError(f"{path} does not fit this {owner}: {error}") from None


def restore_buffers(
    network: Network, target: Target, tensors: dict[str, Tensor], path: StrPath
) -> None:
    """Give a network the buffers of a file.

    Where parameters are frozen, buffers that are not in the file stay as they are.

    Args:
        network: is changed in place.
        target: whether parameters are frozen.
        tensors: of the file.
        path: of the file.
    """
    state = under("net.", tensors)
    complete = network.buffers() | state if target.frozen else None
    load_state(network.net, state, path, "network", complete)


def restore_network(target: Target, tensors: dict[str, Tensor], config: dict[str, Any]) -> Network:
    """Return the network of a file as a function, with the buffers that it had.

    Args:
        target: of the file.
        tensors: of the file.
        config: its JSON, with the name of the file as "path".
    """
    network = Network(target.net)
    dtypes = [value.dtype for value in tensors.values() if value.is_floating_point()]
    if dtypes and not target.frozen:
        network.net.to(dtypes[0])
    restore_buffers(network, target, tensors, config["path"])
    network.net.eval()
    return network


def with_state(net: nn.Module, state: Params) -> nn.Module:
    """Return a network with other parameters and buffers.

    Args:
        net: the network; it shares the tensors that are not in ``state`` with the result.
        state: parameters and buffers by name.
    """
    device = next(iter(state.values()), next(net.parameters())).device
    net = with_dtypes(shared_copy(net).to(device), state)
    restore_state(net, state, partial=True)  # a tied weight comes once
    return net


def check_base(target: Target, base: Any, path: StrPath) -> None:
    """Raise a FileError unless the frozen tensors of a network are those of the fit.

    Args:
        target: has the network.
        base: the digests of frozen tensors in the file.
        path: of the file.
    """
    if not isinstance(base, dict):
        raise FileError(f"{path} has base = {base!r:.60}, expected the digests of frozen tensors")
    digests = target.base()
    different = [name for name in digests if digests[name] != base.get(name)]
    if different:
        raise FileError(
            f"{path} belongs to a network with other values of {different[0]!r} "
            f"({len(different)} of {len(digests)} frozen tensors differ); the file has only what "
            "was fitted: load the base first that it was fitted with"
        )


def restore_spec(path: StrPath, name: str, value: Any, family: type) -> Any:
    """Return a spec of a file, or specs by pattern.

    Args:
        path: of the file.
        name: of the option that may be passed instead.
        value: the spec as JSON.
        family: the base class of the spec.

    Raises:
        FileError: that asks for the spec as an option, if it cannot be read.
    """
    try:
        spec = from_json(value, family)
        for item in spec.values() if isinstance(spec, dict) else [spec]:
            if not isinstance(item, family):
                raise ValueError(f"its {name} is {item!r:.60}, not a {family.__name__}")
        return spec
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise FileError(
            f"{path}: {error}; pass the {name} it was fitted with: load(..., {name}=...)"
        ) from None
