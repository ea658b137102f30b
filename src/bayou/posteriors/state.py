"""States of posteriors, as files hold them: the target and its network, written and restored."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from bayou.core.files import FileError, StrPath, no_grad_state, restore_state
from bayou.core.modules import M
from bayou.core.params import Params, under
from bayou.core.specs import from_json, to_json
from bayou.likelihoods import Likelihood
from bayou.network import Network, output_of, shared_copy
from bayou.network.target import Target
from bayou.network.units import Units, units_of, with_units
from bayou.networks import TableNetwork
from bayou.priors import Prior

if TYPE_CHECKING:
    from bayou.posteriors.posterior import Posterior

CALIBRATION = "calibration"  # an entry of files, and the group of its tensors
NETWORK = "network"  # an entry of files whose network was made by a method


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
        "shapes": _shapes(target.net),
        "free": target.free,
        "history": posterior.history,
        "stopped": posterior.stopped,
    }
    calibration, calibration_config = calibration_state(posterior)
    config |= calibration_config
    config |= updates_state(posterior)
    output = output_of(target.net)
    if output is not None:
        config["output"] = to_json(output)
    units = units_of(target.net)
    if units is not None and units.is_active:
        config["units"] = units.to_json()
    if isinstance(target.net, TableNetwork) and target.net.is_in_files:
        config[NETWORK] = target.net.to_json()
    all_groups = {
        "likelihood": no_grad_state(target.likelihood),
        "net": _changed_buffers(target, posterior.network),
    }
    all_groups |= groups
    tensors: dict[str, Tensor] = {}
    for group, values in all_groups.items():
        for name, value in values.items():
            tensors[f"{group}.{name}"] = value
    return tensors | calibration, config


def is_in_file(net: nn.Module) -> bool:
    """Return whether a file contains the description of a network, because a method made it.

    Args:
        net: of a target.
    """
    return isinstance(net, TableNetwork) and net.is_in_files


def _shapes(net: nn.Module) -> dict[str, list[int]]:
    """Return the shapes of all parameters."""
    return {name: list(value.shape) for name, value in net.named_parameters()}


def _changed_buffers(target: Target, network: Network) -> Params:
    """Return the buffers of a fitted network; with frozen parameters those that the fit changed."""
    before = target.network.buffers() if target.frozen else {}
    changed: Params = {}
    for name, value in network.buffers().items():
        if name not in before or not torch.equal(value, before[name].to(value)):
            changed[name] = value
    return changed


def calibration_state(posterior: Posterior) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the tensors and the JSON of a posterior that was calibrated, for its file.

    Args:
        posterior: without a temperature and without a map, both are empty.
    """
    tensors: dict[str, Tensor] = {}
    config: dict[str, Any] = {}
    if posterior.temperature != 1.0:
        config["temperature"] = posterior.temperature
    if posterior.calibration_map is not None:
        config[CALIBRATION] = posterior.calibration_map.key
        for name, value in posterior.calibration_map.state().items():
            tensors[f"{CALIBRATION}.{name}"] = value
    return tensors, config


def updates_state(posterior: Posterior) -> dict[str, Any]:
    """Return the record of updates of a posterior, for its file.

    Args:
        posterior: without updates, the entry is left out.
    """
    return {"updates": posterior.updates.to_json()} if posterior.updates.calls else {}


