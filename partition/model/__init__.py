"""Structure of a model, read from its file: layers, tensors, graph and cost."""
