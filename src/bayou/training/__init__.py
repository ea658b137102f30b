"""Training: data as batches, the loop and its parts, checkpoints, guards and CUDA graphs."""
