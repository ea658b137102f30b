"""Published experiments, run again: ``bayou reproduce NAME``, from a clone of the repository."""
