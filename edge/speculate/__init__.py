"""Speculative decoding: draft the next tokens, and decide whether verifying drafts is faster."""
