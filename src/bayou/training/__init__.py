"""Training: data as batches, the loop, checkpoints, checks for values that are not finite, Ctrl-C,
CUDA graphs.
"""
