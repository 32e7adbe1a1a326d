"""A file of kept blocks: consecutive ones of a history, each encrypted for itself.

    8 bytes    what this is, and its version
    4 bytes    the number of blocks, little-endian
    48 bytes   of each block: 32 its name, 12 a random nonce, 4 its length below, little-endian

From byte 4096 on follow the blocks, each in AES-256-GCM with its tag, and each on a page of 4096 bytes of its own, so
that a disk can write them to memory by itself. All of the above is authenticated with each. So whatever is not just
what was kept under this name with this key is not there: blocks cannot be changed, cut off, or put in another place.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Sequence
from dataclasses import dataclass

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

PAGE = 4096
MOST_BLOCKS = 8  # of a file
FILE_BYTES = 4 << 20  # of data in a file, unless one block has more: larger files are read no faster
_MAGIC = b"edge.kv\x02"
_COUNT = struct.Struct("<I")
_ENTRY = struct.Struct("<32s12sI")
_NONCE_BYTES, _TAG_BYTES = 12, 16


def group_start(block: int) -> int:
    """The block of a history from which on links must be given, where those from `block` on are wanted. No file holds
    blocks of both sides, so what is there is found by the names of its first block."""
    return block // MOST_BLOCKS * MOST_BLOCKS


def blocks_a_file(block_bytes: int, store_bytes: int) -> int:
    """How many blocks of so many bytes go to one file: so many that the block of a `group_start` begins one.
    store_bytes: that all files may have; it should have room for several."""
    blocks = MOST_BLOCKS
    while blocks > 1 and blocks * block_bytes > min(FILE_BYTES, store_bytes // 8):
        blocks //= 2
    return blocks


@dataclass(frozen=True, slots=True)
class SealedBlock:
    """A block in a file."""

    name: bytes
    nonce: bytes
    start: int  # in the file
    n_bytes: int
    header: bytes  # of the file

    @property
    def data_bytes(self) -> int:
        """Of its data."""
        return self.n_bytes - _TAG_BYTES

    def unseal(self, cipher: AESGCM, content: memoryview, into: memoryview) -> bool:
        """Decrypt `content`, which the file has in its place, to `data_bytes` of memory. False where it is not what was
        kept under this name with this key."""
        try:
            cipher.decrypt_into(self.nonce, content, self.header, into)
        except (InvalidTag, ValueError):
            return False
        return True


def seal(cipher: AESGCM, names: Sequence[bytes], blocks: Sequence[bytes]) -> bytearray:
    """The content of a file, whose name is the first of `names`."""
    nonces = [os.urandom(_NONCE_BYTES) for _ in names]
    entries = [
        _ENTRY.pack(name, nonce, len(data) + _TAG_BYTES)
        for name, nonce, data in zip(names, nonces, blocks, strict=True)
    ]
    header = b"".join((_MAGIC, _COUNT.pack(len(names)), *entries))
    sealed = _blocks(header)
    content = bytearray(sealed[-1].start + sealed[-1].n_bytes)
    content[: len(header)] = header
    for block, data in zip(sealed, blocks, strict=True):
        place = memoryview(content)[block.start : block.start + block.n_bytes]
        cipher.encrypt_into(block.nonce, data, block.header, place)
    return content


def read_header(content: memoryview, name: bytes, file_bytes: int) -> tuple[SealedBlock, ...] | None:
    """The blocks of a file of this name and size, as its first bytes say, of which a page is enough; None where they
    are no such header. Only what `SealedBlock.unseal` accepts was written by whoever has the key."""
    start = len(_MAGIC) + _COUNT.size
    if len(content) < start or content[: len(_MAGIC)] != _MAGIC:
        return None
    [count] = _COUNT.unpack_from(content, len(_MAGIC))
    stop = start + count * _ENTRY.size
    if not 0 < count <= MOST_BLOCKS or len(content) < stop:
        return None
    blocks = _blocks(bytes(content[:stop]))
    if blocks[0].name != name or blocks[-1].start + blocks[-1].n_bytes != file_bytes:
        return None
    return blocks if all(block.data_bytes >= 0 for block in blocks) else None


def _blocks(header: bytes) -> tuple[SealedBlock, ...]:
    blocks: list[SealedBlock] = []
    at = PAGE
    for name, nonce, n_bytes in _ENTRY.iter_unpack(header[len(_MAGIC) + _COUNT.size :]):
        blocks.append(SealedBlock(name, nonce, at, n_bytes, header))
        at = -(-(at + n_bytes) // PAGE) * PAGE
    return tuple(blocks)
