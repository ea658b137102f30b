"""bayou inside other libraries: scikit-learn, Lightning, BoTorch, ArviZ."""
