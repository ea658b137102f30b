"""What methods share: the abstract class, starts, checks of data, chains and ensembles."""
