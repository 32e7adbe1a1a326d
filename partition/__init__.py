"""Model structure and the ways to cut it: pure data and decisions. It never runs a model."""
