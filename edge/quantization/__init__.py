"""Quantization: sensitivity of tensors, choice of types for a size, writing, and comparison."""
