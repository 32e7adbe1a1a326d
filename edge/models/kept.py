"""What is kept on this device of models: fetched from the hub, or made of others to run faster or in parts."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from devices.paths import cache_folder
from edge.errors import HubError
from edge.models.hub import cached_repositories, parts
from edge.models.known import known_model, known_models
from edge.models.wheels import models_folder
from edge.slices.store import SliceStore

_SHOWN_DIGITS = 12  # of digests, in names


@dataclass(frozen=True)
class Kept:
    """Files that belong together. They can be fetched or made again."""

    name: str  # as commands take it, where it is a model
    kind: str  # "model", "quantized", "slice", "laid out"
    n_bytes: int
    used_at_s: float  # last: by the file system's clock
    paths: tuple[Path, ...]
    remove: Callable[[], None]  # OSError; SliceBusy where it is in use

    def to_json(self) -> dict[str, Any]:
        """Plain values, as docs/cli.md says."""
        paths = [str(path) for path in self.paths]
        of = {"name": self.name, "kind": self.kind, "size_bytes": self.n_bytes, "used_at_s": self.used_at_s}
        return {**of, "paths": paths}


def kept() -> list[Kept]:
    """All there is, by kind and name. OSError where a cache cannot be read."""
    cache = cache_folder()
    return [*_fetched(), *_of_wheels(), *_quantized(cache / "types"), *_slices(cache), *_laid_out(cache / "laid-out")]


def matching(name: str, all_kept: list[Kept]) -> list[Kept]:
    """Those of a name: as `kept` has it, one of the list of known models, a repository, or REPO:PART of a file's name.
    HubError where there is none."""
    known = known_model(name)
    if known is not None and known.repo:
        name = f"{known.repo}:{known.file.strip('*')}"
    repo, colon, part = name.partition(":")
    found = [one for one in all_kept if one.name == name] or [
        one
        for one in all_kept
        if one.kind == "model"
        and one.name.partition(":")[0] == repo
        and (not colon or part.lower() in one.name.partition(":")[2].lower())
    ]
    if not found:
        raise HubError(f"{name} is not among what is kept; edge model list shows it")
    return found


def _fetched() -> Iterator[Kept]:
    """Models in the hub's cache. Other files there are not ours to show."""
    for repo, folder in cached_repositories():
        versions: dict[str, list[Path]] = {}
        for path in sorted(folder.glob("snapshots/*/**/*.gguf")):
            if path.exists():
                versions.setdefault("/".join(path.relative_to(folder / "snapshots").parts[1:]), []).append(path)
        for file in sorted(versions):
            names = parts(file)
            if file != names[0] and names[0] in versions:
                continue  # of a model that is split
            links = tuple(path for name in names for path in versions.get(name, ()))
            blobs = {path.resolve() for path in links}
            stats = [blob.stat() for blob in blobs]
            yield Kept(
                f"{repo}:{file}",
                "model",
                sum(one.st_size for one in stats),
                max(max(one.st_atime, one.st_mtime) for one in stats),
                links,
                lambda folder=folder, links=links: _remove_fetched(folder, links),  # type: ignore[misc]
            )


def _of_wheels() -> Iterator[Kept]:
    """Models out of wheels."""
    names = {model.wheel.path.name: model.name for model in known_models() if model.wheel}
    for path in sorted(models_folder().glob("*")):
        if path.is_file() and path.suffix != ".lock":
            found = path.stat()
            used_at_s = max(found.st_atime, found.st_mtime)
            yield Kept(names.get(path.name, path.name), "model", found.st_size, used_at_s, (path,), path.unlink)


def _remove_fetched(folder: Path, links: tuple[Path, ...]) -> None:
    """Remove names in all versions, and the bytes that have no other name."""
    blobs = {path.resolve() for path in links}
    for path in links:
        path.unlink(missing_ok=True)
    others = {path.resolve() for path in folder.glob("snapshots/*/**/*") if path.is_symlink()}
    for blob in blobs - others:
        blob.unlink(missing_ok=True)
    if not any(path.is_file() for path in folder.glob("snapshots/**/*")):
        shutil.rmtree(folder)


def _quantized(folder: Path) -> Iterator[Kept]:
    """Models that plans made in other types."""
    for path in sorted(folder.glob("*.gguf")):
        found = path.stat()
        yield Kept(path.name, "quantized", found.st_size, max(found.st_atime, found.st_mtime), (path,), path.unlink)


def _slices(cache: Path) -> Iterator[Kept]:
    """Parts of models: of this device in plans with others, and of a worker here."""
    for name in ("own-slices", "slices"):
        if not (cache / name).is_dir():
            continue
        store = SliceStore(cache / name, 0)
        for file in store.files():
            yield Kept(
                f"{name}/{file.digest[:_SHOWN_DIGITS]}" + (".partial" if file.announced else ""),
                "slice",
                file.n_bytes,
                file.used_ns / 1e9,
                (file.path,),
                lambda store=store, path=file.path: store.remove(path),  # type: ignore[misc]
            )


def _laid_out(folder: Path) -> Iterator[Kept]:
    """Weights in the order that this processor's kernels read them, for models that are larger than memory."""
    for path in sorted(folder.glob("*/")):
        yield Kept(
            f"laid-out/{path.name[:_SHOWN_DIGITS]}",
            "laid out",
            sum(entry.stat().st_size for entry in os.scandir(path)),
            path.stat().st_mtime,
            (path,),
            lambda path=path: shutil.rmtree(path),  # type: ignore[misc]
        )
