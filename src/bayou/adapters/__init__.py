"""bayou inside other libraries: scikit-learn, Lightning, loggers."""
