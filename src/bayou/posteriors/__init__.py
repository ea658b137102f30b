"""Posteriors: distributions over a network's named tensors, and their files."""

from __future__ import annotations

import os
from contextlib import nullcontext
from typing import Any

from torch import Tensor, nn

from bayou.core.files import FileError, StrPath, making, read_file
from bayou.network import with_output
from bayou.network.inputs import Select
from bayou.posteriors.checks import Checks
from bayou.posteriors.empirical import Empirical
from bayou.posteriors.gaussian import GaussianPosterior
from bayou.posteriors.guided import Guided
from bayou.posteriors.masked import Masked
from bayou.posteriors.mixture import Mixture
from bayou.posteriors.posterior import Posterior
from bayou.posteriors.state import check_base, check_contents, check_restored, restore_spec


def restore_any(
    tensors: dict[str, Tensor],
    config: dict[str, Any],
    net: nn.Module,
    output: Select = None,
    **options: Any,
) -> Posterior:
    """Return the posterior with a state, of any kind; one draw is made as a test.

    Args:
        tensors: of the state.
        config: the JSON of the state, and the name of its file as "path".
        net: the network it was fitted to.
        output: which output of the network was fitted, instead of that of the file.
        options: specs that replace those of the file, see ``load``.

    Raises:
        FileError: if the state is not that of a posterior, or of another network.
    """
    classes = {cls.kind: cls for cls in Posterior.__subclasses__()}
    path = config["path"]
    kind = config.get("kind")
    if not isinstance(kind, str) or kind not in classes:
        raise FileError(
            f"{path} holds a {kind!r}, not a posterior; expected one of {', '.join(classes)}"
        )
    check_contents(tensors, config)
    # With options the error may be in them, and then it is raised as it is.
    with nullcontext() if options else making("posterior", path):
        if output is None:
            output = restore_spec(path, "output", config.get("output"), object)
        net = with_output(net, output)
        posterior = classes[kind].restore(tensors, config, net, **options)
        posterior.stopped = config["stopped"]
        posterior.temperature = config.get("temperature", 1.0)
        check_restored(posterior, tensors, config, net)
    return posterior


def load(path: StrPath, net: nn.Module | None = None, **options: Any) -> Posterior:
    """Read the posterior in a file that ``posterior.save`` wrote.

    A file holds tensors and settings, but no code: the network has to be built first, as it was for
    the fit. The posterior predicts as it did when it was saved.

    Args:
        path: of the file.
        net: the network that it was fitted to. Of parameters that were fitted only the shapes
            matter; those that were frozen are not in the file and must have the same values (a
            digest tells). It is not changed, and its frozen parameters are shared.
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
    if not isinstance(path, str | os.PathLike) or not isinstance(net, nn.Module):
        raise ValueError(
            "load needs the name of a file and the network that was fitted, got "
            f"load({type(path).__name__}, {type(net).__name__}); a file holds tensors and no code, "
            "so that the network has to be built first: load('posterior.bayou', net)"
        )
    tensors, config = read_file(path)
    posterior = restore_any(tensors, config | {"path": str(path)}, net, **options)
    check_base(posterior.target, config.get("base"), path)
    if "checks" in config:  # not in files of earlier versions
        with making("checks", path):
            posterior.checks = Checks.from_json(config["checks"])
    return posterior


__all__ = [
    "Empirical",
    "FileError",
    "GaussianPosterior",
    "Guided",
    "Masked",
    "Mixture",
    "Posterior",
    "load",
]
