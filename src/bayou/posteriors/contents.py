"""Checks of the contents of files of posteriors, whose SHA-256 is right."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from bayou.core.files import FileError, StrPath
from bayou.core.params import Params, under
from bayou.likelihoods.logarithm import inner_parameters
from bayou.network.wide import UNITS

if TYPE_CHECKING:
    from bayou.posteriors.posterior import Posterior
    from bayou.posteriors.state import SavedState


def _is_positive_count(value: Any) -> bool:
    """Return whether a value is a positive whole number."""
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _have_type(values: Iterable[Any], expected: type) -> bool:
    """Return whether all values are of one type."""
    return all(isinstance(value, expected) for value in values)


def _are_records(value: Any) -> bool:
    """Return whether a value is a list of dictionaries."""
    return isinstance(value, list) and _have_type(value, dict)


def _is_record_of_updates(value: Any) -> bool:
    """Return whether a value has the counts and the weight of updates."""
    if not isinstance(value, dict) or {*value} != {"calls", "added", "removed", "kept"}:
        return False
    counts = [value[name] for name in ("calls", "added", "removed")]
    kept = value["kept"]
    is_weight = isinstance(kept, float) and 0 <= kept <= 1
    return is_weight and all(count == 0 or _is_positive_count(count) for count in counts)


# Entries of all files but mixtures, and further ones of some kinds of posteriors.
USUAL_KEYS = ("n", "shapes", "free")
KEYS_BY_KIND = {
    "mixture": ("components",),
    "empirical": ("chains",),
    "masked": ("p",),
    "wide": ("units_of_network",),
}
OPTIONAL_KEYS = (
    "temperature",
    "calibration",
    "shared",
    "thresholds",
    "rounding",
    "units_of_noise",
    "updates",
    "blocks",
)
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
    "thresholds": (
        "a whole number of at least 0",
        lambda value: value == 0 or _is_positive_count(value),
    ),
    "rounding": (
        "a positive number",
        lambda value: isinstance(value, float) and 0 < value < math.inf,
    ),
    "units_of_network": ("erf or relu", lambda value: value in UNITS),
    "units_of_noise": ("erf or relu", lambda value: value in UNITS),
    "blocks": (
        "the numbers of rows of updates",
        lambda value: (
            isinstance(value, list) and bool(value) and all(map(_is_positive_count, value))
        ),
    ),
    "updates": ("the counts of updated rows", _is_record_of_updates),
    "calibration": ("the name of a calibration map", lambda value: isinstance(value, str)),
    "temperature": (
        "a positive number",
        lambda value: isinstance(value, float) and 0 < value < math.inf,
    ),
}


def check_contents(saved: SavedState) -> None:
    """Raise a FileError for a file with missing or invalid entries.

    Args:
        saved: the state in the file.
    """
    path = saved.path
    config = saved.config
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
    for name, value in saved.tensors.items():
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


def check_restored(posterior: Posterior, saved: SavedState, net: nn.Module) -> None:
    """Raise a FileError unless a restored posterior fits its file and its network.

    A draw must have every parameter in its shape, and the file the dtypes of the posterior.

    Args:
        posterior: restored from the file.
        saved: the state in the file.
        net: the network of the user.
    """
    path = saved.path
    config = saved.config
    tensors = saved.tensors
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
    noise: Params = {}
    parameters: Params = dict(posterior.target.likelihood.state_dict())
    while parameters.keys() - noise.keys():  # draws of a fit to log y have names without a prefix
        noise |= parameters
        parameters = inner_parameters(parameters)
    noise = {f"likelihood.{name}": value for name, value in noise.items()}
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
