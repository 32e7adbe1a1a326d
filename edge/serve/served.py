"""Interface between the server and engines, common to all APIs."""

from __future__ import annotations

from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Protocol

from edge.api.config import EngineConfig
from edge.models.wheels import Progress
from edge.serve.adapters import ServedAdapters
from edge.serve.drain import Drain
from edge.serve.fetches import Fetches
from edge.serve.model_files import ModelFacts
from edge.weights.elastic.shares import Share


@dataclass(frozen=True)
class ExtraFile:
    """Part of another file, as context for filling a gap."""

    filename: str
    text: str


@dataclass(frozen=True)
class Infill:
    """A gap between two texts to be filled."""

    prefix: str | Sequence[int]  # text or token ids
    suffix: str
    line: str = ""  # beginning of the line with the cursor, which follows the prefix
    files: Sequence[ExtraFile] | None = None  # nearest file last; None: the prompt has no file names


@dataclass(frozen=True)
class Generation:
    """A prompt to be continued. Exactly one of `prompt`, `infill` and `messages` is set."""

    prompt: str | Sequence[int] | None = None  # text or token ids, continued without a template
    infill: Infill | None = None
    messages: Sequence[Mapping[str, Any]] | None = None  # messages of a chat, for the model's template
    tools: Sequence[Mapping[str, Any]] = ()  # JSON of functions, in the template's form
    variables: Mapping[str, Any] = field(default_factory=dict)  # additional variables of the template
    marks: Sequence[str] = ()  # marks of tool calls, whose control tokens are returned as text
    ends_thought: Sequence[str] = ()  # marks that also end a thought
    answer: str = ""  # beginning of an answer that its constraint must read, although a header begins in the same way
    think: int | None = (
        None  # thinking budget in tokens, see `edge.text.thinking_format.AUTO`; None: the server's default
    )
    max_tokens: int | None = None  # None: until the context is full
    sampling: Mapping[str, Any] = field(default_factory=dict)  # fields of SamplingParams that are set
    priority: int = 0  # requests with lower values begin first
    client: str = ""  # identity of the client among others
    tag: float = 0.0  # place in the fair order of clients, see `edge.serve.fair_order`
    place: int = 0  # index among several answers to one prompt
    namespace: str = ""  # namespace of the prefix cache; its users could infer each other's prompts from timing
    adapters: Sequence[float] | None = None  # scale of each adapter; None: the model has none
    logprobs: int | None = None  # alternatives for each token; 0: only its own log-probability; None: none
    # Base64 or URL of pictures and sounds, by mark in the messages.
    media: Mapping[str, str] = field(default_factory=dict)
    stand_ins: Mapping[str, str] = field(default_factory=dict)  # replacement text for unsupported media, by mark


@dataclass(frozen=True)
class TokenLogprob:
    """Log-probability of a token before sampling options were applied."""

    token_id: int
    piece: bytes
    logprob: float  # natural logarithm


@dataclass(frozen=True)
class Piece:
    """Part of an answer that one step generated."""

    text: str  # may be empty while a character, a mark or a stop string is incomplete
    token_id: int | None = None  # None if the piece only reports the end
    finish_reason: str | None = None  # "stop", "length", "repetition", or None if the answer continues
    stop_string: str | None = None  # stop string that ended the answer
    logprob: TokenLogprob | None = None
    alternatives: Sequence[TokenLogprob] = ()  # most likely first
    thought: str = ""  # text of the thought, which is not part of `text`
    thought_tokens: int = 0  # thought tokens of the answer so far


class Answer(Protocol):
    """An answer that is being generated. Iterate over it for its pieces.

    The last piece has a finish reason, unless an error is raised.
    """

    prompt_tokens: int
    cached_tokens: int  # prompt tokens from the prefix cache; known with the first piece

    def __aiter__(self) -> AsyncIterator[Piece]:
        """Yield the pieces while they are generated. Raises EngineGone if the engine process ended for good."""

    def cancel(self) -> None:
        """End the answer within a step. Do nothing if it has already ended."""


class ServedModel(Protocol):
    """A model in its own engine process.

    The methods raise the errors of `edge.errors` for invalid requests, Overloaded if the queue is full, and EngineGone
    if the process ended.
    """

    name: str  # name of the model in requests

    async def generate(self, generation: Generation) -> Answer:
        """Begin an answer, and return once it is accepted.

        Raises the errors of the request: ContextFull, SamplingError, TemplateError, Overloaded.
        """

    async def tokenize(self, text: str, *, add_special: bool = True, parse_special: bool = False) -> list[int]:
        """Return the token ids of a text."""

    async def pieces(self, tokens: Sequence[int]) -> list[bytes]:
        """Return the bytes of each token. Raises SamplingError for an invalid id."""

    async def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] = (),
        variables: Mapping[str, Any] = MappingProxyType({}),
        think: int | None = None,
    ) -> str:
        """Return the text of a chat's prompt. think: see Generation. Raises TemplateError."""

    async def embed(self, texts: Sequence[str | Sequence[int]]) -> tuple[list[list[float]], int]:
        """Return the embedding of each text, normalized to length 1, and the total number of tokens.

        Raises ContextFull for a text that is too long, and EngineError if this model cannot embed.
        """

    async def rerank(self, query: str, documents: Sequence[str]) -> tuple[list[float], int]:
        """Return the score of each document for a query, higher for a better match, and the total number of tokens.

        Raises ContextFull for a document that is too long, and EngineError if this model is not a reranker.
        """

    async def turn(self, turn: Mapping[str, Any]) -> None:
        """Report a complete turn, so that the next prompt's beginning is computed while the server is idle.

        turn: fields of `edge.serve.warming.prefix.Turn`.
        """

    async def prefixes(self, do: str, arguments: Mapping[str, Any]) -> Any:
        """Call the Warmer's `announce`, `announced` or `forget`, as named by `do`.

        Return None if the model does no prefix warming.
        """

    async def about(self) -> Mapping[str, Any]:
        """Return the key `model` of the status without asking the engine."""

    async def status(self) -> dict[str, Any]:
        """Return the description and the current state of the model.

        Keys: `model` (name, path, architecture, context, trained_context, sequences, vocabulary, parameters,
        size_bytes, chat_template, and the booleans embeds, takes_media, reranks), `slots` (id, is_processing,
        prompt_tokens, generated_tokens), `waiting`, `tokens_per_s`, `devices` (name, address, rank, layers, heads,
        memory_bytes, gpu_bytes, busy, link; devices that are not used any more have `left_s`, the seconds since then),
        `links` (from, to, kind, latency_s, bytes_per_s), `plan`, `why`, `restarts`,
        `events` (time in seconds since 1970, text: the latest lines for users), `counters` (prompt_tokens,
        cached_tokens, generated_tokens, steps, preemptions, background_preemptions), `warming` (computed_tokens,
        used_tokens, seconds), `speculation` (None, or draft, drafted, accepted, passes, rows_per_pass, gain), and
        `latency` (None, or target_itl_ms, target_ttft_ms,
        gaps, gaps_within, first_tokens, first_tokens_within).

        While the engine waits for a lost device, this is the last status with the latest events. Raises EngineGone
        while the model is being loaded.
        """


