"""Curvature: Gaussians over named tensors by the structure of their covariance."""

from bayou.curvature.covariance import Covariance, Diagonal

__all__ = ["Covariance", "Diagonal"]
