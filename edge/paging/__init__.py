"""Weights larger than memory: what stays, what streams through a window, and who needs what when."""
