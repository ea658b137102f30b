"""Runs by name: methods, networks and settings as plain values, and the folders that keep what came
out.
"""
