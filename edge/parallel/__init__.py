"""Ranks that compute one step together."""
