"""``python -m bayou`` is the ``bayou`` command."""

from bayou.lab.cli import main

main()
