"""What devices and links can do, measured: for planning, remembered, and corrected by use."""
