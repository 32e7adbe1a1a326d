"""Interface between the server and engines, whichever API a request came through."""

from __future__ import annotations

from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Protocol

from edge.elastic.shares import Share
from edge.models.wheels import Progress
from edge.serve.adapters import ServedAdapters
from edge.serve.model_files import ModelFile


@dataclass(frozen=True)
class ExtraFile:
    """A part of another file, for what fills a gap."""

    filename: str
    text: str


@dataclass(frozen=True)
class Infill:
    """A gap to be filled between two texts."""

    prefix: str | Sequence[int]  # a text or token ids
    suffix: str
    line: str = ""  # follows the prefix: the beginning of the line with the cursor
    files: Sequence[ExtraFile] | None = None  # the nearest last; None: the prompt names no files at all


@dataclass(frozen=True)
class Generation:
    """A prompt to be continued. One of `prompt`, `infill` and `messages` is given."""

    prompt: str | Sequence[int] | None = None  # a text or token ids, continued as they are
    infill: Infill | None = None
    messages: Sequence[Mapping[str, Any]] | None = None  # of a chat, for the model's template
    tools: Sequence[Mapping[str, Any]] = ()  # JSON of functions, in the template's form
    variables: Mapping[str, Any] = field(default_factory=dict)  # of the template, beside the usual ones
    marks: Sequence[str] = ()  # of calls: their control tokens have text
    ends_thought: Sequence[str] = ()  # those that end a thought which they come in
    answer: str = ""  # beginning of an answer which its constraint is to read, though a header begins like it
    think: int | None = None  # tokens of thoughts, as `edge.thinking.format.AUTO` says; None: the server's default
    max_tokens: int | None = None  # None: until the context is full
    sampling: Mapping[str, Any] = field(default_factory=dict)  # fields of SamplingParams that are given
    place: int = 0  # number among the answers to one prompt
    namespace: str = ""  # of the prefix cache: its users may notice by speed that another had the same prompt
    adapters: Sequence[float] | None = None  # scale of each adapter; None: the model has none
    logprobs: int | None = None  # alternatives with each token; 0: its own probability alone; None: no probabilities
    media: Mapping[str, str] = field(default_factory=dict)  # base64 or URL of pictures and sounds, by marks in messages
    stand_ins: Mapping[str, str] = field(default_factory=dict)  # by mark, the text in place of one that cannot be taken


@dataclass(frozen=True)
class TokenLogprob:
    """Probability of a token before any sampling option changed it."""

    token_id: int
    piece: bytes
    logprob: float  # natural logarithm


@dataclass(frozen=True)
class Piece:
    """The part of an answer that one step generated."""

    text: str  # may be empty while a character, a mark or a stop string is incomplete
    token_id: int | None = None  # None if the piece reports only the end
    finish_reason: str | None = None  # "stop", "length", "repetition", or None while it goes on
    stop_string: str | None = None  # the stop string that ended it
    logprob: TokenLogprob | None = None
    alternatives: Sequence[TokenLogprob] = ()  # most likely first
    thought: str = ""  # what the model thinks, which is no part of `text`
    thought_tokens: int = 0  # of the answer so far


class Answer(Protocol):
    """An answer that is being generated: iterate for its pieces. The last has a finish reason, unless an error is
    raised."""

    prompt_tokens: int
    cached_tokens: int  # of the prompt, from the prefix cache; known with the first piece

    def __aiter__(self) -> AsyncIterator[Piece]:
        """Yield the pieces as they come. EngineGone if its engine ended and could not go on."""

    def cancel(self) -> None:
        """End it within a step; do nothing if it has ended."""


