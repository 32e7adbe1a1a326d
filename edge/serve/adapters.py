"""The LoRA adapters of a served model: their names in requests, and the scales of requests that do not say."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from edge.adapters.adapter import adapters_from
from edge.serve.caller import CALLER


class ServedAdapters:
    """Adapters of one model. Their scales change between requests, without a reload."""

    def __init__(self, lora: Sequence[str] = (), other_names: Collection[str] = ()) -> None:
        """lora: FILE[:SCALE] of each, by their ids. EngineError as `adapters_from`."""
        self._adapters = adapters_from(lora, other_names)
        self._scales = [adapter.scale for adapter in self._adapters]
        self._scales_of: dict[str, list[float]] = {}  # of the keys that changed their own

    @property
    def names(self) -> list[str]:
        """The names by which a request has one of them as its model."""
        return [adapter.name for adapter in self._adapters]

    @property
    def file_bytes(self) -> int:
        return sum(adapter.path.stat().st_size for adapter in self._adapters)

    def __len__(self) -> int:
        return len(self._adapters)

    def scales(self, name: str | None = None, by_id: Mapping[int, float] | None = None) -> list[float]:
        """Return the scales of a request. name: of its model, which may be an adapter: that one alone is used then.
        by_id: those that it says; the others are 0."""
        if by_id is not None:
            return [by_id.get(i, 0.0) for i in range(len(self))]
        if name in self.names:
            return [(adapter.scale or 1.0) if adapter.name == name else 0.0 for adapter in self._adapters]
        return list(self._scales_of.get(CALLER.get().owner, self._scales))

    def use(self, by_id: Mapping[int, float]) -> None:
        """Use these scales for requests that do not say; those that are not named are 0. They are for requests with the
        caller's key; those of an administrator are for all keys that have none of their own."""
        caller, scales = CALLER.get(), self.scales(by_id=by_id)
        if caller.is_administrator:
            self._scales = scales
        else:
            self._scales_of[caller.owner] = scales

    def to_json(self) -> list[dict[str, Any]]:
        """Return the adapters in the form of llama.cpp's server."""
        pairs = enumerate(zip(self._adapters, self.scales(), strict=True))
        return [
            {"id": i, "path": str(adapter.path), "scale": scale, "task_name": "", "prompt_prefix": ""}
            for i, (adapter, scale) in pairs
        ]
