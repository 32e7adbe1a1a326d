"""Request fields that several APIs share, and variables of chat templates."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Annotated, Any, ClassVar, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, JsonValue, Strict, model_validator
from pydantic_core import PydanticCustomError
from typing_extensions import Self

from edge.adapters.adapter import MAX_SCALE
from edge.serve.apis.other_fields import (
    LLAMA_IGNORED,
    LLAMA_REFUSED,
    VLLM_IGNORED,
    VLLM_REFUSED,
    Refused,
    is_neutral,
    refusal,
)
from edge.serve.http.errors import BadRequest
from edge.serve.served import Generation
from edge.serve.tools.functions import json_text
from edge.templates.template import RESERVED
from edge.thinking.format import AUTO, thinking_format

MAX_SEED = 2**32 - 2  # as in edge.llm.sampler, whose import would load llama.cpp into this process
MAX_ANSWERS = 64  # of one request
MAX_BATCH = 2048  # texts of one request for embeddings
MAX_LOGPROBS = 20
MAX_STOPS = 16
MAX_BIASES = 1024  # as there
MAX_VARIABLES = 64
# Defaults of these APIs.
DEFAULTS = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0}

T = TypeVar("T")
Items = Annotated[list[T], Field(fail_fast=True)]
"""List whose first error is the only one: errors of a million items would fill the memory."""


def at_most(n: int) -> BeforeValidator:
    """Return a validator that refuses an object of more entries before it collects their errors."""

    def check(value: Any) -> Any:
        if isinstance(value, dict) and len(value) > n:
            raise PydanticCustomError("too_long", "{n} entries are the most", {"n": n})
        return value

    return BeforeValidator(check)


Biases = Annotated[dict[Annotated[int, Strict(False)], float], at_most(MAX_BIASES)]  # keys in JSON are strings
Stop = Annotated[str, Field(min_length=1, max_length=1000)]
JsonObject = dict[str, JsonValue]
FunctionName = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,128}$")]


class Fields(BaseModel):
    """A part of a request: types are not converted; unknown fields are ignored."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)

    refused: ClassVar[Refused] = {}  # known fields that are not supported and would change the answer
    ignored: ClassVar[frozenset[str]] = frozenset()  # known fields that would not change it

    @model_validator(mode="after")
    def _refuse(self) -> Self:
        """Raise an error for a field that is not supported: ignoring it would give a wrong answer."""
        for name, value in (self.model_extra or {}).items():
            if name in self.refused and not is_neutral(value, self.refused[name]):
                raise PydanticCustomError("refused", "{words}", {"words": refusal(name), "field": name})
        return self


class AdapterScale(Fields):
    id: int = Field(ge=0, description="as /lora-adapters has it")
    scale: float = Field(ge=-MAX_SCALE, le=MAX_SCALE)


class GeneratingRequest(Fields):
    """Fields of all requests for answers."""

    model: str | None = Field(None, description="by default the first of /v1/models")
    stream: bool | None = Field(None, description="send server-sent events as the answer comes")
    typical_p: float | None = Field(None, description="locally typical sampling; default 1: off")
    dry_multiplier: float | None = Field(None, description="DRY: penalty for prolonging a repetition; default 0: off")
    dry_base: float | None = Field(None, description="growth of that penalty with each token; default 1.75")
    dry_allowed_length: int | None = Field(None, description="tokens of a repetition that cost nothing; default 2")
    dry_penalty_last_n: int | None = Field(None, description="tokens that DRY looks back; default -1: all, 0: off")
    dry_sequence_breakers: Items[str] | None = Field(None, description='default "\\n", ":", "\\"", "*"')
    xtc_probability: float | None = Field(None, description="XTC: how often likely tokens are left out; default 0")
    xtc_threshold: float | None = Field(None, description="tokens this likely count as likely; default 0.1")
    allow_repetition: bool | None = Field(None, description="true: do not end an answer that repeats itself")

    lora: Items[AdapterScale] | None = Field(None, description="adapters of this answer; others are not used")

    refused: ClassVar[Refused] = {**LLAMA_REFUSED, **VLLM_REFUSED}
    ignored = LLAMA_IGNORED | VLLM_IGNORED

    def admitted(self, about: Mapping[str, Any]) -> None:
        """Note that the model is loaded. about: as ServedModel.about."""


class StreamOptions(Fields):
    include_usage: bool | None = None

    ignored = frozenset({"include_obfuscation"})  # events are never obfuscated


class SamplingFields(GeneratingRequest):
    """Sampling fields that chats, completions and responses have."""

    temperature: float | None = Field(None, description="0: always the likeliest token; default 1")
    top_p: float | None = Field(None, description="default 1: all")
    top_k: int | None = Field(None, description="keep this many of the likeliest tokens; default 0: all")
    min_p: float | None = Field(
        None, description="keep tokens at least this likely relative to the likeliest; default 0"
    )
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repeat_penalty: float | None = Field(None, description="above 1: tokens of the last 64 become less likely")
    seed: int | None = Field(None, ge=-(2**63), lt=2**63, description="-1: any")

    def sampling(self) -> dict[str, Any]:
        """Return the given fields in the form of `Generation.sampling`."""
        seed = () if self.seed == -1 else ("seed",)  # any, as other servers have it
        return given_sampling(self, (*DEFAULTS, "frequency_penalty", "presence_penalty", "repeat_penalty", *seed))


