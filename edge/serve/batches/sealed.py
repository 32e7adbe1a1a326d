"""Encrypted files of records: only names and sizes are in the clear.

A record is its length (4 bytes, little-endian), a nonce (12 bytes), and the content in AES-256-GCM, authenticated with
the file's name and the record's number: records cannot be changed, moved or left out, except at the end.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import cached_property
from pathlib import Path

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from devices.files import write_private
from edge.prefixes.keys import derived

_HEAD = struct.Struct("<I12s")
_SUFFIX = ".sealed"
_VERSION = b"batches 1"  # of what records are: those of others cannot be read


class SealedFolder:
    """Files of records in a folder, which is made with the first one."""

    def __init__(self, folder: Path, owner_key: Callable[[], bytes]) -> None:
        """owner_key: returns the secret that the key is derived from; called once it is needed."""
        self._folder, self._owner_key = folder, owner_key

    @cached_property
    def _cipher(self) -> AESGCM:
        return AESGCM(derived(self._owner_key(), _VERSION))

    def names(self) -> list[str]:
        """Return the names of all files."""
        return sorted(path.stem for path in self._folder.glob(f"*{_SUFFIX}"))

    def sizes(self) -> dict[str, int]:
        """Return the bytes of all files, by name."""
        return {path.stem: path.stat().st_size for path in self._folder.glob(f"*{_SUFFIX}")}

    def write(self, name: str, records: Sequence[bytes]) -> None:
        """Write a file whole, in place of what it was. OSError, PrefixError."""
        write_private(self._path(name), b"".join(self._sealed(name, n, record) for n, record in enumerate(records)))

    def append(self, name: str, number: int, record: bytes) -> None:
        """Append a record to a file that has so many, or nothing. OSError."""
        path, content = self._path(name), self._sealed(name, number, record)
        n_bytes = path.stat().st_size
        try:
            with path.open("ab") as file:
                file.write(content)
        except OSError:
            os.truncate(path, n_bytes)  # no record behind a part of one can be read
            raise

    def records(self, name: str) -> Iterator[bytes]:
        """Yield the records of a file, up to one that is cut off or was changed. OSError, PrefixError."""
        with self._path(name).open("rb") as file:
            number = 0
            while len(head := file.read(_HEAD.size)) == _HEAD.size:
                size, nonce = _HEAD.unpack(head)
                try:
                    yield self._cipher.decrypt(nonce, file.read(size), f"{name} {number}".encode())
                except InvalidTag:
                    return
                number += 1

    def remove(self, name: str) -> None:
        """Remove a file, if it is there. OSError."""
        with suppress(FileNotFoundError):
            self._path(name).unlink()

    def _sealed(self, name: str, number: int, record: bytes) -> bytes:
        nonce = os.urandom(12)
        content = self._cipher.encrypt(nonce, record, f"{name} {number}".encode())
        return _HEAD.pack(len(content), nonce) + content

    def _path(self, name: str) -> Path:
        return self._folder / f"{name}{_SUFFIX}"
