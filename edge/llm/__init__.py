"""A language model on one device: its engine, sequences, sampling, templates and conversations."""
