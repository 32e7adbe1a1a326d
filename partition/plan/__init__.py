"""Plans: which device holds which part of a model."""
