"""The command line, ``bayou``."""
