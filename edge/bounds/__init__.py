"""Bounds on answers that would never end: repetition loops and open JSON arrays."""
