"""HTTP: access, bodies, errors, streams."""
