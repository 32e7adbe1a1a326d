"""Speculative decoding: drafts of the next tokens, and whether verifying them pays."""
