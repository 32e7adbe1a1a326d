"""Elastic precision: a model that adapts its size to the available memory."""
