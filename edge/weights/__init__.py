"""Weights: in memory, on disk, on a GPU, with more or fewer bits, and with LoRA adapters."""
