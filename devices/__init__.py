"""Machines: cores, memory, and how they are reached."""
