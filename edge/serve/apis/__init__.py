"""The HTTP APIs, one file for each."""
