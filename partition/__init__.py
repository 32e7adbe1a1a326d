"""What a model is made of, and how it can be cut. Pure data and decisions; it never runs a model."""
