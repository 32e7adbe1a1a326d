"""Prefixes to be computed while the server is idle, and the conversation turns that they are derived from."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from edge.serve.warming.stamps import Stamp, moved, stamps_in

Message = Mapping[str, Any]
_ELSEWHEN_S = 100_000  # seconds after which the text of every stamp has changed


@dataclass(eq=False)
class Prefix:
    """Tokens that a future prompt is expected to begin with."""

    tokens: list[int]
    namespace: str  # see Generation
    adapters: tuple[float, ...] | None
    key: tuple[str, ...] = ()  # key of its conversation; a later prefix with the same key replaces it
    id: str = ""  # id of an announced prefix
    state: str = "queued"  # "queued", "computing" or "ready"
    cached: int | None = None  # tokens found in the cache, or already counted as used; None: not begun
    seconds: float = 0.0  # computing time so far
    is_stale: bool = False  # the prefix is not needed any more

    def to_json(self) -> dict[str, Any]:
        """Return the description for the client that announced the prefix."""
        return {"id": self.id, "object": "prefix", "tokens": len(self.tokens), "state": self.state}


@dataclass(frozen=True)
class Turn:
    """A complete turn of a conversation."""

    messages: Sequence[Message]  # in the template's form; the answer is the last message
    following: Sequence[Sequence[Message]]  # two continuations that share nothing except the turn
    tools: Sequence[Mapping[str, Any]]
    variables: Mapping[str, Any]
    think: int | None
    namespace: str
    adapters: tuple[float, ...] | None
    at: float  # arrival time of its request in seconds since the epoch
    stamps: Sequence[Stamp] = field(init=False)

    def __post_init__(self) -> None:
        """Find the stamps in the system messages. Convert adapters from a JSON list to a tuple."""
        object.__setattr__(self, "adapters", None if self.adapters is None else tuple(self.adapters))
        object.__setattr__(self, "stamps", stamps_in("\n".join(self._system), self.at))

    @property
    def _system(self) -> list[str]:
        return [str(message.get("content") or "") for message in self.messages if message["role"] == "system"]

    @property
    def is_predictable(self) -> bool:
        """True if it has stamps, and none of them shows seconds."""
        return bool(self.stamps) and all(stamp.lasts_s > 1 for stamp in self.stamps)

    @property
    def client(self) -> tuple[str, ...]:
        """Key of the client: system prompt without stamps, and tools."""
        values = [self.adapters, self.tools, self.variables, [moved(text, self.stamps, 0) for text in self._system]]
        return self.namespace, json.dumps(values, sort_keys=True)

    @property
    def key(self) -> tuple[str, ...]:
        """Key of the conversation: the client, and the first message."""
        first = next((message for message in self.messages if message["role"] != "system"), {})
        return *self.client, json.dumps(first, sort_keys=True)

    def prompts(self, then: float | None = None) -> list[list[Message]]:
        """Return the messages of two possible next prompts at a moment. A stamp with seconds differs between the two.

        then: seconds since the epoch; None: stamps stay unchanged.
        """
        whens = [then, self.at + _ELSEWHEN_S if not self.is_predictable and self.stamps else then]
        return [
            [*(self._moved(message, when) for message in self.messages), *following]
            for when, following in zip(whens, self.following, strict=True)
        ]

    def _moved(self, message: Message, when: float | None) -> Message:
        if when is None or message["role"] != "system" or not isinstance(message.get("content"), str):
            return message
        return {**message, "content": moved(message["content"], self.stamps, when)}
