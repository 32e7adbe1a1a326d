"""Plans of a model: search, comparison, measurement and deployment."""
