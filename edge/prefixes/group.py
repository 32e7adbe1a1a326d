"""A file of the prefix cache: the KV cache of a few consecutive blocks of a history, encrypted.

    8 bytes    file type and version
    4 bytes    the number of blocks, little-endian
    12 bytes   nonce, random
    32 bytes   for each block: its name; the first is also the file's name
    the rest   the data in AES-256-GCM, and its tag, which also authenticates all of the above

A file that was changed, truncated or renamed, or written with another key, is treated as missing.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Sequence
from typing import NamedTuple

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from edge.prefixes.store import PrefixStore

Buffer = bytes | bytearray | memoryview
MOST_BLOCKS = 16  # limit of blocks of a file
FILE_BYTES = 4 << 20  # data bytes of a file, unless one block is larger; larger files are not faster to read
_HEAD = struct.Struct("<8sI12s")
_MAGIC = b"edge.kv\x02"
_NAME_BYTES, _NONCE_BYTES, _TAG_BYTES = 32, 12, 16
HEADER_BYTES = _HEAD.size + MOST_BLOCKS * _NAME_BYTES  # maximum size of a header


def group_start(block: int) -> int:
    """Return the first block of the file group that contains `block`. Hashes from there on are needed to find `block`.

    No file contains blocks of two groups. Files are found by the name of their first block.
    """
    return block // MOST_BLOCKS * MOST_BLOCKS


def blocks_a_file(block_bytes: int, store_bytes: int, most: int = MOST_BLOCKS) -> int:
    """Return the number of blocks per file. A file then begins at every `group_start`.

    block_bytes: bytes of one block
    store_bytes: limit of all files, which should have room for several files
    most: limit of the result
    """
    blocks = MOST_BLOCKS
    while blocks > 1 and (blocks > most or blocks * block_bytes > min(FILE_BYTES, store_bytes // 8)):
        blocks //= 2
    return blocks


class Header(NamedTuple):
    """Header of a file of blocks. It is authentic only after `unseal` has accepted the file."""

    names: tuple[bytes, ...]  # names of the blocks
    content: bytes


def seal(cipher: AESGCM, names: Sequence[bytes], data: Buffer) -> bytearray:
    """Return the content of a file: header, and encrypted data with its tag."""
    nonce = os.urandom(_NONCE_BYTES)
    header = b"".join((_HEAD.pack(_MAGIC, len(names), nonce), *names))
    content = bytearray(len(header) + len(data) + _TAG_BYTES)
    content[: len(header)] = header
    cipher.encrypt_into(nonce, data, header, memoryview(content)[len(header) :])
    return content


def read_header(content: Buffer, name: bytes) -> Header | None:
    """Return the header of a file of this name, from its first HEADER_BYTES; None if the header is invalid."""
    if len(content) < _HEAD.size:
        return None
    magic, count, _ = _HEAD.unpack_from(content)
    names = bytes(content[_HEAD.size : _HEAD.size + _NAME_BYTES * count]) if count <= MOST_BLOCKS else b""
    if magic != _MAGIC or not names or len(names) < _NAME_BYTES * count or names[:_NAME_BYTES] != name:
        return None
    all_names = (names[at : at + _NAME_BYTES] for at in range(0, len(names), _NAME_BYTES))
    return Header(tuple(all_names), bytes(content[: _HEAD.size]) + names)


def data_bytes(header: Header, content: Buffer) -> int:
    """Return the data bytes of a file; negative if the file was truncated."""
    return len(content) - len(header.content) - _TAG_BYTES


def unseal(cipher: AESGCM, header: Header, content: memoryview, into: memoryview) -> bool:
    """Decrypt a file into memory of `data_bytes`. Return False if the file is not authentic."""
    nonce = header.content[_HEAD.size - _NONCE_BYTES : _HEAD.size]
    try:
        cipher.decrypt_into(nonce, content[len(header.content) :], header.content, into)
    except (InvalidTag, ValueError):
        return False
    return True


def count_blocks(store: PrefixStore) -> int:
    """Count the blocks in a store, from the headers of its files. Raises PrefixError if the folder cannot be read."""
    names = (bytes.fromhex(file.path.stem) for file in store.files())
    headers = (read_header(store.head(name, HEADER_BYTES) or b"", name) for name in names)
    return sum(len(header.names) for header in headers if header)
