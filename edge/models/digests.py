"""Remembered SHA-256 digests of model files and slices. Hashing gigabytes takes seconds, and files rarely change."""

import hashlib
import json
import os
import stat
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from devices.files import make_private, write_whole
from edge.errors import SliceError
from edge.models.slice_cutting import CHUNK_BYTES, Progress, digest_of
from partition.fields import is_digest
from partition.slices.recipe import Recipe, whole

MODEL_SUFFIXES = (".gguf", ".onnx")
_REMEMBERED = 10_000  # limit of files, and of slices; the oldest are forgotten
# A file system may give two changes within this time the same timestamp, and the second would go unnoticed.
_SETTLED_NS = 50_000_000


class Digests:
    """Digests, remembered in the file `digests.json` of a folder, which is created if it is missing.

    If that file is damaged or cannot be written, digests are computed again.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / "digests.json"

    def model_digest(self, path: Path, progress: Progress | None = None) -> str:
        """Return the SHA-256 of a file. It is computed only if it is not remembered for the file's current state.

        Raises SliceError if the file cannot be read, or changes while it is read.
        """
        try:
            path = path.resolve(strict=True)
            digest = self._remembered(path)
            return digest or self._hashed(path, progress)
        except OSError as exc:
            raise SliceError(f"cannot read {path}: {exc.strerror}") from exc

    def find_model(self, folder: Path, digest: str, size: int, progress: Progress | None = None) -> Path | None:
        """Return a model file in or below `folder` with this SHA-256 and size in bytes; None if there is none.

        Only files of that size are hashed, and files with a remembered digest are tried first. Links are followed, also
        out of the folder, because the owner of the folder created them. Unreadable files are skipped.
        """
        fitting = list(dict.fromkeys(_files_of_size(folder, size)))
        remembered = {path: self._remembered(path) for path in fitting}
        for path in fitting:
            if remembered[path] == digest:
                return path
        for path in fitting:
            if remembered[path]:
                continue
            try:
                if self.model_digest(path, progress) == digest:
                    return path
            except SliceError:  # unreadable, or being written
                continue
        return None

    def digest(self, recipe: Recipe, model: Path, progress: Progress | None = None) -> str:
        """Return the SHA-256 of the slice that `recipe` makes from the file `model`. It is cut only if it is not
        remembered.

        `model` must be the recipe's model (see `model_digest`). Raises the errors of
        `edge.models.slice_cutting.chunks`.
        """
        if recipe == whole(recipe.model_digest, recipe.model_bytes):
            return recipe.model_digest
        digest = self._load()["slices"].get(recipe.key)
        if isinstance(digest, str) and is_digest(digest):
            return digest
        digest = digest_of(recipe, model, progress)
        self._remember("slices", recipe.key, digest)
        return digest

    def _remembered(self, path: Path) -> str | None:
        entry = self._load()["files"].get(str(path))
        if not isinstance(entry, dict):
            return None
        digest = entry.pop("sha256", None)
        try:
            same = entry == file_state(path.stat())
        except OSError:
            return None
        return digest if same and isinstance(digest, str) and is_digest(digest) else None

    def _hashed(self, path: Path, progress: Progress | None) -> str:
        if not path.is_file():  # opening a pipe would wait for a writer
            raise SliceError(f"{path} is not a regular file; expected a model file")
        sha = hashlib.sha256()
        started = time.time_ns()
        with path.open("rb", buffering=0) as file:
            before = file_state(os.fstat(file.fileno()))
            read = 0
            while read <= before["size"] and (chunk := file.read(CHUNK_BYTES)):
                sha.update(chunk)
                read += len(chunk)
                if progress:
                    progress(read, before["size"])
        if read != before["size"] or file_state(path.stat()) != before:
            raise SliceError(f"{path} was changed while its digest was computed; try again when it is complete")
        if started - max(before["mtime_ns"], before["ctime_ns"]) > _SETTLED_NS:
            self._remember("files", str(path), {**before, "sha256": sha.hexdigest()})
        return sha.hexdigest()

    def _load(self) -> dict[str, dict[str, Any]]:
        """Return the remembered digests; none if the file is missing or damaged."""
        try:
            loaded = json.loads(self._path.read_bytes())
        except (OSError, ValueError, RecursionError):
            loaded = None
        tables = loaded if isinstance(loaded, dict) else {}
        return {name: tables[name] if isinstance(tables.get(name), dict) else {} for name in ("files", "slices")}

    def _remember(self, table: str, key: str, value: Any) -> None:
        tables = self._load()  # reload, because another process may have written meanwhile
        tables[table].pop(key, None)
        tables[table][key] = value
        for entries in tables.values():
            for old in list(entries)[:-_REMEMBERED]:
                del entries[old]
        with suppress(OSError):  # the disk may be full, or the folder may belong to another user
            make_private(self._path.parent)
            write_whole(self._path, json.dumps(tables, indent=1).encode())


def file_state(status: os.stat_result) -> dict[str, int]:
    """Return attributes that change with every change of the file. A program can set mtime back, but not ctime."""
    return {
        "size": status.st_size,
        "mtime_ns": status.st_mtime_ns,
        "ctime_ns": status.st_ctime_ns,
        "inode": status.st_ino,
    }


def _files_of_size(folder: Path, size: int) -> Iterator[Path]:
    """Yield the real paths of model files of `size` bytes, sorted by name. Each folder is visited once."""
    seen: set[tuple[int, int]] = set()
    for parent, folders, names in os.walk(folder, followlinks=True):
        try:
            status = os.stat(parent)
        except OSError:
            folders.clear()
            continue
        if (status.st_dev, status.st_ino) in seen:  # a link to a parent folder
            folders.clear()
            continue
        seen.add((status.st_dev, status.st_ino))
        folders.sort()
        for name in sorted(names):
            path = Path(parent, name)
            if not name.endswith(MODEL_SUFFIXES):
                continue
            try:
                status = path.stat()
                if stat.S_ISREG(status.st_mode) and status.st_size == size:
                    yield path.resolve(strict=True)
            except (OSError, RuntimeError):  # a broken or circular link
                continue
