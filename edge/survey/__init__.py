"""Profiling of devices and links: measured for planning, and remembered."""
