"""Published experiments: ``python -m experiments.reproduce NAME`` runs one again, from a clone."""
