"""Fields of requests in Ollama's API."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, ConfigDict, Field, PrivateAttr
from pydantic_core import PydanticCustomError

from edge.serve.apis.chat import Tool
from edge.serve.apis.fields import (
    MAX_LOGPROBS,
    MAX_SEED,
    MAX_STOPS,
    Fields,
    GeneratingRequest,
    Items,
    JsonObject,
    Stop,
    Stops,
    given_sampling,
    stop_strings,
)
from edge.serve.apis.history import CallId, PastCall, Role
from edge.serve.apis.other_fields import Refused
from edge.serve.http.errors import BadRequest
from edge.serve.media import Part, joined

# Default sampling parameters of Ollama.
DEFAULTS = {"temperature": 0.8, "top_k": 40, "top_p": 0.9, "min_p": 0.0}
HUBS = ("hf.co/", "huggingface.co/")  # prefixes of hub models' names
_PART = re.compile(r"(\d+(?:\.\d+)?)(ns|us|µs|ms|s|m|h)")  # part of a duration in Go's notation
_NUMBER = re.compile(r"-?\d{1,18}(\.\d+)?")  # a number of seconds
_SECONDS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}

_clock = time.monotonic_ns


def _plain_name(name: str) -> str:
    for hub in HUBS:
        name = name.removeprefix(hub)
    return name.removesuffix(":latest")


ModelName = Annotated[str, AfterValidator(_plain_name)]
"""Model name without the hub's address and without the tag `latest`."""


def _seconds(value: float | str) -> float:
    """Return the seconds of a number, or of a duration such as "1h30m". Negative durations mean infinity."""
    if isinstance(value, str) and _NUMBER.fullmatch(value):
        value = float(value)
    elif isinstance(value, str):
        sign, text = (-1, value[1:]) if value.startswith("-") else (1, value)
        parts = _PART.findall(text)
        if text != "".join(number + unit for number, unit in parts) or not parts:
            raise PydanticCustomError("duration", 'needs seconds, or a duration such as "5m" or "-1s"')
        value = sign * sum(float(number) * _SECONDS[unit] for number, unit in parts)
    return math.inf if value < 0 else value


KeepAlive = Annotated[float | str, AfterValidator(_seconds)]


class StayingModel(Fields):
    """A request with a keep-alive time for its model."""

    model: ModelName | None = Field(None, description="default: the first of /api/tags")
    keep_alive: KeepAlive | None = Field(None, description="time that an idle model stays loaded; below 0: forever")

    @property
    def keep_s(self) -> float | None:
        """Seconds that an idle model stays loaded, or None for the server's default."""
        return None if self.keep_alive is None else float(self.keep_alive)


class Options(Fields):
    """Options of the model. As in Ollama, 5.0 is accepted for an integer."""

    model_config = ConfigDict(strict=False)

    num_predict: int | None = Field(None, description="maximum tokens of an answer; 0 or below: as many as fit")
    num_ctx: int | None = Field(None, description="without effect; the answer reports a smaller context")
    seed: int | None = Field(None, description="below 0: random")
    temperature: float | None = Field(None, description="default 0.8")
    top_k: int | None = Field(None, description="default 40")
    top_p: float | None = Field(None, description="default 0.9")
    min_p: float | None = Field(None, description="default 0")
    typical_p: float | None = None
    repeat_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    stop: Stop | Stops | None = Field(None, description=f"at most {MAX_STOPS} stop strings")
    ignore_eos: bool | None = None
    min_tokens: int | None = Field(None, ge=0)

    # Minor sampling options, and loading options, which the server decides.
    ignored = frozenset(
        "draft_num_predict embedding_only f16_kv logits_all low_vram main_gpu mirostat mirostat_eta mirostat_tau"
        " num_batch num_gpu num_keep num_thread numa penalize_newline repeat_last_n tfs_z use_mlock use_mmap"
        " vocab_only".split()
    )

    def sampling(self) -> dict[str, Any]:
        """Return the options in the form of `Generation.sampling`. Raises BadRequest for too many stop strings."""
        names = (*DEFAULTS, "typical_p", "repeat_penalty", "presence_penalty", "frequency_penalty")
        sampling = given_sampling(self, names, DEFAULTS)
        if stops := stop_strings(self.stop, "options.stop"):
            sampling["stop"] = stops
        if self.seed is not None and self.seed >= 0:
            sampling["seed"] = self.seed % (MAX_SEED + 1)
        return sampling


