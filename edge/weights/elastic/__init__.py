"""Elastic precision: a model that follows the memory there is."""
