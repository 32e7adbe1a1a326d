"""Slices of a model and of its LoRA adapters for each rank. Both kinds are cut, sent and cached under their digests."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import NamedTuple

from edge.cluster.client import Remote
from edge.cluster.fleet import Fleet
from edge.models.local_slices import OwnSlices
from edge.parallel.engine_kinds import own_kind
from edge.tasks import Progress
from edge.weights.adapter_file import CheckedAdapter
from partition.model.file import ModelFile
from partition.plan.plan import Plan, Slice
from partition.slices.adapter_slice import adapter_recipe
from partition.slices.gguf_slice import slice_recipe
from partition.slices.recipe import Recipe, whole
from quant.gguf.elastic import is_elastic

Enter = Callable[[AbstractContextManager[Path]], Path]


class FileSlice(NamedTuple):
    """A slice of a model file or of an adapter file."""

    path: Path  # file that the slice is cut from
    recipe: Recipe
    largest_bytes: int | None = None  # bytes of a slice of one size; None: as many as the recipe makes

    @property
    def weight_bytes(self) -> int:
        """Bytes of the model weights in the slice. For an elastic slice, those of the largest size. For a sleeping
        device, those that a real device would hold."""
        return self.recipe.n_bytes if self.largest_bytes is None else self.largest_bytes


class ModelSlices:
    """Slices of a model and its adapters, for each cut of the model."""

    def __init__(
        self,
        file: ModelFile,
        digest: str,
        adapters: Sequence[CheckedAdapter],
        own: OwnSlices | None = None,
        *,
        elastic: bool = False,
    ) -> None:
        """Recipes are made when they are first needed.

        digest: SHA-256 of the model file.
        own: cache of slices on this device; None: this user's cache.
        elastic: slices hold all sizes of an elastic model.
        """
        self._elastic = elastic and is_elastic(file)
        self.file, self.digest, self.adapters = file, digest, adapters
        self._own = own or OwnSlices()
        self._by_cut: dict[Slice, list[FileSlice]] = {}

    def files(self, cut: Slice) -> list[FileSlice]:
        """Return the slice of the model, followed by the slice of each adapter. Raises CannotSlice if an adapter cannot
        be cut like the model.
        """
        if cut not in self._by_cut:
            self._by_cut[cut] = [
                self._of_model(cut),
                *(FileSlice(a.path, adapter_recipe(a.file.gguf, a.digest, self.file, cut)) for a in self.adapters),
            ]
        return self._by_cut[cut]

    def of_ranks(self, plan: Plan) -> dict[int, list[FileSlice]]:
        """Return the slices of each rank of a placement. A thin owner has none. A device that runs alone gets each
        adapter whole.
        """
        cuts = {rank: cut for rank in range(plan.world_size) if (cut := plan.slice(rank)).layers}
        if len(plan.devices) > 1:
            return {rank: self.files(cut) for rank, cut in cuts.items()}
        all_of = [FileSlice(a.path, whole(a.digest, a.file.gguf.size_bytes)) for a in self.adapters]
        return {0: [self._of_model(cuts[0]), *all_of]}

    def _of_model(self, cut: Slice) -> FileSlice:
        kind = own_kind()
        largest = slice_recipe(self.file, self.digest, cut)
        if not self._elastic and not kind.sleeps:
            return FileSlice(self.file.path, largest)
        recipe = kind.recipe(self.file, self.digest, cut, elastic=self._elastic)
        return FileSlice(self.file.path, recipe, largest_bytes=largest.n_bytes)

    def check_unchanged(self) -> None:
        """Raise EngineError if the file of an adapter has changed since it was checked."""
        for adapter in self.adapters:
            adapter.file.check_unchanged()

    def name(self, part: FileSlice, progress: Progress | None = None) -> str:
        """Return the digest of a slice, as `OwnSlices.digest`. Raises EngineError if an adapter has changed."""
        digest = self._own.digest(part.recipe, part.path, progress)
        self.check_unchanged()
        return digest

    def use(self, part: FileSlice, enter: Enter) -> Path:
        """Return the file of a slice on this device, and cut the slice if it is missing.

        enter: enters the context that keeps the file in the cache.
        """
        return enter(self._own.use(part.recipe, part.path, self.name(part)))

    def send(self, part: FileSlice, worker: Remote, progress: Progress | None = None) -> str:
        """Send a slice to a worker that lacks it, and return its digest.

        progress: called while the digest is computed and while the slice is sent.

        Raises the errors of `name` and `Remote.send_slice`.
        """
        digest = self.name(part, progress)
        worker.send_slice(part.recipe, part.path, digest, progress)
        return digest


def adapter_bytes(slices: Sequence[FileSlice]) -> int:
    """Return the total bytes of the adapters' slices among the slices of a rank."""
    return sum(part.recipe.n_bytes for part in slices[1:])


def send_ahead(fleet: Fleet, plan: Plan, slices: ModelSlices, check: Progress) -> None:
    """Send the slices of a plan to its workers before the plan starts. Workers that hold their slices get nothing.

    check: called as progress callback. If it raises, sending ends, and bytes that arrived need not be sent again.

    Raises the errors of `ModelSlices.files` and `ModelSlices.send`.
    """
    for placement in plan.placements:
        for rank, parts in slices.of_ranks(placement).items():
            for part in parts if rank else ():
                slices.send(part, fleet.workers[placement.devices[rank]], check)
