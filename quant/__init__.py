"""Tensor types, model file formats, and how numbers are stored."""
