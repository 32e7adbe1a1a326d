"""Client of an engine process: sends it the requests to a served model."""

from __future__ import annotations

from array import array
from base64 import b64decode
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from edge.errors import EngineGone, Overloaded
from edge.serve.answer import ProcessAnswer
from edge.serve.caller import CALLER
from edge.serve.engine.threads import FETCHING, FETCHING_FOR_ONE, READING, is_url
from edge.serve.places import Places
from edge.serve.replicas import Replicas
from edge.serve.served import Generation


class EngineClient:
    """Implements `edge.serve.served.ServedModel`, which documents the methods. Use it in one event loop."""

    def __init__(self, replicas: Replicas, queue: int) -> None:
        """queue: number of requests that may wait while others run."""
        self.name, self.replicas, self._queue = replicas.name, replicas, queue
        # Each purpose has its own places, because the engine process has separate threads for each.
        waiting = queue + replicas.config.options.sequences
        self._fetching = Places("pictures and sounds by URL", FETCHING, waiting, FETCHING_FOR_ONE)
        self._reading = Places("tokens and templates", READING, waiting)
        self._pooling = Places("embeddings and ranks", 1, waiting)

    async def generate(self, generation: Generation) -> ProcessAnswer:
        self._check_queue()
        if any(map(is_url, generation.media.values())):
            async with self._fetching.place():
                return await self.replicas.generate(generation)
        return await self.replicas.generate(generation)

    def _check_queue(self) -> None:
        """Raise Overloaded if the queue is full.

        If there are several keys, each may fill at most half of the remaining queue.
        """
        sequences, caller = self.replicas.about.get("sequences", 1), CALLER.get()
        left = sequences + self._queue - self.replicas.n_answers()
        own = self.replicas.n_answers(caller.client) - sequences
        if left <= 0 or (caller.among_several and own >= 0 and own >= left):
            raise Overloaded(
                f"{sequences} requests are running and {self._queue} are waiting, which is the maximum; try again later"
            )

    async def _read(self, what: str, arguments: Mapping[str, Any]) -> Any:
        return await self._reading.whole(lambda: self.replicas.ask(what, arguments))

    async def _pool(self, what: str, arguments: Mapping[str, Any]) -> Any:
        async with self._pooling.place():
            return await self.replicas.ask(what, arguments)

    async def tokenize(self, text: str, *, add_special: bool = True, parse_special: bool = False) -> list[int]:
        options = {"add_special": add_special, "parse_special": parse_special}
        return list(await self._read("tokenize", {"text": text, **options}))

    async def pieces(self, tokens: Sequence[int]) -> list[bytes]:
        return [piece.encode("latin-1") for piece in await self._read("pieces", {"tokens": list(tokens)})]

    async def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] = (),
        variables: Mapping[str, Any] = MappingProxyType({}),
        think: int | None = None,
    ) -> str:
        lists = {"messages": [dict(m) for m in messages], "tools": [dict(t) for t in tools]}
        return str(await self._read("render", {**lists, "variables": dict(variables), "think": think}))

    async def embed(self, texts: Sequence[str | Sequence[int]]) -> tuple[list[list[float]], int]:
        embedded = await self._pool("embed", {"texts": [t if isinstance(t, str) else list(t) for t in texts]})
        vectors = [array("f", b64decode(vector)).tolist() for vector in embedded["embeddings"]]
        return vectors, embedded["tokens"]

    async def rerank(self, query: str, documents: Sequence[str]) -> tuple[list[float], int]:
        ranked = await self._pool("rerank", {"query": query, "documents": list(documents)})
        return ranked["scores"], ranked["tokens"]

    async def turn(self, turn: Mapping[str, Any]) -> None:
        if self.replicas.config.prefix_warming:
            await self.replicas.ask("turn", turn)

    async def prefixes(self, do: str, arguments: Mapping[str, Any]) -> Any:
        return await self._read(do, arguments) if self.replicas.config.prefix_warming else None

    async def status(self) -> dict[str, Any]:
        if not self.replicas.is_ready:  # a list of all models must not wait for one of them
            raise EngineGone(f"{self.name} is being loaded")
        return await self.replicas.status()

    async def about(self) -> Mapping[str, Any]:
        await self.replicas.until_ready()
        return self.replicas.about
