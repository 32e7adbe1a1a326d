"""What the machines are: cores, memory, and how they are reached."""
