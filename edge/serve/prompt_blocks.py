"""Beginnings of prompts that each replica has computed, so that a conversation stays where its prefix is cached."""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Sequence
from hashlib import blake2b

from edge.serve.served import Generation

BLOCK_CHARS = 256
_MOST_BLOCKS = 1 << 14  # blocks remembered for each replica; the least recently used ones are forgotten


def prompt_text(generation: Generation) -> str:
    """Return a text that two prompts have in common as far as their tokens agree."""
    if generation.messages is not None:
        head = json.dumps([generation.tools, generation.variables], default=str)
        return "\n".join([head, *(json.dumps(message, default=str) for message in generation.messages)])
    if generation.infill is not None:
        return f"{generation.infill.prefix}"
    prompt = generation.prompt or ""
    return prompt if isinstance(prompt, str) else " ".join(map(str, prompt))


def block_digests(generation: Generation, text: str) -> list[bytes]:
    """Return a digest for each whole block of a prompt's text. It also depends on all blocks before.

    Prompts with different namespaces or adapters share no keys and values, and so no digests.
    """
    digest = blake2b(f"{generation.namespace}\0{generation.adapters}\0".encode(), digest_size=8)
    digests = []
    for start in range(0, len(text) - BLOCK_CHARS + 1, BLOCK_CHARS):
        digest.update(text[start : start + BLOCK_CHARS].encode(errors="replace"))
        digests.append(digest.digest())
    return digests


class PromptBlocks:
    """Blocks of the prompts that one replica has computed."""

    def __init__(self) -> None:
        self._digests: OrderedDict[bytes, None] = OrderedDict()

    def add(self, digests: Sequence[bytes]) -> None:
        """Remember the blocks of a prompt."""
        for digest in reversed(digests):  # the first blocks are forgotten last
            self._digests[digest] = None
            self._digests.move_to_end(digest)
        while len(self._digests) > _MOST_BLOCKS:
            self._digests.popitem(last=False)

    def n_common(self, digests: Sequence[bytes]) -> int:
        """Return how many blocks at the beginning of a prompt the replica has computed."""
        return next((i for i, digest in enumerate(digests) if digest not in self._digests), len(digests))
