"""What a model is made of: its layers, tensors, graph and cost, read from its file."""
