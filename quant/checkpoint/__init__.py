"""Hugging Face checkpoints, converted to GGUF."""
