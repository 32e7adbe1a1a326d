"""Structure of models and the ways to cut them: pure data and decisions. This package never runs a model."""
