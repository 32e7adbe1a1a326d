"""Thoughts of models: their marks, their separation from answers, and their budget."""
