"""Flows in continuous time: vector fields, solvers, the flow."""
