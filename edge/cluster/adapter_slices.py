"""The slices of a deployment's LoRA adapters: each rank has of every adapter what belongs to its slice of the model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

from edge.adapters.adapter import Adapter
from edge.cluster.client import Remote
from edge.slices.local import OwnSlices
from partition.plan.plan import Slice
from partition.slices.adapter_slice import adapter_recipe
from partition.slices.recipe import Recipe
from quant.gguf.file import GgufFile

Enter = Callable[[AbstractContextManager[Path]], Path]


class AdapterSlices:
    """Slices of adapters by rank, which are sent and kept as those of models are, each under its digest."""

    def __init__(
        self, adapters: Sequence[Adapter], model: GgufFile, cuts: Mapping[int, Slice], slices: OwnSlices
    ) -> None:
        """cuts: of the model, by rank. ModelFileError for an adapter of another model; CannotSlice for one that cannot
        be cut as the model is."""
        self._slices = slices
        self._recipes: dict[int, list[tuple[Path, Recipe]]] = {rank: [] for rank in cuts}
        for adapter in adapters:
            file, digest = GgufFile.open(adapter.path), slices.model_digest(adapter.path)
            for rank, cut in cuts.items():
                self._recipes[rank].append((adapter.path, adapter_recipe(file, digest, model, cut)))

    def n_bytes(self, rank: int) -> int:
        """Bytes of a rank's slices."""
        return sum(recipe.n_bytes for _, recipe in self._recipes.get(rank, ()))

    def use(self, rank: int, enter: Enter) -> tuple[str, ...]:
        """Return the files of a rank on this device, cut where they are not there. enter: keeps them there as long as
        they are needed."""
        return tuple(
            str(enter(self._slices.use(recipe, path, self._slices.digest(recipe, path))))
            for path, recipe in self._recipes.get(rank, ())
        )

    def send(self, rank: int, worker: Remote) -> list[str]:
        """See that a rank's slices are on its worker, and return their digests. The errors of `Remote.send_slice`."""
        digests = []
        for path, recipe in self._recipes[rank]:
            digests.append(self._slices.digest(recipe, path))
            worker.send_slice(recipe, path, digests[-1])
        return digests
