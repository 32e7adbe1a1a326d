"""Profiling of devices and links: measured for planning, remembered, and corrected by use."""
