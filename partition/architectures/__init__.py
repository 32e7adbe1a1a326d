"""Tables of the text architectures of the pinned llama.cpp: their parts, and the rules for cutting their models."""
