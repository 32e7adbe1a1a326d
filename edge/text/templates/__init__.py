"""Rendering of chat templates in a separate process."""
