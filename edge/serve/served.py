"""What the server asks of an engine, and what comes of it, whichever API the request came through."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Protocol

from edge.serve.model_files import ModelFile


@dataclass(frozen=True)
class Generation:
    """A prompt to be continued. One of `prompt` and `messages` is given."""

    prompt: str | Sequence[int] | None = None  # a text or token ids, continued as they are
    messages: Sequence[Mapping[str, Any]] | None = None  # of a chat, for the model's template
    tools: Sequence[Mapping[str, Any]] = ()  # JSON of functions, as the template takes them
    variables: Mapping[str, Any] = field(default_factory=dict)  # of the template, beside what it always has
    max_tokens: int | None = None  # None: until the context is full
    stop: Sequence[str] = ()
    sampling: Mapping[str, Any] = field(default_factory=dict)  # fields of SamplingParams that are given
    place: int = 0  # among the answers to one prompt
    namespace: str = ""  # of those who may notice, by its speed, that a prompt like theirs was asked before
    logprobs: int | None = None  # alternatives told with each token; 0: its own probability alone; None: nothing


@dataclass(frozen=True)
class TokenLogprob:
    """How likely a token was, before any option of sampling changed that."""

    token_id: int
    piece: bytes
    logprob: float  # natural logarithm


@dataclass(frozen=True)
class Piece:
    """What one step brought of an answer."""

    text: str  # may be empty while a character or a stop string is incomplete
    token_id: int | None = None  # None where only the end is told
    finish_reason: str | None = None  # "stop", "length", "repetition", or None while it goes on
    stop_string: str | None = None  # the stop string that ended it
    logprob: TokenLogprob | None = None
    alternatives: Sequence[TokenLogprob] = ()  # the likeliest first


class Answer(Protocol):
    """An answer in the making: iterate for its pieces. The last has a finish reason, unless an error is raised."""

    prompt_tokens: int
    cached_tokens: int  # of the prompt: that need not be computed; known with the first piece

    def __aiter__(self) -> AsyncIterator[Piece]:
        """The pieces as they come. EngineGone where its engine ended and could not go on."""

    def cancel(self) -> None:
        """End it, within a step; nothing where it has ended."""


class ServedModel(Protocol):
    """A model in a process of its own. Its methods raise the errors of `edge.errors` for what is asked wrongly: they
    come from the process, with its words. Overloaded where too many wait; EngineGone where the process ended."""

    name: str  # of the model, as requests give it

    async def generate(self, generation: Generation) -> Answer:
        """Begin an answer. It was accepted then: what can be wrong with a request is raised here. ContextFull,
        SamplingError, TemplateError, Overloaded."""

    async def tokenize(self, text: str, *, add_special: bool = True, parse_special: bool = False) -> list[int]:
        """The token ids of a text."""

    async def pieces(self, tokens: Sequence[int]) -> list[bytes]:
        """The bytes of each token. SamplingError for an id that is none."""

    async def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] = (),
        variables: Mapping[str, Any] = MappingProxyType({}),
    ) -> str:
        """The prompt's text of a chat. TemplateError."""

    async def embed(self, texts: Sequence[str | Sequence[int]]) -> tuple[list[list[float]], int]:
        """The embedding of each text, of length 1, and how many tokens they have in all. ContextFull for a text that is
        too long, EngineError where this model cannot."""

    async def about(self) -> dict[str, Any]:
        """What it is: the key `model` of its status, without asking the engine."""

    async def status(self) -> dict[str, Any]:
        """What it is and does now: keys `model` (name, path, architecture, context, trained_context, sequences,
        vocabulary, parameters, size_bytes, chat_template, embeds: whether), `slots` (id, is_processing, prompt_tokens,
        generated_tokens), `waiting`, `tokens_per_s`, `devices` (name, rank, layers, heads, memory_bytes, link), `plan`,
        `why`, `restarts`, `counters` (prompt_tokens, cached_tokens, generated_tokens, steps, preemptions), and
        `speculation` (None, or draft, drafted, accepted, passes, rows_per_pass, gain). EngineGone while its
        model is being loaded."""


class ServedModels(Protocol):
    """All models that the server has."""

    @property
    def names(self) -> Sequence[str]:
        """Of the models, the default one first."""

    async def model(self, name: str | None) -> ServedModel:
        """A model, loaded; None: the default one. UnknownModel, NotEnoughMemory, EngineGone."""

    async def loaded(self) -> Sequence[ServedModel]:
        """Those that are loaded now."""

    def file(self, name: str) -> ModelFile:
        """Facts about the file of a model that is there; read where that is new, so not for the event loop."""

    async def running(self, name: str) -> Mapping[str, Any]:
        """`about` of a model that is loaded; else nothing."""

    def health(self) -> Sequence[Mapping[str, Any]]:
        """Tell of each loaded model whether it answers: `state` (waiting, computing, loading, silent, restarting or
        failed), `busy_s` where it computes, and `reason` where it does not answer."""

    async def use_plan(self, name: str | None, plan: Mapping[str, Any]) -> None:
        """Run a model as another plan says, from now on; answers that are under way go on there. PlanError."""
