"""Slices: the rules for cutting a part of a model from the model's file."""
