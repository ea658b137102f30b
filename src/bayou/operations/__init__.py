"""What one does with a posterior: one file an operation, each a function from a posterior to something useful."""
