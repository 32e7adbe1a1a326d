"""What is wrong with this device, its workers and their links, and what to do about it."""
