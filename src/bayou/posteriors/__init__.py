"""Posteriors: distributions over a network's named tensors, and their files."""

from __future__ import annotations

import os
from typing import Any

from torch import nn

from bayou.posteriors.files import FileError, read_file
from bayou.posteriors.guided import Guided
from bayou.posteriors.posterior import Posterior

_KINDS = {"guided": Guided}


def load(path: str | os.PathLike[str], net: nn.Module, **options: Any) -> Posterior:
    """The posterior in a file, for the network that it was fitted to; damaged or foreign files raise a FileError."""
    kind = read_file(path)[1].get("kind")
    if kind not in _KINDS:
        raise FileError(f"{path} holds a {kind!r}, not a posterior; expected one of {', '.join(_KINDS)}")
    return _KINDS[kind].load(path, net, **options)


__all__ = ["FileError", "Guided", "Posterior", "load"]
