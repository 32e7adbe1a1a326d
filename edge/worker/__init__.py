"""Worker: the daemon and its engine processes."""
