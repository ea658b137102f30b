"""What files of all posteriors have in common: the target, and the checks of what a file holds."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from bayou.files import FileError, StrPath, no_grad_state
from bayou.likelihoods import Likelihood
from bayou.modules import M
from bayou.network import output_of
from bayou.params import Params, under
from bayou.priors import Prior
from bayou.specs import from_json, to_json
from bayou.target import PriorRules, Target

if TYPE_CHECKING:
    from bayou.posteriors.posterior import Posterior


def target_state(posterior: Posterior, **parts: Params) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """What every file of a posterior holds: its kind, target, likelihood and history; and its own tensors, by part."""
    target = posterior.target
    config = {
        "kind": posterior.kind,
        "prior": to_json(target.prior),
        "likelihood": to_json(target.likelihood_spec),
        "n": target.n,
        "shapes": {name: list(value.shape) for name, value in target.net.named_parameters()},
        "history": posterior.history,
        "stopped": posterior.stopped,
    } | temperature_state(posterior)
    if (output := output_of(target.net)) is not None:
        config["output"] = to_json(output)
    parts = {"likelihood": no_grad_state(target.likelihood)} | parts
    return {f"{part}.{name}": value for part, tensors in parts.items() for name, value in tensors.items()}, config


def temperature_state(posterior: Posterior) -> dict[str, float]:
    """The temperature of a posterior that was calibrated."""
    return {} if posterior.temperature == 1.0 else {"temperature": posterior.temperature}


def _whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _records(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(record, dict) for record in value)


def _shapes(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(shape, list) for shape in value.values())


def _rate(value: Any) -> bool:
    return value is None or (isinstance(value, float) and 0 < value < 1)


KEYS = {"mixture": ("components",), "empirical": ("chains",), "masked": ("p", "per_row")}  # additional keys by kind
EXPECTED: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "history": ("a list of records", _records),
    "stopped": ("a word", lambda value: isinstance(value, str)),
    "n": ("a positive whole number", _whole),
    "shapes": ("the shapes of parameters", _shapes),
    "components": ("a list of posteriors", _records),
    "chains": ("a positive whole number", _whole),
    "p": ("a rate or nothing", _rate),
    "per_row": ("true or false", lambda value: isinstance(value, bool)),
    "temperature": ("a positive number", lambda value: isinstance(value, float) and 0 < value < math.inf),
}


def check_contents(tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
    """A FileError for a file with missing or invalid entries."""
    path, kind = config["path"], config["kind"]
    calibrated = ("temperature",) if "temperature" in config else ()
    usual = ("history", "stopped", *(() if kind == "mixture" else ("n", "shapes")))
    for key in (*usual, *KEYS.get(kind, ()), *calibrated):
        what, holds = EXPECTED[key]
        if key not in config or not holds(config[key]):
            raise FileError(f"{path} has {key} = {config.get(key)!r:.60}, expected {what}")
    free = ("net.", "bayesian.net.")  # buffers may hold any value; the components of a mixture are checked one by one
    for name, value in tensors.items():
        if kind != "mixture" and not name.startswith(free) and not bool(value.isfinite().all()):
            what = "NaN" if bool(value.isnan().any()) else "infinite numbers"
            raise FileError(f"{path} has {what} in {name!r}, so that nothing can be predicted with it; fit again")
        if name.startswith("covariance.") and not value.is_floating_point():
            raise FileError(f"{path} has {value.dtype} in {name!r}, expected numbers with fractions; fit again")


def check_made(posterior: Posterior, tensors: dict[str, Tensor], config: dict[str, Any], net: nn.Module) -> None:
    """A FileError unless a draw has every parameter in its shape, and the file has the dtypes of the posterior."""
    path, draw, made = config["path"], posterior.sample(1, seed=0), posterior.state()[0]
    for name, shape in config.get("shapes", {}).items():
        got = list(draw[name].shape[1:]) if name in draw else "missing"
        if got != shape:
            raise FileError(f"{path} does not fit its own network: {name!r} is {got}, expected {shape}")
    own = [*net.named_parameters(), *net.named_buffers()]
    like = made | {f"{part}.{name}": value for part in ("mean", "stack", "weights") for name, value in own}
    for name, value in tensors.items():
        if name in like and value.is_floating_point() != like[name].is_floating_point():
            raise FileError(f"{path} has {value.dtype} in {name!r}, expected {like[name].dtype}; fit again")


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
    prior = restore_spec(path, "prior", config["prior"], Prior) if prior is None else prior
    if likelihood is None:
        likelihood = restore_spec(path, "likelihood", config["likelihood"], Likelihood)
    target = Target.build(net, likelihood, prior, config["n"])
    state = under("likelihood.", tensors)
    try:
        with_dtypes(target.likelihood, state).load_state_dict(state)
    except RuntimeError as error:
        raise FileError(f"{path} does not fit this likelihood: {error}") from None
    return target


def with_dtypes(module: M, like: Params) -> M:
    """The module, with each of its tensors in the dtype that it has in ``like``."""
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if name in like and like[name].is_floating_point():
            tensor.data = tensor.data.to(like[name].dtype)
    return module


def restore_spec(path: StrPath, what: str, value: Any, family: type) -> Any:
    """A spec of a file (or specs by pattern); a FileError that asks for it as an option if it cannot be read."""
    try:
        found = from_json(value, family)
        for spec in found.values() if isinstance(found, dict) else [found]:
            if not isinstance(spec, family):
                raise ValueError(f"its {what} is {spec!r:.60}, not a {family.__name__}")
        return found
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise FileError(f"{path}: {error}; pass the {what} it was fitted with: load(..., {what}=...)") from None
