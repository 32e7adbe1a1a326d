"""Smaller models: measured for sensitivity, fitted to a size, quantized and compared."""
