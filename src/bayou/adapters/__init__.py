"""bayou inside other libraries: scikit-learn, BoTorch."""