class SamplingRequest(SamplingFields):
    """Sampling fields of OpenAI's API, and those that llama.cpp adds."""

    logit_bias: Biases | None = Field(None, description="added to the logits of token ids")
    stop: Stop | Items[Stop] | None = Field(None, description=f"at most {MAX_STOPS}")
    n: int | None = Field(None, ge=1, le=MAX_ANSWERS, description="answers to each prompt")
    stream_options: StreamOptions | None = None
    grammar: str | None = Field(None, description="GBNF; the answer is what its rule `root` derives")
    regex: str | None = Field(None, description="the answer matches it")
    lark: str | None = Field(None, description="a grammar in llguidance's form of Lark")

    @property
    def include_usage(self) -> bool:
        """True if the stream's last event has the usage."""
        return bool(self.stream_options and self.stream_options.include_usage)

    def stops(self) -> list[str]:
        """Return the stop strings. BadRequest if there are too many."""
        stops = [self.stop] if isinstance(self.stop, str) else list(self.stop or ())
        if len(stops) > MAX_STOPS:
            raise BadRequest(f"{len(stops)} stop strings are given, {MAX_STOPS} are the most", "stop")
        return stops

    def sampling(self) -> dict[str, Any]:
        """Return the given fields in the form of `Generation.sampling`."""
        sampling = super().sampling() | given_sampling(self, ("logit_bias", *CONSTRAINTS), defaults={})
        return {**sampling, "stop": stops} if (stops := self.stops()) else sampling


CONSTRAINTS = ("grammar", "regex", "lark")
SAMPLING = (  # sampling fields of all APIs
    "typical_p", "dry_multiplier", "dry_base", "dry_allowed_length", "dry_penalty_last_n", "dry_sequence_breakers",
    "xtc_probability", "xtc_threshold", "allow_repetition",
)  # fmt: skip


def given_sampling(request: BaseModel, names: Iterable[str], defaults: Mapping[str, Any] = DEFAULTS) -> dict[str, Any]:
    """Return the sampling fields that a request has, and defaults for the others."""
    values = {name: value for name in (*names, *SAMPLING) if (value := getattr(request, name, None)) is not None}
    return {**defaults, **values}


def constrained(sampling: Mapping[str, Any], constraints: Mapping[str, Any]) -> dict[str, Any]:
    """Return sampling with further constraints on the answer. BadRequest if there is more than one constraint."""
    present = [name for name in ("json_schema", *CONSTRAINTS) if name in sampling or name in constraints]
    twice = [name for name in constraints if name in sampling]
    if len(present) > 1 or twice:
        raise BadRequest(
            "an answer is held to one of these: response_format, tools that must be called or are strict, "
            "grammar, regex, lark"
        )
    return {**sampling, **constraints}


def repeated(generation: Generation, n: int) -> list[Generation]:
    """Return the generation for n answers: with a seed, which may have 64 bits, each has the next one."""
    seed = generation.sampling.get("seed")
    if seed is None:
        return [replace(generation, place=i) for i in range(n)]
    return [
        replace(generation, sampling={**generation.sampling, "seed": (seed + i) % (MAX_SEED + 1)}) for i in range(n)
    ]


Name = Annotated[str, Field(pattern=r"^[A-Za-z][A-Za-z0-9_]{0,63}$")]
TemplateVariables = Annotated[dict[Name, JsonValue], at_most(MAX_VARIABLES)]


# Tokens of thoughts for efforts, where a template has no words for them.
EFFORTS: Mapping[str, int] = {
    "none": 0, "minimal": 256, "low": 1024, "medium": 4096, "high": AUTO, "xhigh": AUTO, "max": AUTO
}  # fmt: skip


def template_variables(template: str, extra: Mapping[str, Any] | None, effort: str | None = None) -> dict[str, Any]:
    """Return the variables of a request, with its effort where the template of this source uses it. BadRequest for a
    name that every template has."""
    variables = dict(extra or {})
    if reserved := sorted(RESERVED & variables.keys()):
        raise BadRequest(f"{', '.join(reserved)}: the template has it from the request", "chat_template_kwargs")
    json_text(variables, "chat_template_kwargs")
    if effort is not None and "reasoning_effort" in template:
        variables.setdefault("reasoning_effort", effort)
    return variables


def think_tokens(
    template: str, extra: Mapping[str, Any] | None, effort: str | None = None, budget: int | None = None
) -> int | None:
    """Return the tokens of thoughts that a request asks for, as `AUTO` says; None if it does not say. extra: its
    variables of the template. budget: tokens, if it names a number. BadRequest if there is thinking to do, and the
    template of this source knows none."""
    variable = (extra or {}).get("enable_thinking")
    if budget is None and effort is None:
        return None if not isinstance(variable, bool) else AUTO if variable else 0
    asks = effort if budget is None else None
    knows_effort = "reasoning_effort" in template
    if asks is not None and asks not in EFFORTS and not knows_effort:
        raise BadRequest(f"reasoning_effort {asks!r} is none of {', '.join(EFFORTS)}", "reasoning_effort")
    think = EFFORTS.get(asks, AUTO) if asks is not None else budget
    if think and not (knows_effort or "enable_thinking" in template or thinking_format(template)):
        name = "reasoning_effort" if asks is not None else "thinking"
        raise BadRequest(f"this model's chat template knows no {name}; leave it out", name)
    return AUTO if think and asks is not None and knows_effort else think
