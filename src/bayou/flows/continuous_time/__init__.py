"""Continuous flows: vector fields, ODE solvers, the flow."""
