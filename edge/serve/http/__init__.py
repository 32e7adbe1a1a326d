"""HTTP layer: access control, request bodies, errors and streams."""
