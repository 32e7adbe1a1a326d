"""Tables of the text architectures of the pinned llama.cpp: their parts, and how their models may be cut. No code."""
