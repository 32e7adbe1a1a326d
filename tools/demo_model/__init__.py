"""Train the bundled model: its grammar, tokenizer, network in PyTorch, training and export to GGUF."""
