"""Constraints on answers, compiled and followed in processes of their own, which can be killed."""
