"""Bytes between devices: frames, links and collectives. It imports only the errors of edge."""