class ServedModel(Protocol):
    """A model in a process of its own. Its methods raise the errors of `edge.errors` for invalid requests, with the
    process's messages. Overloaded if too many wait; EngineGone if the process ended."""

    name: str  # the model's name in requests

    async def generate(self, generation: Generation) -> Answer:
        """Begin an answer. It is accepted when this returns: errors of the request are raised here. ContextFull,
        SamplingError, TemplateError, Overloaded."""

    async def tokenize(self, text: str, *, add_special: bool = True, parse_special: bool = False) -> list[int]:
        """Return the token ids of a text."""

    async def pieces(self, tokens: Sequence[int]) -> list[bytes]:
        """Return the bytes of each token. SamplingError for an invalid id."""

    async def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] = (),
        variables: Mapping[str, Any] = MappingProxyType({}),
        think: int | None = None,
    ) -> str:
        """Return the text of a chat's prompt. think: as of a Generation. TemplateError."""

    async def embed(self, texts: Sequence[str | Sequence[int]]) -> tuple[list[list[float]], int]:
        """Return the embedding of each text, of length 1, and their total number of tokens. ContextFull for a text that
        is too long, EngineError if this model cannot embed."""

    async def rerank(self, query: str, documents: Sequence[str]) -> tuple[list[float], int]:
        """Return the score of each document for a query, higher for a better one, and the total number of tokens.
        ContextFull for a document that is too long, EngineError if this model cannot rank."""

    async def turn(self, turn: Mapping[str, Any]) -> None:
        """Note a turn that is complete, so that the beginning of the next prompt is computed while nobody asks. turn:
        fields of `edge.serve.warming.prefix.Turn`."""

    async def prefixes(self, do: str, arguments: Mapping[str, Any]) -> Any:
        """Announce a prefix, list those that were announced, or forget one, as the Warmer's `announce`, `announced` and
        `forget`. None if this model computes nothing while nobody asks."""

    async def about(self) -> Mapping[str, Any]:
        """Return the key `model` of its status, without asking the engine."""

    async def status(self) -> dict[str, Any]:
        """Return its description and current state: keys `model` (name, path, architecture, context, trained_context,
        sequences, vocabulary, parameters, size_bytes, chat_template; embeds, takes_media, reranks: whether), `slots`
        (id, is_processing, prompt_tokens, generated_tokens), `waiting`, `tokens_per_s`, `devices` (name, rank, layers,
        heads, memory_bytes, link), `plan`, `why`, `restarts`, `counters` (prompt_tokens, cached_tokens,
        generated_tokens, steps, preemptions, background_preemptions), `warming` (computed_tokens,
        used_tokens, seconds), `speculation` (None, or draft, drafted, accepted, passes, rows_per_pass, gain), and
        `latency` (None, or target_itl_ms, target_ttft_ms, gaps, gaps_within, first_tokens, first_tokens_within).
        EngineGone while its model is being loaded."""


class ServedMemory(Protocol):
    """Memory that the models of the server share."""

    @property
    def n_bytes(self) -> int | None:
        """Bytes that they share; None: each has what its options say."""

    @property
    def target(self) -> int | None:
        """Bytes that they were asked to keep to; None: all."""

    def shares(self) -> Mapping[str, Share]:
        """Return the shares of the loaded models by name; none where nothing is divided."""

    async def ask(self, n_bytes: int | None) -> None:
        """Have the models together hold so many bytes, or the least of those in use if that is more; idle ones are
        unloaded where need be. None: all. NotAllowed where nothing is divided."""


class ServedModels(Protocol):
    """All models of the server."""

    @property
    def memory(self) -> ServedMemory:
        """Return the memory that they share."""

    @property
    def names(self) -> Sequence[str]:
        """Names of the models, the default one first."""

    def resolve(self, name: str | None) -> str:
        """Return the served name that a name in a request stands for: that of a model, or of an adapter. None, and an
        empty name: the default model. Any name stands for the only model of a server. UnknownModel, with the names that
        there are."""

    def adapters(self, name: str | None) -> ServedAdapters:
        """Return the adapters of a model, or of the one that an adapter of this name belongs to. UnknownModel."""

    async def model(self, name: str | None) -> ServedModel:
        """Return a model, and load it if needed; None: the default one. An adapter's name stands for its model.
        UnknownModel, NotEnoughMemory, EngineGone."""

    async def loaded(self) -> Sequence[ServedModel]:
        """Return the models that are loaded."""

    def file(self, name: str) -> ModelFile:
        """Return facts about a model's file. A new file is read, so do not call this on the event loop."""

    async def running(self, name: str) -> Mapping[str, Any]:
        """Return `about` of a loaded model; of another one, nothing."""

    def health(self) -> Sequence[Mapping[str, Any]]:
        """Return the health of each loaded model: `state` (waiting, computing, loading, silent, restarting or failed),
        `busy_s` if it computes, and `reason` if it does not answer."""

    def keep(self, name: str | None, idle_s: float | None) -> None:
        """Unload a model once it was idle for so many seconds, infinity: never. None: as the server's options say.
        Pinned models stay. UnknownModel."""

    def expires_s(self, name: str) -> float:
        """Return the seconds until a model is unloaded if nobody uses it; infinity: it stays."""

    async def unload(self, name: str | None) -> bool:
        """Unload a model now; False if it is not loaded, in use, or stays. UnknownModel."""

    async def fetch(self, name: str, progress: Progress) -> None:
        """Fetch a model by its name, and serve it. progress: gets bytes here and in all, in any thread. NotAllowed,
        HubError."""

    async def use_plan(self, name: str | None, plan: Mapping[str, Any], devices: Collection[str] = ()) -> None:
        """Run a model with another plan from now on; running answers go on there. devices: addresses that it may have
        beside this device. PlanError; NotAllowed for another one, which is not asked."""
