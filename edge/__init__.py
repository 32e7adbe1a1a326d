"""Runs models on this machine: the engine, generation, conversations."""
