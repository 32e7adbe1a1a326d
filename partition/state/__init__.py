"""Keys and values of a sequence as llama.cpp writes them: read, checked, joined and cut."""
