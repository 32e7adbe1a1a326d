"""The APIs that are spoken: one file each."""
