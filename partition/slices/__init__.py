"""Slices: how a part of a model is cut from the model's file."""
