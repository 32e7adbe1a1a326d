"""The adapters of an engine: their files, checked for its model, and the scales that it computes with now."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, overload

from edge.adapters.adapter import Adapter, Scales, adapters_from, scales_of
from edge.llama.llama import Context
from partition.model.check_adapter import adapter_pairs
from quant.gguf.file import GgufFile


@dataclass(frozen=True)
class AdapterFile:
    """The file of an adapter, or of a slice of one, checked for its model."""

    path: Path
    weights: frozenset[str]  # that it changes
    n_bytes: int  # of its matrices
    row_bytes: int  # that a row of a decode takes, at most, for its products beside those of the model

    @classmethod
    def from_file(cls, path: Path, model: GgufFile, experts_used: int) -> AdapterFile:
        """Check an adapter. ModelFileError if it is none of this model."""
        pairs = adapter_pairs(GgufFile.open(path), model)
        sizes = [
            (pair.b.shape[0] + model.tensors[name].shape[1]) * (max(1, experts_used) if len(pair.b.shape) > 2 else 1)
            for name, pair in pairs.items()
        ]
        n_bytes = sum(pair.a.n_bytes + pair.b.n_bytes for pair in pairs.values())
        return cls(path, frozenset(pairs), n_bytes, 4 * max(sizes, default=0))


class EngineAdapters(Sequence[Adapter]):
    """The adapters of an engine by their numbers, and the scales that it computes with now."""

    def __init__(self, adapters: Sequence[Adapter], use: Callable[[Scales], Any]) -> None:
        """use: makes the engine compute with other scales from its next decode on."""
        self._adapters, self._use = tuple(adapters), use
        self.scales: Scales = ()

    @overload
    def __getitem__(self, index: int) -> Adapter: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Adapter, ...]: ...
    def __getitem__(self, index: int | slice) -> Adapter | tuple[Adapter, ...]:
        return self._adapters[index]

    def __len__(self) -> int:
        return len(self._adapters)

    def choose(self, scales: Sequence[float] | None) -> None:
        """Compute with these scales from the next decode on; nothing is done where they are those of now. The errors of
        `scales_of`, and of the engine."""
        self.use(scales_of(self._adapters, scales))

    def use(self, scales: Scales) -> None:
        """The same of effective scales, as a rank hears them."""
        if scales != self.scales:
            self._use(scales)
            self.scales = scales


class LoadedAdapters(EngineAdapters):
    """The adapters that a model, or a slice of one, is loaded with: of slices of adapters only numbers matter."""

    def __init__(self, texts: Sequence[str], model: GgufFile, experts_used: int, *, are_slices: bool) -> None:
        """texts: FILE[:SCALE] of each. ModelFileError where one is none of this model; the errors of
        `adapters_from`."""
        super().__init__(() if are_slices else adapters_from(texts), lambda scales: self.context.use_adapters(scales))
        files = [Adapter.from_text(text).path for text in texts]
        self._files = [AdapterFile.from_file(path, model, experts_used) for path in files]
        self.context: Context  # of the model, once it is loaded

    @property
    def paths(self) -> list[Path]:
        """Their files."""
        return [file.path for file in self._files]

    @property
    def n_bytes(self) -> int:
        """Bytes of their matrices, all of which stay in memory."""
        return sum(file.n_bytes for file in self._files)

    @property
    def row_bytes(self) -> int:
        """Bytes that each row of a decode takes for what they compute, at most."""
        return max((file.row_bytes for file in self._files), default=0)

    def memory_bytes(self, rows: int) -> int:
        """Bytes that they take in memory, with a decode of so many rows."""
        return self.n_bytes + rows * self.row_bytes

    def n_of(self, weight: str) -> int:
        """Return how many of those in use change a weight."""
        pairs = zip(self._files, self.scales, strict=False)
        return sum(weight in file.weights for file, scale in pairs if scale)
