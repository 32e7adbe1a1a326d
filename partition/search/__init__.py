"""Search for the best plans."""
