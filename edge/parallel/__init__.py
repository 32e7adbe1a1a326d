"""Tensor and pipeline parallelism: ranks that compute each step together."""
