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
)
from edge.serve.apis.history import CallId, PastCall, Role
from edge.serve.apis.other_fields import Refused
from edge.serve.http.errors import BadRequest
from edge.serve.media import Part, joined

# Defaults of Ollama.
DEFAULTS = {"temperature": 0.8, "top_k": 40, "top_p": 0.9, "min_p": 0.0}
HUBS = ("hf.co/", "huggingface.co/")  # before the names of models on the hub
_PART = re.compile(r"(\d+(?:\.\d+)?)(ns|us|µs|ms|s|m|h)")  # of a duration, as Go writes it
_NUMBER = re.compile(r"-?\d{1,18}(\.\d+)?")  # of seconds
_SECONDS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}

_clock = time.monotonic_ns


def _plain_name(name: str) -> str:
    for hub in HUBS:
        name = name.removeprefix(hub)
    return name.removesuffix(":latest")


ModelName = Annotated[str, AfterValidator(_plain_name)]
"""Name of a model without the tag `latest`, which all have, and without the address of the hub."""


def _seconds(value: float | str) -> float:
    """Return the seconds of a number, or of a duration such as "1h30m"; infinity if it is below 0."""
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
    """A request that says for how long its model stays loaded."""

    model: ModelName | None = Field(None, description="by default the first of /api/tags")
    keep_alive: KeepAlive | None = Field(None, description="for how long an idle model stays; below 0: for ever")

    @property
    def keep_s(self) -> float | None:
        """Seconds that the model stays when idle; None: as the server's options say."""
        return None if self.keep_alive is None else float(self.keep_alive)


class Options(Fields):
    """Options of the model. Numbers are taken as Ollama takes them: 5.0 is a whole one."""

    model_config = ConfigDict(strict=False)

    num_predict: int | None = Field(None, description="tokens of an answer; 0 or below: as many as there is room for")
    num_ctx: int | None = Field(None, description="the server's context stays; less of it is told in the answer")
    seed: int | None = Field(None, description="below 0: any")
    temperature: float | None = Field(None, description="default 0.8")
    top_k: int | None = Field(None, description="default 40")
    top_p: float | None = Field(None, description="default 0.9")
    min_p: float | None = Field(None, description="default 0")
    typical_p: float | None = None
    repeat_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    stop: Stop | Stops | None = Field(None, description=f"at most {MAX_STOPS}")
    ignore_eos: bool | None = None
    min_tokens: int | None = Field(None, ge=0)

    # Finer points of sampling; how a model is loaded, which is up to the server.
    ignored = frozenset(
        "draft_num_predict embedding_only f16_kv logits_all low_vram main_gpu mirostat mirostat_eta mirostat_tau"
        " num_batch num_gpu num_keep num_thread numa penalize_newline repeat_last_n tfs_z use_mlock use_mmap"
        " vocab_only".split()
    )

    def sampling(self) -> dict[str, Any]:
        """Return the options in the form of `Generation.sampling`."""
        names = (*DEFAULTS, "typical_p", "repeat_penalty", "presence_penalty", "frequency_penalty", "stop")
        sampling = given_sampling(self, names, DEFAULTS)
        if isinstance(self.stop, str):
            sampling["stop"] = [self.stop]
        if self.seed is not None and self.seed >= 0:
            sampling["seed"] = self.seed % (MAX_SEED + 1)
        return sampling


class AnswerRequest(StayingModel, GeneratingRequest):
    """Fields that chats and texts share."""

    stream: bool | None = Field(True, description="send lines of JSON as the answer comes")
    options: Options | None = None
    format: Literal["", "json"] | JsonObject | None = Field(None, description="json, or a schema of the answer")
    think: bool | str | None = Field(None, description="true, false, or an effort")
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)

    # A conversation that is too long is an error in any case.
    ignored = GeneratingRequest.ignored | {"truncate", "shift"}
    effort_field = budget_field = "think"
    _arrived: int = PrivateAttr(default_factory=lambda: _clock())
    _loaded: int = PrivateAttr(0)
    _context: int = PrivateAttr(0)  # tokens that a request may have

    @property
    def given_options(self) -> Options:
        """Options of the model; those that the request does not have are None."""
        return self.options or Options.model_validate({})

    def admitted(self, about: Mapping[str, Any]) -> None:
        """As GeneratingRequest.admitted."""
        self._loaded = _clock()
        self._context = min(about["context"], about["trained_context"] or about["context"])

    @property
    def max_tokens(self) -> int | None:
        """Tokens of the answer; None: as many as there is room for."""
        n = self.given_options.num_predict
        return n if n and n > 0 else None

    @property
    def text_schema(self) -> Mapping[str, Any] | None:
        """JSON schema of the answer; None for any text."""
        return {"type": "object"} if self.format == "json" else self.format or None

    @property
    def n_alternatives(self) -> int | None:
        """Alternatives with each token; None: no probabilities."""
        if self.top_logprobs and not self.logprobs:
            self.ignore("top_logprobs")
        return (self.top_logprobs or 0) if self.logprobs else None


Images = Annotated[Items[str], Field(description="base64 of pictures, or of sounds, before the text")]


class OllamaMessage(Fields):
    role: Role
    content: str | Items[Part] | JsonObject | None = None
    thinking: str | None = Field(None, description="thought before it, for templates that keep it")
    images: Images | None = None
    tool_calls: Items[PastCall] | None = None
    tool_name: str | None = None
    name: str | None = Field(None, description="as tool_name")
    tool_call_id: CallId = None

    def to_content(self) -> list[Part]:
        """Return the pictures, and the text behind them."""
        text = [Part(type="text", text=joined(self.content))] if not isinstance(self.content, list) else self.content
        return [*pictures(self.images), *text]


class OllamaChatRequest(AnswerRequest):
    messages: Items[OllamaMessage] | None = Field(None, description="none: the model is loaded")
    tools: Items[Tool] | None = None


class OllamaTextRequest(AnswerRequest):
    prompt: str | None = Field(None, description="none: the model is loaded")
    suffix: str | None = Field(None, description="fill the gap between the prompt and this text")
    system: str | None = None
    raw: bool | None = Field(None, description="the prompt is what the model reads, without a template")
    images: Images | None = None

    refused: ClassVar[Refused] = {
        **AnswerRequest.refused,
        "template": ("",),
        "context": ([],),
        **dict.fromkeys(("width", "height", "steps"), (0,)),
    }


class EmbedRequest(StayingModel):
    input: str | Items[str] = Field(description="a text, or several; none: the model is loaded")
    dimensions: int | None = Field(None, ge=1, description="must be what the model has")

    ignored = frozenset({"options", "truncate"})  # a text that is too long is an error in any case


class OldEmbedRequest(StayingModel):
    prompt: str

    ignored = frozenset({"options"})


class NamedRequest(Fields):
    model: ModelName | None = None
    name: ModelName | None = Field(None, description="as model")
    verbose: bool | None = None
    stream: bool | None = True

    ignored = frozenset({"insecure", "username", "password", "system", "template", "options"})

    @property
    def named(self) -> str:
        """The name of the model. BadRequest without any."""
        if name := self.model or self.name:
            return name
        raise BadRequest("model is required", "model")


def pictures(images: Sequence[str] | None) -> list[Part]:
    """Return pictures as parts of a message."""
    return [Part(type="image", source={"type": "base64", "data": image}) for image in images or ()]
