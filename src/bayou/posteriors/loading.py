"""Posteriors from files: ``bayou.load``, and the parts that other files share with it."""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

from torch import nn

from bayou.calibration import restore_map
from bayou.core.files import FileError, StrPath, making, read_file
from bayou.metrics.certificate import Certificate
from bayou.network import with_output
from bayou.posteriors.checks import Checks
from bayou.posteriors.contents import check_contents, check_restored
from bayou.posteriors.posterior import Posterior
from bayou.posteriors.state import CALIBRATION, SavedState, check_base, is_in_file
from bayou.posteriors.updates import Updates

LOAD_OPTIONS = ("prior", "likelihood", "rules", "output")


def restore_posterior(saved: SavedState, net: nn.Module | Sequence[nn.Module]) -> Posterior:
    """Return the posterior with a state, of any class; one draw is made as a test.

    Args:
        saved: the state, read from a file.
        net: the network it was fitted to; of a mixture also a list, one for each component.

    Raises:
        FileError: if the state is not that of a posterior, or of another network.
    """
    classes = {cls.kind: cls for cls in Posterior.__subclasses__()}
    config = {"output": None} | saved.config
    kind = config.get("kind")
    if not isinstance(kind, str) or kind not in classes:
        raise FileError(
            f"{saved.path} holds a {kind!r}, not a posterior; expected one of {', '.join(classes)}"
        )
    has_many = not isinstance(net, nn.Module)
    if has_many and kind != "mixture":
        raise FileError(
            f"{saved.path} is not a mixture, so that it has one network, got a list; pass it alone"
        )
    # With options the error may be in them, and then it is raised as it is.
    with nullcontext() if saved.options else making("posterior", saved.path):
        if isinstance(net, nn.Module):
            device = next(net.parameters()).device
            tensors = {name: value.to(device) for name, value in saved.tensors.items()}
            saved = replace(saved, tensors=tensors)
        saved = replace(saved, config=config)
        check_contents(saved)
        if isinstance(net, nn.Module):
            net = with_output(net, saved.spec("output", object))
        posterior = classes[kind].restore(saved, net)
        posterior.stopped = config["stopped"]
        posterior.temperature = config.get("temperature", 1.0)
        posterior.updates = Updates.from_json(config.get("updates", {}))
        if CALIBRATION in config:
            posterior.calibration_map = restore_map(config[CALIBRATION], saved.group(CALIBRATION))
        if isinstance(net, nn.Module):
            fitted_net = posterior.target.net
            check_restored(posterior, saved, fitted_net if is_in_file(fitted_net) else net)
    return posterior


def load(
    path: StrPath, net: nn.Module | Sequence[nn.Module] | None = None, **options: Any
) -> Posterior:
    """Read the posterior in a file that ``posterior.save`` wrote.

    A file holds tensors and settings, but no code: the network has to be built first, as it was for
    the fit. The posterior predicts as it did when it was saved.

    Args:
        path: of the file.
        net: the network that it was fitted to. Of parameters that were fitted only the shapes
            matter; those that were frozen are not in the file and must have the same values (a
            digest tells). It is not changed, and its frozen parameters are shared. Of a mixture
            over different networks, a list of them in the order of its components.
        options: ``prior``, ``likelihood``, ``rules`` or ``output`` of the fit, if they have
            functions or classes of the user, which a file cannot hold.

    Returns:
        The posterior, of the class that was saved.

    Raises:
        FileError: for a file that is missing, truncated, damaged, foreign, or of another network.
        ValueError: without a network.

    Example::

        posterior.save("posterior.bayou")

        net = build_network()
        posterior = bayou.load("posterior.bayou", net)
        posterior.predict(x).mean
    """
    check_load(path, net, options)
    tensors, config = read_file(path)
    return restore_contents(SavedState(tensors, config, path, options), net)


def check_load(path: object, net: object, options: Collection[str]) -> None:
    """Raise a ValueError for arguments with which no posterior can be loaded.

    Args:
        path: the name of a file.
        net: a network, or a list of networks.
        options: the names of the options.
    """
    nets = list(net) if isinstance(net, list | tuple) else [net]
    has_nets = bool(nets) and all(isinstance(item, nn.Module | list | tuple) for item in nets)
    if not isinstance(path, str | os.PathLike) or net is None or not has_nets:
        raise ValueError(
            "load needs the name of a file and the network that was fitted, got "
            f"load({type(path).__name__}, {type(net).__name__}); a file holds tensors and no code, "
            "so that the network has to be built first: load('posterior.bayou', net)"
        )
    unknown = sorted(set(options) - set(LOAD_OPTIONS))
    if unknown:
        raise ValueError(
            f"load has no option {unknown[0]!r}; the options are {', '.join(LOAD_OPTIONS)}"
        )


def restore_contents(saved: SavedState, net: Any) -> Posterior:
    """Return the posterior of a file, with its checks and its certificate.

    Args:
        saved: what ``Posterior.contents`` returned, read from a file.
        net: the network that it was fitted to, or a list of them.

    Raises:
        FileError: if contents and network do not match.
    """
    config = saved.config
    path = saved.path
    posterior = restore_posterior(saved, net)
    with making("posterior", path):
        check_base(posterior.target, config["base"], path)
        if "checks" in config:  # not in files of earlier versions
            posterior.checks = Checks.from_json(config["checks"])
        if "certificate" in config:
            posterior.certificate = Certificate.from_json(config["certificate"])
    return posterior
