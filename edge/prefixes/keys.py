"""The key that only the owner has, and what is made from it: names of tokens and keys of files.

Whoever lacks the key learns nothing from a block hash: not the tokens behind it, nor whether they are some
that the reader thinks of.
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
    """The 32 random bytes in `prefix.key` of a folder (default: this user's state folder). Made where they are missing.

    PrefixError where the file is damaged, or others could know what is in it, or it cannot be read or made.
    """
    path = (folder or state_folder()) / _FILE
    try:
        try:
            return _checked(path)
        except FileNotFoundError:
            with locked(path.parent):  # of two processes that begin at once, the second takes the key of the first
                try:
                    return _checked(path)
                except FileNotFoundError:
                    write_private(path, secrets.token_bytes(KEY_BYTES))
                    return _checked(path)
    except OSError as exc:
        raise PrefixError(
            f"the key of the prefix cache, {path}, cannot be used: {exc.strerror or exc}; make that possible, delete"
            " it, so that prompts are computed again, or use no such cache: --prefix-cache 0"
        ) from exc


def cache_key(folder: Path | None = None) -> bytes | None:
    """Return `owner_key`; None if its file cannot be read or made, and then nothing can be kept. PrefixError if the
    file is damaged, or others could know what is in it."""
    try:
        return owner_key(folder)
    except PrefixError as error:
        if not isinstance(error.__cause__, OSError):
            raise
        note_unkept(folder or state_folder(), error.__cause__)
        return None


def derived(key: bytes, *parts: bytes) -> bytes:
    """HMAC-SHA256 (RFC 2104) of the parts, each after its length in 8 bytes: 32 bytes."""
    message = b"".join(len(part).to_bytes(8, "little") + part for part in parts)
    return hmac.digest(key, message, hashlib.sha256)


def block_hashes(key: bytes, tokens: Sequence[int], block: int, namespace: str = "") -> list[bytes]:
    """Return the hash, 32 bytes, of each whole block of tokens: of the block's tokens and the hash before it. The first
    includes the namespace: the same tokens have other hashes in another one.

    So a hash stands for all tokens up to the end of its block: prompts share the hashes of just the blocks that they
    begin with. block: tokens of a block, at least 1. Tokens count as 32-bit integers, little-endian; a picture's row
    counts as its id in decimal digits.
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
    """The key in a file. FileNotFoundError where there is none; PrefixError where it is not fit to be one."""
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    with os.fdopen(handle, "rb") as file:
        status = os.fstat(handle)
        if stat.S_ISREG(status.st_mode) and status.st_uid != os.geteuid():  # HOME may be that of another user
            raise PermissionError(errno.EACCES, f"it has another owner (user {status.st_uid})")
        problem = _problem(status)
        key = b"" if problem else file.read(KEY_BYTES + 1)
    if problem is None and (len(key) != KEY_BYTES or not any(key)):
        problem = f"{status.st_size} bytes" if any(key) else f"{status.st_size} bytes that are all zero"
    if problem:
        raise PrefixError(
            f"{path} is no key of a prefix cache: needed is a file of {KEY_BYTES} random bytes that only you may read,"
            f" there is one with {problem}; delete it, and prompts are computed again"
        )
    return key


def _problem(status: os.stat_result) -> str | None:
    """Why others could know, or could have chosen, what is in a file."""
    if not stat.S_ISREG(status.st_mode):
        return "no content: it is no regular file"
    if mode := status.st_mode & 0o077:
        return f"access for others (mode {0o600 | mode:04o})"
    return None
