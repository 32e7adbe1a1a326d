"""How near to each other the ways are in which one model can be computed."""
