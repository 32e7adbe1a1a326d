"""The slices that ranks have of a model and of its LoRA adapters: cut, sent and kept alike, each under its digest."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import NamedTuple

from edge.adapters.file import CheckedAdapter
from edge.cluster.client import Remote
from edge.cluster.fleet import Fleet
from edge.parallel.engine_kinds import own_kind
from edge.slices.local import OwnSlices
from edge.tasks import Progress
from partition.plan.plan import Plan, Slice
from partition.slices.adapter_slice import adapter_recipe
from partition.slices.recipe import Recipe, whole
from quant.gguf.elastic import is_elastic
from quant.gguf.file import GgufFile

Enter = Callable[[AbstractContextManager[Path]], Path]


class FileSlice(NamedTuple):
    """A slice of a model's file, or of an adapter's."""

    path: Path  # of the file
    recipe: Recipe
    largest_bytes: int | None = None  # of a slice of several sizes: of the largest alone

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weights that it begins with."""
        return self.recipe.n_bytes if self.largest_bytes is None else self.largest_bytes


class ModelSlices:
    """Recipes of the slices of a model and its adapters."""

    def __init__(
        self,
        file: GgufFile,
        digest: str,
        adapters: Sequence[CheckedAdapter],
        own: OwnSlices | None = None,
        *,
        elastic: bool = False,
    ) -> None:
        """digest: of the model's file. own: slices on this device; None: in this user's own cache. elastic: they hold
        all sizes of the model."""
        self._elastic = elastic and is_elastic(file)
        self.file, self.digest, self.adapters = file, digest, adapters
        self._own = own or OwnSlices()
        self._by_cut: dict[Slice, list[FileSlice]] = {}

    def files(self, cut: Slice) -> list[FileSlice]:
        """Return the slice of the model, and of each adapter what belongs to it. CannotSlice where one cannot be cut as
        the model is."""
        if cut not in self._by_cut:
            self._by_cut[cut] = [
                self._of_model(cut),
                *(FileSlice(a.path, adapter_recipe(a.file.gguf, a.digest, self.file, cut)) for a in self.adapters),
            ]
        return self._by_cut[cut]

    def of_ranks(self, plan: Plan) -> dict[int, list[FileSlice]]:
        """Return those of the ranks of a placement; a thin owner has none. A device that is alone has all of an
        adapter, however it may be cut."""
        cuts = {rank: cut for rank in range(plan.world_size) if (cut := plan.slice(rank)).layers}
        if len(plan.devices) > 1:
            return {rank: self.files(cut) for rank, cut in cuts.items()}
        all_of = [FileSlice(a.path, whole(a.digest, a.file.gguf.size_bytes)) for a in self.adapters]
        return {0: [self._of_model(cuts[0]), *all_of]}

    def _of_model(self, cut: Slice) -> FileSlice:
        kind = own_kind()
        largest = kind.recipe(self.file, self.digest, cut)
        if not self._elastic:
            return FileSlice(self.file.path, largest)
        recipe = kind.recipe(self.file, self.digest, cut, elastic=True)
        return FileSlice(self.file.path, recipe, largest_bytes=largest.n_bytes)

    def check_unchanged(self) -> None:
        """Raise EngineError if the file of an adapter is not what was checked."""
        for adapter in self.adapters:
            adapter.file.check_unchanged()

    def name(self, part: FileSlice, progress: Progress | None = None) -> str:
        """Return the digest of a slice, as `OwnSlices.digest`. EngineError if an adapter has changed."""
        digest = self._own.digest(part.recipe, part.path, progress)
        self.check_unchanged()
        return digest

    def use(self, part: FileSlice, enter: Enter) -> Path:
        """Return the file of a slice on this device, cut where it is not there. enter: keeps it there as long as it is
        needed."""
        return enter(self._own.use(part.recipe, part.path, self.name(part)))

    def send(self, part: FileSlice, worker: Remote, progress: Progress | None = None) -> str:
        """Send a slice to a worker that lacks it, and return its digest. The errors of `name` and `Remote.send_slice`.
        progress: is called while it is named, and sent."""
        digest = self.name(part, progress)
        worker.send_slice(part.recipe, part.path, digest, progress)
        return digest


def adapter_bytes(slices: Sequence[FileSlice]) -> int:
    """Bytes of the slices of adapters among those of a rank."""
    return sum(part.recipe.n_bytes for part in slices[1:])


def send_ahead(fleet: Fleet, plan: Plan, slices: ModelSlices, check: Progress) -> None:
    """Bring the slices of a plan to its workers, where they are not yet.

    check: called on the way; what it raises ends it, and what is there by then need not be sent again. Else the errors
    of `ModelSlices.files` and `ModelSlices.send`.
    """
    for placement in plan.placements:
        for rank, parts in slices.of_ranks(placement).items():
            for part in parts if rank else ():
                slices.send(part, fleet.workers[placement.devices[rank]], check)
