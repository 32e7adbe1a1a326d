"""Prefix warming: likely prompt prefixes are computed while the server is idle."""
