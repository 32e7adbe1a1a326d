"""Model files: fetched from the hub, or synthesized in the shape of well-known models."""
