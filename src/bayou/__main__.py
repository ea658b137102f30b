"""``python -m bayou`` is the ``bayou`` command."""

from __future__ import annotations

import sys


def main() -> None:
    """The command line, or what it needs that the core does not."""
    try:
        from bayou.cli.app import main as run
    except ModuleNotFoundError as error:
        sys.exit(f"the command line needs {error.name}, which is not installed: pip install 'bayou[lab]'")
    run()


if __name__ == "__main__":
    main()
