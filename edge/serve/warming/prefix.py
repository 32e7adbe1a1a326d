"""Prefixes to be computed while nobody asks, and the turns of conversations that they are made of."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from edge.serve.warming.stamps import Stamp, moved, stamps_in

Message = Mapping[str, Any]
_ELSEWHEN_S = 100_000  # seconds, after which each stamp is another text


@dataclass(eq=False)
class Prefix:
    """Tokens that a prompt is expected to begin with."""

    tokens: list[int]
    namespace: str  # as of a Generation
    adapters: tuple[float, ...] | None
    key: tuple[str, ...] = ()  # of its conversation: a later prefix with the same key replaces it
    id: str = ""  # of one that was announced
    state: str = "queued"  # then "computing", then "ready"
    cached: int | None = None  # tokens that need not be computed, or were counted as used; None: it has not begun
    seconds: float = 0.0  # that it took so far
    is_stale: bool = False  # nobody will ask for it any more

    def to_json(self) -> dict[str, Any]:
        """Return what a client that announced it is told."""
        return {"id": self.id, "object": "prefix", "tokens": len(self.tokens), "state": self.state}


@dataclass(frozen=True)
class Turn:
    """A turn of a conversation that is complete."""

    messages: Sequence[Message]  # in the template's form, the answer is the last
    following: Sequence[Sequence[Message]]  # two ways to go on that share nothing but the beginning
    tools: Sequence[Mapping[str, Any]]
    variables: Mapping[str, Any]
    think: int | None
    namespace: str
    adapters: tuple[float, ...] | None
    at: float  # when its request came, seconds since the epoch
    stamps: Sequence[Stamp] = field(init=False)

    def __post_init__(self) -> None:
        """Find the stamps in its system messages; adapters may be a list, as JSON has them."""
        object.__setattr__(self, "adapters", None if self.adapters is None else tuple(self.adapters))
        object.__setattr__(self, "stamps", stamps_in("\n".join(self._system), self.at))

    @property
    def _system(self) -> list[str]:
        return [str(message.get("content") or "") for message in self.messages if message["role"] == "system"]

    @property
    def is_predictable(self) -> bool:
        """True if it has stamps, of which no one says seconds."""
        return bool(self.stamps) and all(stamp.lasts_s > 1 for stamp in self.stamps)

    @property
    def client(self) -> tuple[str, ...]:
        """Key of who asked: system prompt, but for its stamps, and tools."""
        values = [self.adapters, self.tools, self.variables, [moved(text, self.stamps, 0) for text in self._system]]
        return self.namespace, json.dumps(values, sort_keys=True)

    @property
    def key(self) -> tuple[str, ...]:
        """Key of the conversation: the client, and how it begins."""
        first = next((message for message in self.messages if message["role"] != "system"), {})
        return *self.client, json.dumps(first, sort_keys=True)

    def prompts(self, then: float | None = None) -> list[list[Message]]:
        """Return the messages of two prompts that may follow, as they are at a moment. A stamp that says seconds
        differs between the two. then: seconds since the epoch; None: as they were."""
        whens = [then, self.at + _ELSEWHEN_S if not self.is_predictable and self.stamps else then]
        return [
            [*(self._moved(message, when) for message in self.messages), *following]
            for when, following in zip(whens, self.following, strict=True)
        ]

    def _moved(self, message: Message, when: float | None) -> Message:
        if when is None or message["role"] != "system" or not isinstance(message.get("content"), str):
            return message
        return {**message, "content": moved(message["content"], self.stamps, when)}
