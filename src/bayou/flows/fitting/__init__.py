"""Fitting a flow to data or to a density."""
