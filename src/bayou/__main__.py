"""``python -m bayou`` is the ``bayou`` command."""

from __future__ import annotations

import io
import sys

from bayou.core.extras import extra


def main() -> None:
    """The command line, or what it needs that the core does not."""
    try:
        with extra("lab", "The command line"):
            from bayou.app.cli.app import main as run
    except ImportError as error:
        sys.exit(str(error))
    if isinstance(sys.stdout, io.TextIOWrapper):  # a pipe of Windows may have no ± and no σ
        sys.stdout.reconfigure(errors="replace")
    run()


if __name__ == "__main__":
    main()
