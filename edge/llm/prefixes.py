"""Keeping the keys and values of prompts on disk: which model and build they are of, and the keys that seal them."""

from __future__ import annotations

import hashlib
import secrets
from pathlib import Path

from edge.llama.library import PINNED_VERSION
from edge.llm.options import PrefixOptions
from edge.llm.states import States
from edge.prefixes.keys import KEY_BYTES, cache_key, derived
from edge.prefixes.sealed import SealedBlocks
from edge.prefixes.store import PrefixStore
from quant.gguf.file import GgufFile

_FORMAT = "edge-prefixes-1"
_BESIDE_DATA = 16 << 10  # bytes of a file, beside keys and values, at most
_SAMPLE_BYTES = 4096  # of each tensor's beginning, middle and end


def keep_prefixes(states: States, file: GgufFile, options: PrefixOptions, weights_bytes: int | None) -> None:
    """Keep what this device alone computes of prompts for the model in `file`, and use what is kept. PrefixError for a
    bad key file. A folder that cannot be used is a store that has nothing. weights_bytes: as of `seal`."""
    key = cache_key(options.key_folder)
    name_histories(states, key or secrets.token_bytes(KEY_BYTES))
    if key is not None:
        seal(states, options.folder, options.max_bytes, rank_key(key, fingerprint(file)), weights_bytes)


def name_histories(states: States, owner: bytes) -> None:
    """Let states name blocks of tokens, which only the owner's own device does."""
    states.history_key = derived(owner, b"history")


def rank_key(owner: bytes, part: str) -> bytes:
    """The key for what one rank keeps of its part of a model. It is all that the rank gets. part: a digest."""
    return derived(owner, b"rank", part.encode())


def seal(states: States, folder: Path, max_bytes: int, key: bytes, weights_bytes: int | None) -> None:
    """Let states be kept in a folder, under a key of their rank's part of the model. What they depend on beside it and
    the tokens is made part of the key, so that those of another build are not there. weights_bytes: that this may take
    of a budget of memory; None: there is no budget."""
    kinds = (_FORMAT, PINNED_VERSION, states.kv.name, str(states.block), states.factors)
    store, own_key = PrefixStore(folder, max_bytes), derived(key, *(kind.encode() for kind in kinds))
    buffers = (weights_bytes // 4, weights_bytes // 2 + 2 * _BESIDE_DATA) if weights_bytes else None
    states.seal(SealedBlocks(store, own_key, buffers))


def fingerprint(file: GgufFile) -> str:
    """A digest of a model's header, of samples of each tensor, and of when it was changed.

    Reading all of a large file would take longer than most prompts; an edit that keeps the size, the time and all
    samples is no accident.
    """
    digest = hashlib.sha256()
    for path in file.paths:
        status = path.stat()
        digest.update(f"{status.st_size} {status.st_mtime_ns}\n".encode())
    for key in sorted(file.metadata):
        digest.update(key.encode() + file.raw_value(key))
    for name, tensor in file.tensors.items():
        data = file.data(name)
        middle = len(data) // 2
        digest.update(f"{name} {tensor.type.name} {tensor.shape}\n".encode())
        for start in (0, middle, max(0, len(data) - _SAMPLE_BYTES)):
            digest.update(data[start : start + _SAMPLE_BYTES])
    return digest.hexdigest()
