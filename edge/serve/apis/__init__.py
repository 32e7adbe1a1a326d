"""The HTTP APIs: one file each."""
