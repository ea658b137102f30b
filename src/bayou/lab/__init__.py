"""The laboratory: densities, data sets, experiments and pictures. Nothing else in bayou imports it."""
