"""Constrained decoding: grammars and schemas, compiled and followed in processes of their own, which can be killed."""
