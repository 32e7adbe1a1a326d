"""Adapters of an engine, and the current scales."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, overload

from edge.llama import llama
from edge.weights.adapter import Scales, scales_of
from edge.weights.adapter_file import AdapterFile, CheckedAdapter


class EngineAdapters(Sequence[CheckedAdapter]):
    """Adapters of an engine by number, and the current scales."""

    def __init__(self, adapters: Sequence[CheckedAdapter], use: Callable[[Scales], Any]) -> None:
        """use: applies other scales from the engine's next decode on"""
        self._adapters, self._use = tuple(adapters), use
        self.scales: Scales | None = ()  # None: unknown because a change was interrupted

    @overload
    def __getitem__(self, index: int) -> CheckedAdapter: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[CheckedAdapter, ...]: ...
    def __getitem__(self, index: int | slice) -> CheckedAdapter | tuple[CheckedAdapter, ...]:
        return self._adapters[index]

    def __len__(self) -> int:
        return len(self._adapters)

    def choose(self, scales: Sequence[float] | None) -> None:
        """Use these scales from the next decode on, if they differ from the current ones.

        Raises the errors of `scales_of`, and of the engine.
        """
        if scales is None or scales != self.scales:
            self.use(scales_of(self._adapters, scales))

    def use(self, scales: Scales) -> None:
        """Use these effective scales from the next decode on. Other ranks receive scales in this form."""
        if scales != self.scales:
            self.scales = None
            self._use(scales)
            self.scales = scales


class LoadedAdapters(EngineAdapters):
    """Adapters that a model, or a slice of one, is loaded with."""

    def __init__(self, adapters: Sequence[CheckedAdapter], files: Sequence[AdapterFile]) -> None:
        """files: loaded files, in the order of the adapters: whole adapters, or slices of them."""
        super().__init__(adapters, lambda scales: self.context.use_adapters(scales))
        self.files = files
        self.context: llama.Context  # context of the model, set when the model is loaded

    def n_of(self, weight: str) -> int:
        """Return the number of active adapters that change a weight."""
        pairs = zip(self.files, self.scales or (), strict=False)
        return sum(weight in file.weights for file, scale in pairs if scale)
