"""Calls to a served model, which its engine process answers."""

from __future__ import annotations

from array import array
from base64 import b64decode
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from edge.errors import EngineGone, Overloaded
from edge.serve.answer import ProcessAnswer
from edge.serve.process import EngineProcess
from edge.serve.served import Generation


class EngineClient:
    """Implements `edge.serve.served.ServedModel`, which documents the methods; for one event loop."""

    def __init__(self, process: EngineProcess, queue: int) -> None:
        """queue: requests that may wait beside the running ones."""
        self.name, self.process, self._queue = process.name, process, queue

    @property
    def busy(self) -> bool:
        return self.process.busy

    async def generate(self, generation: Generation) -> ProcessAnswer:
        sequences = self.process.about.get("sequences", 1)
        if not generation.background and self.process.answers.n_foreground >= sequences + self._queue:
            raise Overloaded(f"{sequences} requests are answered and {self._queue} wait: no more may; ask again later")
        return await self.process.generate(generation)

    async def tokenize(self, text: str, *, add_special: bool = True, parse_special: bool = False) -> list[int]:
        options = {"add_special": add_special, "parse_special": parse_special}
        return list(await self.process.ask("tokenize", {"text": text, **options}))

    async def pieces(self, tokens: Sequence[int]) -> list[bytes]:
        return [piece.encode("latin-1") for piece in await self.process.ask("pieces", {"tokens": list(tokens)})]

    async def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] = (),
        variables: Mapping[str, Any] = MappingProxyType({}),
        think: int | None = None,
    ) -> str:
        lists = {"messages": [dict(m) for m in messages], "tools": [dict(t) for t in tools]}
        return str(await self.process.ask("render", {**lists, "variables": dict(variables), "think": think}))

    async def embed(self, texts: Sequence[str | Sequence[int]]) -> tuple[list[list[float]], int]:
        embedded = await self.process.ask("embed", {"texts": [t if isinstance(t, str) else list(t) for t in texts]})
        vectors = [array("f", b64decode(vector)).tolist() for vector in embedded["embeddings"]]
        return vectors, embedded["tokens"]

    async def rerank(self, query: str, documents: Sequence[str]) -> tuple[list[float], int]:
        ranked = await self.process.ask("rerank", {"query": query, "documents": list(documents)})
        return ranked["scores"], ranked["tokens"]

    async def turn(self, turn: Mapping[str, Any]) -> None:
        if self.process.config.prefix_warming:
            await self.process.ask("turn", turn)

    async def prefixes(self, do: str, arguments: Mapping[str, Any]) -> Any:
        return await self.process.ask(do, arguments) if self.process.config.prefix_warming else None

    async def status(self) -> dict[str, Any]:
        if not self.process.is_ready:  # a list of all models does not wait for one
            raise EngineGone(f"{self.name} is being loaded")
        return {**await self.process.ask("status", {}), "restarts": self.process.restarts}

    async def about(self) -> Mapping[str, Any]:
        await self.process.until_ready()
        return self.process.about
