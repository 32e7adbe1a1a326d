"""A model that returns the answers of a test through the whole HTTP layer: for answers that no small model gives."""

import asyncio
import math
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from edge.api.config import EngineConfig
from edge.errors import EdgeError, NotAllowed, SamplingError, UnknownModel
from edge.models.demo import MODEL_PATH
from edge.serve.adapters import ServedAdapters
from edge.serve.drain import Drain
from edge.serve.fetches import Fetches
from edge.serve.model_files import ModelFacts
from edge.serve.served import Answer, Generation, Piece, ServedModel, TokenLogprob
from edge.weights.elastic.shares import Share


class ScriptedAnswer:
    """Thinks and says some text, a character a token; then fails, waits until it is cancelled, or ends."""

    def __init__(self, model: "Scripted", generation: Generation) -> None:
        self.prompt_tokens, self.cached_tokens = 7, 3
        self.cancelled = asyncio.Event()
        self.sent_tokens = 0
        self._model, self._wanted = model, generation

    async def __aiter__(self) -> AsyncIterator[Piece]:
        model, expected = self._model, self._wanted
        for count, character in enumerate(model.thinks, 1):
            yield Piece("", ord(character), thought=character, thought_tokens=count)
        said = model.says[: expected.max_tokens]
        for character in said:
            self.sent_tokens += 1
            piece = character.encode()
            logprob = TokenLogprob(ord(character), piece, -0.5) if expected.logprobs is not None else None
            others = (TokenLogprob(1, b"\xff", float("-inf")),) * (expected.logprobs or 0)
            yield Piece(character, ord(character), logprob=logprob, alternatives=others)
        if model.fails is not None:
            raise model.fails
        if model.waits:
            await self.cancelled.wait()
        ending = model.ending if len(said) == len(model.says) else "length"
        yield Piece("", None, ending, model.stop_string, thought_tokens=len(model.thinks))

    def cancel(self) -> None:
        self.cancelled.set()


class Scripted:
    """Behaves as the test says, also while a server runs it."""

    def __init__(self, name: str = "scripted") -> None:
        self.name = name
        self.thinks = ""
        self.says = "Hello there."
        self.template = ""
        self.stop_string: str | None = None
        self.ending = "stop"  # why an answer ends that is not cut
        self.refuses: EdgeError | None = None  # every request
        self.fails: Exception | None = None  # after the text
        self.waits = False  # after the text
        self.loaded = asyncio.Event()  # requests wait for it
        self.loaded.set()
        self.left = 0  # requests that were given up while they waited for it
        self.requests: list[Generation] = []
        self.answers: list[ScriptedAnswer] = []
        self.turns: list[Mapping[str, Any]] = []  # that it was told

    async def generate(self, generation: Generation) -> Answer:
        try:
            await self.loaded.wait()
        except asyncio.CancelledError:
            self.left += 1
            raise
        if self.refuses is not None:
            raise self.refuses
        self.requests.append(generation)
        self.answers.append(ScriptedAnswer(self, generation))
        return self.answers[-1]

    async def tokenize(self, text: str, *, add_special: bool = True, parse_special: bool = False) -> list[int]:
        return [*([1] if add_special else []), *text.encode()]

    async def pieces(self, tokens: Sequence[int]) -> list[bytes]:
        if any(token > 255 for token in tokens):
            raise SamplingError("token ids are from 0 to 255")
        return [bytes([token]) for token in tokens]

    async def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] = (),
        variables: Mapping[str, Any] = MappingProxyType({}),
        think: int | None = None,
    ) -> str:
        return "".join(f"{message['role']}: {message['content']}\n" for message in messages)

    async def embed(self, texts: Sequence[str | Sequence[int]]) -> tuple[list[list[float]], int]:
        return [[0.6, 0.8] for _ in texts], sum(map(len, texts))

    async def rerank(self, query: str, documents: Sequence[str]) -> tuple[list[float], int]:
        return [float(document.count(query)) for document in documents], sum(map(len, (query, *documents)))

    async def turn(self, turn: Mapping[str, Any]) -> None:
        self.turns.append(turn)

    async def prefixes(self, do: str, arguments: Mapping[str, Any]) -> Any:
        return {"id": "prefix-0", "object": "prefix", "tokens": 1, "state": "queued"} if do == "announce" else []

    async def about(self) -> dict[str, Any]:
        return dict((await self.status())["model"])

    async def status(self) -> dict[str, Any]:
        busy = [not answer.cancelled.is_set() for answer in self.answers]
        return {
            "model": {
                "name": self.name, "path": "none", "architecture": "none", "context": 1024,
                "trained_context": 1024, "sequences": 8, "vocabulary": 256,
                "parameters": 0, "size_bytes": 0, "chat_template": self.template, "embeds": True, "reranks": True,
            },
            "slots": [{"id": n, "is_processing": item} for n, item in enumerate(busy)],
            "waiting": 0, "tokens_per_s": 0.0, "devices": [], "plan": None, "why": "",
            "counters": {"prompt_tokens": 7, "cached_tokens": 3, "generated_tokens": 5, "steps": 5, "preemptions": 0,
                         "background_preemptions": 0},
        }  # fmt: skip


