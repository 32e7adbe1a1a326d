"""Connections between devices: channels, credentials, and the links between ranks."""
