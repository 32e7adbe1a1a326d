"""Batches of requests, answered while nobody else asks."""
