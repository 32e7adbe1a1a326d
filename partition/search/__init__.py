"""The search for the best plans."""