class ServedMemory(Protocol):
    """Memory budget that the models of the server share."""

    @property
    def n_bytes(self) -> int | None:
        """Budget in bytes, or None if each model has its configured memory."""

    @property
    def target(self) -> int | None:
        """Requested total in bytes, or None for the whole budget."""

    def shares(self) -> Mapping[str, Share]:
        """Return the shares of the loaded models by name, or {} without a budget."""

    async def ask(self, n_bytes: int | None) -> None:
        """Reduce the total memory of the models to n_bytes. Models in use keep at least their minimum.

        Idle models are unloaded if necessary.
        n_bytes: None: the whole budget.
        Raises NotAllowed without a budget.
        """


class ServedWorkers(Protocol):
    """Workers of the server's models."""

    def known(self) -> Mapping[str, bool]:
        """Return the workers of all models by canonical address. The value is True if a worker need not encrypt."""

    def leave_out(self, addresses: Collection[str]) -> None:
        """Run all models without these workers from now on, and plan with workers that were left out before.

        addresses: canonical addresses. Running answers continue.
        """


class ServedModels(Protocol):
    """All models of the server."""

    drain: Drain  # whether the server ends when its answers have ended

    @property
    def configs(self) -> Mapping[str, EngineConfig]:
        """Configuration of each model by name, the default model first."""

    @property
    def fetches(self) -> Fetches[EngineConfig]:
        """Fetches of models, which `fetch` starts."""

    @property
    def workers(self) -> ServedWorkers:
        """Return the workers of the models."""

    @property
    def memory(self) -> ServedMemory:
        """Return the memory budget of the models."""

    @property
    def names(self) -> Sequence[str]:
        """Names of the models, the default model first."""

    def resolve(self, name: str | None) -> str:
        """Return the served name of the model or adapter that a name in a request stands for.

        None and an empty name stand for the default model. If the server has only one model, any name stands for it.
        Raises UnknownModel with the available names.
        """

    def adapters(self, name: str | None) -> ServedAdapters:
        """Return the adapters of a model. name: the model, or one of its adapters. Raises UnknownModel."""

    async def model(self, name: str | None) -> ServedModel:
        """Return a model, after loading it if necessary.

        name: the model, or one of its adapters; None: the default model. Raises UnknownModel, NotEnoughMemory,
        EngineGone.
        """

    async def loaded(self) -> Sequence[ServedModel]:
        """Return the loaded models."""

    def file(self, name: str) -> ModelFacts:
        """Return facts about a model's file. Do not call this in the event loop, because it may read the file."""

    async def running(self, name: str) -> Mapping[str, Any]:
        """Return `about` of a model if it is loaded, otherwise {}."""

    def health(self) -> Sequence[Mapping[str, Any]]:
        """Return the health of each loaded model.

        Keys: `state` (waiting, computing, loading, silent, restarting or failed), `busy_s` if it computes, and `reason`
        if it does not answer.
        """

    def keep(self, name: str | None, idle_s: float | None) -> None:
        """Set the idle time after which a model is unloaded. Pinned models are never unloaded.

        idle_s: seconds; infinity: never; None: the server's default. Raises UnknownModel.
        """

    def expires_s(self, name: str) -> float:
        """Return the seconds until a model is unloaded if it remains idle. Infinity: never."""

    def state(self, name: str) -> str:
        """Return "loaded", "loading", "failed" or "unloaded"."""

    async def unload(self, name: str | None) -> bool:
        """Unload a model now. Return False if it is not loaded, in use, or pinned. Raises UnknownModel."""

    async def fetch(self, name: str, progress: Progress) -> None:
        """Fetch a model by its name and serve it.

        progress: called in any thread with the bytes done and in total. Raises NotAllowed and HubError.
        """

    async def use_plan(self, name: str | None, plan: Mapping[str, Any], devices: Collection[str] = ()) -> None:
        """Switch a model to another plan. Running answers continue on its devices.

        devices: addresses that the plan may have in addition to this device. Raises PlanError, and NotAllowed for any
        other device, and for a device that is left out.
        """
