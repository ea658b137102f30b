"""Residual flows and the contractive networks they are made of."""
