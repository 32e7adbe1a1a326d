"""Machines: cores, memory, disks, networks, and how other machines reach them."""
