"""The command line of edge."""
