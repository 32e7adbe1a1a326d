"""The commands, one file each: options, a call into edge, and printing."""
