"""Profiles of devices and links: for planning, remembered, and corrected by use."""
