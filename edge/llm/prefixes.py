"""Prefix cache on disk: identification of the model and build, and keys that encrypt the blocks."""

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
_BESIDE_DATA = 16 << 10  # upper bound on bytes of a file in addition to KV cache
_SAMPLE_BYTES = 4096  # bytes sampled at each tensor's beginning, middle and end


def keep_prefixes(states: States, file: GgufFile, options: PrefixOptions, weights_bytes: int | None) -> None:
    """Enable the prefix cache for a model that runs on this device alone.

    weights_bytes: as for `seal`.

    Raises PrefixError for an invalid key file. A folder that cannot be used counts as an empty cache.
    """
    key = cache_key(options.key_folder)
    name_histories(states, key or secrets.token_bytes(KEY_BYTES))
    if key is not None:
        seal(states, options.folder, options.max_bytes, rank_key(key, fingerprint(file)), weights_bytes)


def name_histories(states: States, owner: bytes) -> None:
    """Let states compute hashes of blocks. Only the owner's device does this."""
    states.history_key = derived(owner, b"history")


def rank_key(owner: bytes, part: str) -> bytes:
    """Return the key of one rank for its part of a model. The rank gets no other key. part: digest of the part."""
    return derived(owner, b"rank", part.encode())


def seal(states: States, folder: Path, max_bytes: int, key: bytes, weights_bytes: int | None) -> None:
    """Keep states in a folder, encrypted with a key of their rank's part of the model.

    The format, the llama.cpp version and the KV cache type are mixed into the key, so blocks of another build are not
    found.

    weights_bytes: bytes of a memory budget that this may use; None: no budget.
    """
    kinds = (_FORMAT, PINNED_VERSION, states.kv.name, str(states.block), states.factors)
    store, own_key = PrefixStore(folder, max_bytes), derived(key, *(kind.encode() for kind in kinds))
    buffers = (weights_bytes // 4, weights_bytes // 2 + 2 * _BESIDE_DATA) if weights_bytes else None
    states.seal(SealedBlocks(store, own_key, buffers))


def fingerprint(file: GgufFile) -> str:
    """Return a digest of a model's header, of samples of each tensor, and of its modification time.

    Reading a large file completely would take longer than most prompts. An edit that preserves size, time and all
    samples does not happen by accident.
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
