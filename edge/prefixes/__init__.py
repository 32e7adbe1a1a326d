"""Prefix cache on disk: names of KV cache blocks, encrypted files, and their folder."""
