"""The owner's secret key of the prefix cache, and derived values: names of blocks and keys of files.

Without the key, a block hash reveals nothing: neither its tokens nor whether they are a guessed text.
"""

from __future__ import annotations

import errno
import hashlib
import hmac
import os
import secrets
import stat
import struct
from collections.abc import Sequence
from pathlib import Path

from devices.files import locked, note_unkept, write_private
from devices.paths import state_folder
from edge.errors import PrefixError

KEY_BYTES = 32
_FILE = "prefix.key"


def owner_key(folder: Path | None = None) -> bytes:
    """Return the 32 random bytes in `prefix.key` of a folder (default: the user's state folder). They are made if
    missing.

    Raises PrefixError if the file is damaged, readable by others, unreadable, or cannot be made.
    """
    path = (folder or state_folder()) / _FILE
    try:
        try:
            return _checked(path)
        except FileNotFoundError:
            with locked(path.parent):  # if two processes start together, the second uses the key of the first
                try:
                    return _checked(path)
                except FileNotFoundError:
                    write_private(path, secrets.token_bytes(KEY_BYTES))
                    return _checked(path)
    except OSError as exc:
        raise PrefixError(
            f"the key of the prefix cache, {path}, cannot be used: {exc.strerror or exc}; correct that, delete"
            " the key, so that prompts are computed again, or disable the cache with --prefix-cache 0"
        ) from exc


def cache_key(folder: Path | None = None) -> bytes | None:
    """Return `owner_key`, or None if its file cannot be read or made, in which case no prefixes are stored.

    Raises PrefixError if the file is damaged or readable by others.
    """
    try:
        return owner_key(folder)
    except PrefixError as error:
        if not isinstance(error.__cause__, OSError):
            raise
        note_unkept(folder or state_folder(), error.__cause__)
        return None


def derived(key: bytes, *parts: bytes) -> bytes:
    """Return the HMAC-SHA256 (RFC 2104) of the parts, each preceded by its length in 8 bytes: 32 bytes."""
    message = b"".join(len(part).to_bytes(8, "little") + part for part in parts)
    return hmac.digest(key, message, hashlib.sha256)


def block_hashes(key: bytes, tokens: Sequence[int], block: int, namespace: str = "") -> list[bytes]:
    """Return the hash of each complete block of tokens, 32 bytes each.

    A hash covers the block's tokens and the previous hash, and thereby all tokens up to the end of its block. Prompts
    share exactly the hashes of their common leading blocks. The first hash also covers the namespace.

    tokens: token IDs, hashed as 32-bit little-endian integers; IDs of picture rows are hashed as decimal digits
    block: tokens per block, at least 1
    """
    if block < 1:
        raise ValueError(f"a block has at least 1 token, not {block}")
    chain: list[bytes] = []
    for start in range(0, len(tokens) - block + 1, block):
        own = tokens[start : start + block]
        data = struct.pack(f"<{block}i", *own) if min(own) >= -(1 << 31) else repr([*own]).encode()
        chain.append(derived(key, chain[-1] if chain else namespace.encode(), data))
    return chain


def _checked(path: Path) -> bytes:
    """Return the key in a file. Raises FileNotFoundError if there is none, and PrefixError if it is unfit as a key."""
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    with os.fdopen(handle, "rb") as file:
        status = os.fstat(handle)
        if stat.S_ISREG(status.st_mode) and status.st_uid != os.geteuid():  # HOME may belong to another user
            raise PermissionError(errno.EACCES, f"it has another owner (user {status.st_uid})")
        problem = _problem(status)
        key = b"" if problem else file.read(KEY_BYTES + 1)
    if problem is None and (len(key) != KEY_BYTES or not any(key)):
        problem = f"{status.st_size} bytes" if any(key) else f"{status.st_size} bytes that are all zero"
    if problem:
        raise PrefixError(
            f"{path} is not a key of a prefix cache: expected a file of {KEY_BYTES} random bytes that only you may"
            f" read, but the file has {problem}; delete it, and prompts are computed again"
        )
    return key


def _problem(status: os.stat_result) -> str | None:
    """Return why other users could know or choose the content of a file; None if they cannot."""
    if not stat.S_ISREG(status.st_mode):
        return "no content: it is not a regular file"
    if mode := status.st_mode & 0o077:
        return f"access for others (mode {0o600 | mode:04o})"
    return None
