"""The GGUF container: reading, checking and writing it."""
