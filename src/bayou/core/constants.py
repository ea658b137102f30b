"""Numbers that formulas in several packages share."""

from __future__ import annotations

import math
from typing import Final

LOG_2PI: Final = math.log(2 * math.pi)
