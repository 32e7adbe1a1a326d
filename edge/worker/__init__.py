"""The worker's daemon, and the engine processes that it starts."""
