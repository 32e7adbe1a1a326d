"""HTTP: who is answered, bodies, errors, streams."""
