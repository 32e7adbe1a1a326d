"""Discrete-event simulation of a plan that serves many requests."""
