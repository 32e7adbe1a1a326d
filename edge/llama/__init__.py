"""Stock llama.cpp: tensors, models, samplers, the quantizer, hooks in its graphs. All ctypes of the project is here."""
