"""Measurements and checks of devices and links."""
