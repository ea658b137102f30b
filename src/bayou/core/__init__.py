"""What every package stands on: random numbers by index, named tensors, files, settings, progress."""
