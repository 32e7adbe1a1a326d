"""A file of kept keys and values: those of a few consecutive blocks of a history, encrypted.

    8 bytes    what this is, and its version
    4 bytes    the number of blocks, little-endian
    12 bytes   nonce, random
    32 bytes   of each block: its name; the first is the file's
    the rest   the data in AES-256-GCM, and its tag; all of the above is authenticated with it

So whatever is not just what was kept under this name with this key is not there: bytes cannot be changed, cut off or
put under another name.
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
MOST_BLOCKS = 16  # of a file
FILE_BYTES = 4 << 20  # of data in a file, unless one block has more: larger files are read no faster
_HEAD = struct.Struct("<8sI12s")
_MAGIC = b"edge.kv\x02"
_NAME_BYTES, _NONCE_BYTES, _TAG_BYTES = 32, 12, 16
HEADER_BYTES = _HEAD.size + MOST_BLOCKS * _NAME_BYTES  # at most


def group_start(block: int) -> int:
    """The block of a history whose hash, and all behind it, must be given where those from `block` on are wanted. No
    file holds blocks of both sides, so what is there is found by the names of its first block."""
    return block // MOST_BLOCKS * MOST_BLOCKS


def blocks_a_file(block_bytes: int, store_bytes: int, most: int = MOST_BLOCKS) -> int:
    """Return how many blocks of so many bytes go to one file: so many that the block of a `group_start` begins one, and
    `most` at most. store_bytes: that all files may have; it should have room for several."""
    blocks = MOST_BLOCKS
    while blocks > 1 and (blocks > most or blocks * block_bytes > min(FILE_BYTES, store_bytes // 8)):
        blocks //= 2
    return blocks


class Header(NamedTuple):
    """Header of a file of blocks. Only what `unseal` accepts was written with the key."""

    names: tuple[bytes, ...]  # of its blocks
    content: bytes


def seal(cipher: AESGCM, names: Sequence[bytes], data: Buffer) -> bytearray:
    """The content of a file."""
    nonce = os.urandom(_NONCE_BYTES)
    header = b"".join((_HEAD.pack(_MAGIC, len(names), nonce), *names))
    content = bytearray(len(header) + len(data) + _TAG_BYTES)
    content[: len(header)] = header
    cipher.encrypt_into(nonce, data, header, memoryview(content)[len(header) :])
    return content


def read_header(content: Buffer, name: bytes) -> Header | None:
    """Read the header of a file of this name, from its first HEADER_BYTES; None if it is no such file."""
    if len(content) < _HEAD.size:
        return None
    magic, count, _ = _HEAD.unpack_from(content)
    names = bytes(content[_HEAD.size : _HEAD.size + _NAME_BYTES * count]) if count <= MOST_BLOCKS else b""
    if magic != _MAGIC or not names or len(names) < _NAME_BYTES * count or names[:_NAME_BYTES] != name:
        return None
    all_names = (names[at : at + _NAME_BYTES] for at in range(0, len(names), _NAME_BYTES))
    return Header(tuple(all_names), bytes(content[: _HEAD.size]) + names)


def data_bytes(header: Header, content: Buffer) -> int:
    """Bytes of data in a file; below 0 where it was cut off."""
    return len(content) - len(header.content) - _TAG_BYTES


def unseal(cipher: AESGCM, header: Header, content: memoryview, into: memoryview) -> bool:
    """Decrypt a file to memory of `data_bytes`. False where it is not what was kept under its name with this key."""
    nonce = header.content[_HEAD.size - _NONCE_BYTES : _HEAD.size]
    try:
        cipher.decrypt_into(nonce, content[len(header.content) :], header.content, into)
    except (InvalidTag, ValueError):
        return False
    return True


def count_blocks(store: PrefixStore) -> int:
    """Count the blocks that the files of a store say that they hold. PrefixError where its folder cannot be read."""
    names = (bytes.fromhex(file.path.stem) for file in store.files())
    headers = (read_header(store.head(name, HEADER_BYTES) or b"", name) for name in names)
    return sum(len(header.names) for header in headers if header)
