"""bayou inside other libraries (scikit-learn, Lightning, BoTorch, ArviZ, loggers), and their flows inside bayou."""