class ScriptedMemory:
    """A budget of one model, and what was asked of it."""

    def __init__(self, name: str) -> None:
        self._name, self.n_bytes = name, 2048
        self.target: int | None = None

    def shares(self) -> Mapping[str, Share]:
        return {self._name: Share(limit=2048, resident=1024, least=512, most=4096, use=0.5)}

    async def ask(self, n_bytes: int | None) -> None:
        self.target = n_bytes


class ScriptedWorkers:
    """No workers, and the addresses that are left out."""

    def __init__(self) -> None:
        self.left_out: list[str] = []

    def known(self) -> Mapping[str, bool]:
        return {}

    def leave_out(self, addresses: Collection[str]) -> None:
        self.left_out = sorted(addresses)


class ScriptedModels:
    """One model, and what became of its plan."""

    def __init__(self) -> None:
        self.scripted = Scripted()
        self.drain = Drain(lambda: False)
        self.plans: list[Mapping[str, Any]] = []
        self.kept_s: float | None = None
        self.memory = ScriptedMemory(self.scripted.name)
        self.fetched: list[str] | None = None  # None: that is not allowed
        self.workers = ScriptedWorkers()

    @property
    def names(self) -> Sequence[str]:
        return [self.scripted.name]

    @property
    def configs(self) -> Mapping[str, EngineConfig]:
        return {self.scripted.name: EngineConfig(str(MODEL_PATH))}

    def resolve(self, name: str | None) -> str:
        if name not in (None, self.scripted.name, *self.adapters(name).names):
            raise UnknownModel(f"there is no model {name!r}")
        return name or self.scripted.name

    def adapters(self, name: str | None) -> ServedAdapters:
        return ServedAdapters()

    async def model(self, name: str | None) -> ServedModel:
        if name not in (None, self.scripted.name):
            raise UnknownModel(f"there is no model {name!r}")
        return self.scripted

    async def loaded(self) -> Sequence[ServedModel]:
        return [self.scripted]

    def file(self, name: str) -> ModelFacts:
        return ModelFacts(1_700_000_000, 10, 2048, 256, 64, 1000)

    async def running(self, name: str) -> Mapping[str, Any]:
        return await self.scripted.about()

    def health(self) -> Sequence[Mapping[str, Any]]:
        return [{"state": "waiting"}]

    def keep(self, name: str | None, idle_s: float | None) -> None:
        self.kept_s = idle_s

    def expires_s(self, name: str) -> float:
        return self.kept_s or math.inf

    def state(self, name: str) -> str:
        return "loaded"

    async def unload(self, name: str | None) -> bool:
        return False

    @property
    def fetches(self) -> Fetches[EngineConfig]:
        return Fetches(None if self.fetched is None else lambda name, progress: EngineConfig(name))

    async def fetch(self, name: str, progress: Callable[[int, int], None]) -> None:
        if self.fetched is None:
            raise NotAllowed("nothing is fetched here: --allow-pull")
        progress(5, 10)
        self.fetched.append(name)

    async def use_plan(self, name: str | None, plan: Mapping[str, Any], devices: Collection[str] = ()) -> None:
        self.plans.append(plan)
