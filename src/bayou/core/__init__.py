"""What every package uses: random numbers by index, named tensors, files, settings, progress."""
