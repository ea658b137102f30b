"""What methods share: the abstract class, starts, checks of data and results, runs of chains,
members of ensembles.
"""
