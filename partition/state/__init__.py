"""KV cache of a sequence in llama.cpp's format: read, checked, joined and cut."""