class AnswerRequest(StayingModel, GeneratingRequest):
    """Fields common to chats and texts."""

    stream: bool | None = Field(True, description="send lines of JSON while the answer is generated")
    options: Options | None = None
    format: Literal["", "json"] | JsonObject | None = Field(None, description="json, or a JSON schema of the answer")
    think: bool | str | None = Field(None, description="true, false, or a reasoning effort")
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)

    # A conversation that is too long is always an error.
    ignored = GeneratingRequest.ignored | {"truncate", "shift"}
    effort_field = budget_field = "think"
    _arrived: int = PrivateAttr(default_factory=lambda: _clock())
    _loaded: int = PrivateAttr(0)
    _context: int = PrivateAttr(0)  # maximum tokens of a request

    @property
    def given_options(self) -> Options:
        """Options of the model. Unset options are None."""
        return self.options or Options.model_validate({})

    def admitted(self, about: Mapping[str, Any]) -> None:
        """Record when the model was loaded, and its context."""
        self._loaded = _clock()
        self._context = min(about["context"], about["trained_context"] or about["context"])

    @property
    def max_tokens(self) -> int | None:
        """Maximum tokens of the answer, or None for as many as fit."""
        n = self.given_options.num_predict
        return n if n and n > 0 else None

    @property
    def text_schema(self) -> Mapping[str, Any] | None:
        """JSON schema of the answer, or None for any text."""
        return {"type": "object"} if self.format == "json" else self.format or None

    @property
    def n_alternatives(self) -> int | None:
        """Number of alternatives for each token, or None without log-probabilities."""
        if self.top_logprobs and not self.logprobs:
            self.ignore("top_logprobs")
        return (self.top_logprobs or 0) if self.logprobs else None


Images = Annotated[Items[str], Field(description="base64 of pictures, or of sounds, before the text")]


class OllamaMessage(Fields):
    role: Role
    content: str | Items[Part] | JsonObject | None = None
    thinking: str | None = Field(None, description="thought before the answer, for templates that include it")
    images: Images | None = None
    tool_calls: Items[PastCall] | None = None
    tool_name: str | None = None
    name: str | None = Field(None, description="alias of tool_name")
    tool_call_id: CallId = None

    def to_content(self) -> list[Part]:
        """Return the pictures, followed by the text."""
        text = [Part(type="text", text=joined(self.content))] if not isinstance(self.content, list) else self.content
        return [*pictures(self.images), *text]


class OllamaChatRequest(AnswerRequest):
    messages: Items[OllamaMessage] | None = Field(None, description="empty: only load the model")
    tools: Items[Tool] | None = None


class OllamaTextRequest(AnswerRequest):
    prompt: str | None = Field(None, description="empty: only load the model")
    suffix: str | None = Field(None, description="text after a gap that the answer fills")
    system: str | None = None
    raw: bool | None = Field(None, description="pass the prompt to the model without a template")
    images: Images | None = None

    refused: ClassVar[Refused] = {
        **AnswerRequest.refused,
        "template": ("",),
        "context": ([],),
        **dict.fromkeys(("width", "height", "steps"), (0,)),
    }


class EmbedRequest(StayingModel):
    input: str | Items[str] = Field(description="a text, or several; empty: only load the model")
    dimensions: int | None = Field(None, ge=1, description="must equal the dimensions of the model")

    ignored = frozenset({"options", "truncate"})  # a text that is too long is always an error


class OldEmbedRequest(StayingModel):
    prompt: str

    ignored = frozenset({"options"})


class NamedRequest(Fields):
    model: ModelName | None = None
    name: ModelName | None = Field(None, description="alias of model")
    verbose: bool | None = None
    stream: bool | None = True

    ignored = frozenset({"insecure", "username", "password", "system", "template", "options"})

    @property
    def named(self) -> str:
        """Name of the model. Raises BadRequest if it is missing."""
        if name := self.model or self.name:
            return name
        raise BadRequest("model is required", "model")


def pictures(images: Sequence[str] | None) -> list[Part]:
    """Return pictures as parts of a message."""
    return [Part(type="image", source={"type": "base64", "data": image}) for image in images or ()]
