"""The worker: its daemon, and its engine processes."""
