"""The commands, one file each: arguments, a call, and printing."""
