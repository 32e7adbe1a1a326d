"""A model within a budget of a GPU's memory."""
