"""Flows of images and sequences, VAEs and amortized flows."""
