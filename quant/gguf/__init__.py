"""The GGUF container: read, checked and written."""
