"""bayou inside other libraries (scikit-learn, Lightning, BoTorch, loggers), and their flows inside bayou."""
