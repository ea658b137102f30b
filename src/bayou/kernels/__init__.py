"""Kernels: pure init/step transitions of Markov chains, over flat vectors (C, D) of C chains.

Noise is an argument of every step. ``sgld``, ``psgld`` and ``sghmc`` take a (minibatch) gradient;
``hmc``, ``nuts`` and ``mclmc`` take a density, w (C, D) -> log p (C,) and its gradient (C, D).
"""

from bayou.kernels import adaptation, hmc, mclmc, nuts, psgld, sghmc, sgld
from bayou.kernels.joint import Joint

__all__ = ["Joint", "adaptation", "hmc", "mclmc", "nuts", "psgld", "sghmc", "sgld"]
