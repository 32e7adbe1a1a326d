"""Thoughts of models: how they are marked, told apart from answers, and bounded."""
