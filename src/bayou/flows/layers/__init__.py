"""Bijections of vectors: elementwise, linear, coupling, autoregressive, by determinant
identities.
"""
