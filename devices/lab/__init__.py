"""A cluster emulated on one machine: devices, their limits, and the network between them."""
