"""A plan that serves many requests, simulated by discrete events."""
