"""Curvature: generalized Gauss-Newton matrices by structure, and Gaussians over named tensors."""

from bayou.curvature.covariance import Covariance, Diagonal, Full
from bayou.curvature.information import information
from bayou.curvature.kronecker import Kronecker
from bayou.curvature.swag import LowRankPlusDiagonal

__all__ = ["Covariance", "Diagonal", "Full", "Kronecker", "LowRankPlusDiagonal", "information"]
