"""Quantization: measure the sensitivity of tensors, choose types for a file size, write and compare models."""
