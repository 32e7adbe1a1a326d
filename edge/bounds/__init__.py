"""Bounds that end answers which would go on for ever."""
