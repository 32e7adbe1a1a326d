"""Slices of model files: cut, written, kept by digest, and never sent twice."""
