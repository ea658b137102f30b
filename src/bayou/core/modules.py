"""``nn.ModuleList`` with a type for its items; at run time it is the list itself."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, TypeVar

from torch import nn

M = TypeVar("M", bound=nn.Module)

if TYPE_CHECKING:
    from typing import Any, Generic

    class Modules(nn.ModuleList, Generic[M]):
        """``nn.ModuleList`` of M."""

        def __iter__(self) -> Iterator[M]: ...
        def __reversed__(self) -> Iterator[M]: ...
        def __getitem__(self, index: int | slice) -> Any: ...
else:
    Modules = nn.ModuleList
