"""Bytes between devices: frames, links and collectives. Imports nothing else of the project."""
