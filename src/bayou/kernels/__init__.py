"""Kernels: pure init/step transitions of Markov chains."""
