"""Slices of model files on this device: cut once, stored as on a worker, with remembered digests."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from devices.files import usable
from devices.paths import cache_folder, state_folder
from edge.errors import SliceBusy
from edge.models.digests import Digests
from edge.models.slice_cutting import Progress
from edge.models.slice_store import SliceStore
from partition.slices.recipe import Recipe

CACHE_BYTES = 20 << 30  # same as a worker's default; a single larger slice is allowed if it is alone
_LOOK_S = 0.2  # interval of checks whether another command has finished with a slice
_REMEDY = "end other commands that run models on several devices"


class OwnSlices(Digests):
    """Slices in the user's own cache. A worker on this device has a separate cache with its own limit."""

    def __init__(self, cache: Path | None = None, state: Path | None = None) -> None:
        """cache, state: folders; None: the user's own"""
        super().__init__(state or state_folder())
        self._folder = cache or cache_folder() / "own-slices"

    @contextmanager
    def use(
        self, recipe: Recipe, model: Path, digest: str, progress: Progress = lambda done, total: None
    ) -> Iterator[Path]:
        """Yield the file of a slice, which is cut if it is missing. It stays at least until the end of the block.

        If another command is cutting the slice, wait for it and report its progress.
        """
        store = SliceStore(usable(self._folder), max(CACHE_BYTES, recipe.n_bytes), _REMEDY)
        while True:
            try:
                store.put_cut(recipe, model, digest, progress)
                break
            except SliceBusy:
                progress(0, recipe.n_bytes)
                time.sleep(_LOOK_S)
        with store.use(digest) as path:
            yield path
