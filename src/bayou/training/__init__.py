"""The machinery of a fit: data as batches, the loop, checkpoints, guards against bad numbers and Ctrl-C, graphs."""
