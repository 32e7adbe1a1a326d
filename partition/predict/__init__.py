"""Predicted cost of a plan: time, memory, bytes and energy, from measurements."""
