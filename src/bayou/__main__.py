"""``python -m bayou`` is the ``bayou`` command."""

from bayou.cli.app import main

main()
