"""Functions that a model may call: told, constrained, recognized."""
