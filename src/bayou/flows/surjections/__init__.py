"""Surjections and stochastic maps (SurVAE flows), and conditional distributions."""
