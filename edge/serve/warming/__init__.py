"""Prefix warming: beginnings of the next prompts are computed while nobody asks."""
