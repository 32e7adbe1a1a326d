"""Constrained decoding: grammars and schemas are compiled and followed in separate processes, which can be killed."""
