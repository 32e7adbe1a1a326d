"""Engines of a rank that computes in a browser's page."""
