"""LoRA adapters of a served model: their names in requests, and their default scales."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from edge.serve.caller import CALLER
from edge.weights.adapter import adapters_from


class ServedAdapters:
    """Adapters of one model. Their scales change between requests without reloading the model."""

    def __init__(self, lora: Sequence[str] = (), other_names: Collection[str] = ()) -> None:
        """lora: FILE[:SCALE] of each adapter, in the order of their ids. Raises EngineError as `adapters_from` does."""
        self._adapters = adapters_from(lora, other_names)
        self._scales = [adapter.scale for adapter in self._adapters]
        self._scales_of: dict[str, list[float]] = {}  # default scales by API key, for keys that set their own

    @property
    def names(self) -> list[str]:
        """Model names that select one of the adapters in a request."""
        return [adapter.name for adapter in self._adapters]

    @property
    def file_bytes(self) -> int:
        return sum(adapter.path.stat().st_size for adapter in self._adapters)

    def __len__(self) -> int:
        return len(self._adapters)

    def scales(self, name: str | None = None, by_id: Mapping[int, float] | None = None) -> list[float]:
        """Return the scales for a request.

        name: requested model. If it is the name of an adapter, only this adapter is active.
        by_id: scales in the request, by adapter id. Adapters that are not listed get scale 0.
        """
        if by_id is not None:
            return [by_id.get(i, 0.0) for i in range(len(self))]
        if name in self.names:
            return [(adapter.scale or 1.0) if adapter.name == name else 0.0 for adapter in self._adapters]
        return list(self._scales_of.get(CALLER.get().owner, self._scales))

    def use(self, by_id: Mapping[int, float]) -> None:
        """Set the default scales. Adapters that are not listed get scale 0.

        The scales apply to requests with the caller's key. Scales from an administrator apply to all keys without their
        own.
        """
        caller, scales = CALLER.get(), self.scales(by_id=by_id)
        if caller.is_administrator:
            self._scales = scales
        else:
            self._scales_of[caller.owner] = scales

    def to_json(self) -> list[dict[str, Any]]:
        """Return the adapters in the JSON form of llama.cpp's server."""
        pairs = enumerate(zip(self._adapters, self.scales(), strict=True))
        return [
            {"id": i, "path": str(adapter.path), "scale": scale, "task_name": "", "prompt_prefix": ""}
            for i, (adapter, scale) in pairs
        ]
