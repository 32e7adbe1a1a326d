"""The adapters of an engine, and the scales that it computes with now."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, overload

from edge.llama import llama
from edge.weights.adapter import Scales, scales_of
from edge.weights.adapter_file import AdapterFile, CheckedAdapter


class EngineAdapters(Sequence[CheckedAdapter]):
    """The adapters of an engine by their numbers, and the scales that it computes with now."""

    def __init__(self, adapters: Sequence[CheckedAdapter], use: Callable[[Scales], Any]) -> None:
        """use: makes the engine compute with other scales from its next decode on."""
        self._adapters, self._use = tuple(adapters), use
        self.scales: Scales | None = ()  # None: not known, as a change was interrupted

    @overload
    def __getitem__(self, index: int) -> CheckedAdapter: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[CheckedAdapter, ...]: ...
    def __getitem__(self, index: int | slice) -> CheckedAdapter | tuple[CheckedAdapter, ...]:
        return self._adapters[index]

    def __len__(self) -> int:
        return len(self._adapters)

    def choose(self, scales: Sequence[float] | None) -> None:
        """Compute with these scales from the next decode on; nothing is done where they are those of now. The errors of
        `scales_of`, and of the engine."""
        if scales is None or scales != self.scales:
            self.use(scales_of(self._adapters, scales))

    def use(self, scales: Scales) -> None:
        """Compute with effective scales, as a rank hears them, from the next decode on."""
        if scales != self.scales:
            self.scales = None
            self._use(scales)
            self.scales = scales


class LoadedAdapters(EngineAdapters):
    """The adapters that a model, or a slice of one, is loaded with."""

    def __init__(self, adapters: Sequence[CheckedAdapter], files: Sequence[AdapterFile]) -> None:
        """files: that are loaded: those of the adapters, or slices of adapters, of which only numbers matter."""
        super().__init__(adapters, lambda scales: self.context.use_adapters(scales))
        self.files = files
        self.context: llama.Context  # of the model, once it is loaded

    def n_of(self, weight: str) -> int:
        """Return how many of those in use change a weight."""
        pairs = zip(self.files, self.scales or (), strict=False)
        return sum(weight in file.weights for file, scale in pairs if scale)
