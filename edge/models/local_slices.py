"""Slices of model files on this device: cut once, kept like those of a worker, their digests remembered."""

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

CACHE_BYTES = 20 << 30  # as a worker's default; one slice may be larger and has the place to itself then
_LOOK_S = 0.2  # how often to see whether another command is done with a slice
_REMEDY = "end other commands that run models on several devices"


class OwnSlices(Digests):
    """Slices in this user's own cache. It is not that of a worker on this device, which has a limit of its own."""

    def __init__(self, cache: Path | None = None, state: Path | None = None) -> None:
        """The folders; None: the user's own."""
        super().__init__(state or state_folder())
        self._folder = cache or cache_folder() / "own-slices"

    @contextmanager
    def use(
        self, recipe: Recipe, model: Path, digest: str, progress: Progress = lambda done, total: None
    ) -> Iterator[Path]:
        """The file of a slice, cut where it is not there, and kept at least until the end of the block.

        Where another command is cutting it, that is waited for, with progress of what is there.
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
