"""What each text architecture of the pinned llama.cpp is made of, and how its models may be cut: tables, no code."""
