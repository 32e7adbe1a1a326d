"""Stub of the package for Home Assistant's cloud. Home Assistant imports the package, and the tests do not use it."""

remote = None