@dataclass(frozen=True)
class SavedState:
    """The state of a posterior as it was read from a file.

    Args:
        tensors: the tensors by name, on the device of the network.
        config: the JSON.
        path: of the file, for errors.
        options: specs that replace those of the file, see ``bayou.load``.
    """

    tensors: dict[str, Tensor]
    config: dict[str, Any]
    path: StrPath
    options: Mapping[str, Any] = field(default_factory=dict)

    def group(self, name: str) -> Params:
        """Return the tensors of one group, such as ``mean``, by their names in the group.

        Args:
            name: of the group.
        """
        return under(f"{name}.", self.tensors)

    def target(self, net: nn.Module) -> Target:
        """Return the target for the network it was fitted to.

        Args:
            net: the network; any, where the file describes its own.

        Raises:
            FileError: if the network is another one, or a spec cannot be read.
        """
        config = self.config
        if NETWORK in config:
            net = self._described_network(net)
        shapes = _shapes(net)
        for name in (*config["shapes"], *shapes):
            if shapes.get(name) != config["shapes"].get(name):
                raise FileError(
                    f"{self.path} belongs to another network: {name!r} is "
                    f"{config['shapes'].get(name, 'not')} in the file and "
                    f"{shapes.get(name, 'not')} here; build the network it was fitted to"
                )
        for name in config["free"]:
            if name not in shapes:
                raise FileError(
                    f"{self.path} has draws of {name!r}, which is no parameter; fit again"
                )
        prior = self.spec("prior", Prior)
        likelihood = self.spec("likelihood", Likelihood)
        if "units" in config:
            units = Units.from_json(config["units"])
            units.activate(next(net.parameters()))
            net = with_units(net, units)
        net = shared_copy(net, config["free"])  # the file decides what is frozen
        target = Target.build(net, likelihood, prior, config["n"])
        self.load_into(target.likelihood, self.group("likelihood"), "likelihood")
        return target

    def _described_network(self, net: nn.Module) -> TableNetwork:
        """Return the network that the file describes, in the dtype and on the device of another."""
        try:
            described = TableNetwork.from_json(self.config[NETWORK])
        except ValueError as error:
            raise FileError(f"{self.path}: {error}") from None
        described.is_in_files = True
        parameter = next(net.parameters())
        return described.to(device=parameter.device, dtype=parameter.dtype)

    def network(self, target: Target) -> Network:
        """Return the network as a function, with the buffers that it had.

        Args:
            target: of the file.
        """
        network = Network(target.net)
        dtypes = [value.dtype for value in self.tensors.values() if value.is_floating_point()]
        if dtypes and not target.frozen:
            network.net.to(dtypes[0])
        self.load_buffers(network, target)
        network.net.eval()
        return network

    def load_buffers(self, network: Network, target: Target) -> None:
        """Give a network the buffers of the file.

        Where parameters are frozen, buffers that are not in the file stay as they are.

        Args:
            network: is changed in place.
            target: whether parameters are frozen.
        """
        buffers = self.group("net")
        complete = network.buffers() | buffers if target.frozen else None
        self.load_into(network.net, buffers, "network", complete)

    def load_into(
        self, module: nn.Module, tensors: Params, owner: str, complete: Params | None = None
    ) -> None:
        """Give a module tensors of the file, in their dtypes.

        Args:
            module: is changed in place.
            tensors: those of the file.
            owner: what the module is, for an error.
            complete: the tensors with those that the file does not have; None if it has all.

        Raises:
            FileError: if they do not fit.
        """
        try:
            restore_state(with_dtypes(module, tensors), complete or tensors)
        except RuntimeError as error:
            raise FileError(f"{self.path} does not fit this {owner}: {error}") from None

    def spec(self, name: str, family: type) -> Any:
        """Return a spec that was passed or that of the file, or specs by pattern.

        Args:
            name: of the option and of the entry of the file.
            family: the base class of the spec.

        Raises:
            FileError: that asks for the spec as an option, if it cannot be read.
        """
        if self.options.get(name) is not None:
            return self.options[name]
        try:
            return from_json(self.config[name], family)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise FileError(
                f"{self.path}: {error}; pass the {name} it was fitted with: load(..., {name}=...)"
            ) from None


def check_base(target: Target, digests: dict[str, str], path: StrPath) -> None:
    """Raise a FileError unless the frozen tensors of a network are those of the fit.

    Args:
        target: has the network.
        digests: of frozen tensors, by name, in the file.
        path: of the file.
    """
    base = target.base()
    different = [name for name in base if base[name] != digests.get(name)]
    if different:
        raise FileError(
            f"{path} belongs to a network with other values of {different[0]!r} "
            f"({len(different)} of {len(base)} frozen tensors differ); the file has only what "
            "was fitted: load the base first that it was fitted with"
        )


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
