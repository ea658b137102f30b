"""bayou inside other libraries (scikit-learn, Lightning, BoTorch, ArviZ), and their flows inside bayou."""
