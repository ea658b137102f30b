"""The contract of a map, compositions, base distributions and flows."""
