"""Stock llama.cpp: tensors, models, samplers, the quantizer, hooks in its graphs. Nearly all ctypes is here."""
