"""Python interface to stock llama.cpp: models, contexts, samplers, quantizer, graph hooks. Nearly all ctypes code is
here."""
