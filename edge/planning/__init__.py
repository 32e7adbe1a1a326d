"""Devices and links measured, and the plans that follow from the measurements."""
