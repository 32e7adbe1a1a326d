"""Inventory of models on this device: fetched models, and files converted for speed or for parts of models."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from devices.paths import cache_folder
from edge.errors import HubError
from edge.models.catalog import known_model, known_models
from edge.models.file_kinds import is_gguf, parts
from edge.models.hub import cached_repositories
from edge.models.slice_store import SliceStore
from edge.models.wheels import models_folder

_SHOWN_DIGITS = 12  # digits of a digest in a name


@dataclass(frozen=True)
class CacheEntry:
    """Files that belong together and can be fetched or made again."""

    name: str  # for a model, the name that commands accept
    kind: str  # "model", "quantized" (for a plan), "slice" or "laid out"
    n_bytes: int
    used_at_s: float  # time of the last use, by the file system's clock
    paths: tuple[Path, ...]
    remove: Callable[[], None]  # raises OSError, or SliceBusy if the files are in use

    def to_json(self) -> dict[str, Any]:
        """Return plain values in the format of docs/cli/model.md."""
        paths = [str(path) for path in self.paths]
        values = {"name": self.name, "kind": self.kind, "size_bytes": self.n_bytes, "used_at_s": self.used_at_s}
        return {**values, "paths": paths}


def inventory() -> list[CacheEntry]:
    """Return all stored files, by kind and name. Raises OSError if a cache cannot be read."""
    cache = cache_folder()
    quantized = [_of_file(path, path.name, "quantized") for path in sorted((cache / "types").glob("*.gguf"))]
    return [*_fetched(), *_from_wheels(), *quantized, *_slices(cache), *_laid_out(cache / "laid-out")]


def matching(name: str, entries: list[CacheEntry]) -> list[CacheEntry]:
    """Return the entries that a name matches. Raises HubError if there are none.

    The name may be an entry's name, a known model, a repository, or REPO:PART with a part of a file name.
    """
    known = known_model(name)
    if known is not None and known.repo:
        name = f"{known.repo}:{known.file.strip('*')}"
    repo, colon, part = name.partition(":")
    matches = [entry for entry in entries if entry.name == name] or [
        entry
        for entry in entries
        if entry.kind == "model"
        and entry.name.partition(":")[0] == repo
        and (not colon or part.lower() in entry.name.partition(":")[2].lower())
    ]
    if not matches:
        raise HubError(f"{name} is not among the stored models; edge model list shows them")
    return matches


def _fetched() -> Iterator[CacheEntry]:
    """Yield the models in the hub's cache. Other files in the cache are ignored."""
    for repo, folder in cached_repositories():
        versions: dict[str, list[Path]] = {}
        for path in sorted(folder.glob("snapshots/*/**/*")):
            if is_gguf(path.name) and path.exists():
                versions.setdefault("/".join(path.relative_to(folder / "snapshots").parts[1:]), []).append(path)
        for file in sorted(versions):
            names = parts(file)
            if file != names[0] and names[0] in versions:
                continue  # a later part of a split model
            links = tuple(path for name in names for path in versions.get(name, ()))
            blobs = {path.resolve() for path in links}
            stats = [blob.stat() for blob in blobs]
            yield CacheEntry(
                f"{repo}:{file}",
                "model",
                sum(stat.st_size for stat in stats),
                max(max(stat.st_atime, stat.st_mtime) for stat in stats),
                links,
                lambda folder=folder, links=links: _remove_fetched(folder, links),  # type: ignore[misc]
            )


def _from_wheels() -> Iterator[CacheEntry]:
    """Yield the models that came from wheels."""
    names = {model.wheel.path.name: model.name for model in known_models() if model.wheel}
    for path in sorted(models_folder().glob("*")):
        if path.is_file() and path.suffix != ".lock":
            yield _of_file(path, names.get(path.name, path.name), "model")


def _of_file(path: Path, name: str, kind: str) -> CacheEntry:
    status = path.stat()
    return CacheEntry(name, kind, status.st_size, max(status.st_atime, status.st_mtime), (path,), path.unlink)


def _remove_fetched(folder: Path, links: tuple[Path, ...]) -> None:
    """Remove a file's links in all versions, and the blobs without other links."""
    blobs = {path.resolve() for path in links}
    for path in links:
        path.unlink(missing_ok=True)
    others = {path.resolve() for path in folder.glob("snapshots/*/**/*") if path.is_symlink()}
    for blob in blobs - others:
        blob.unlink(missing_ok=True)
    if not any(path.is_file() for path in folder.glob("snapshots/**/*")):
        shutil.rmtree(folder)


def _slices(cache: Path) -> Iterator[CacheEntry]:
    """Yield slices of models: this device's own in plans with other devices, and those of a worker on this device."""
    for name in ("own-slices", "slices"):
        if not (cache / name).is_dir():
            continue
        store = SliceStore(cache / name, 0)
        for file in store.files():
            yield CacheEntry(
                f"{name}/{file.digest[:_SHOWN_DIGITS]}" + (".partial" if file.announced else ""),
                "slice",
                file.n_bytes,
                file.used_ns / 1e9,
                (file.path,),
                lambda store=store, path=file.path: store.remove(path),  # type: ignore[misc]
            )


def _laid_out(folder: Path) -> Iterator[CacheEntry]:
    """Yield weights in the memory layout of this processor's kernels, for models that are larger than memory."""
    for path in sorted(folder.glob("*/")):
        yield CacheEntry(
            f"laid-out/{path.name[:_SHOWN_DIGITS]}",
            "laid out",
            sum(entry.stat().st_size for entry in os.scandir(path)),
            path.stat().st_mtime,
            (path,),
            lambda path=path: shutil.rmtree(path),  # type: ignore[misc]
        )
