"""Flows of integers, their base distributions, and the codec."""
