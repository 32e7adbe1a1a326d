"""Request fields that several APIs share, and variables of chat templates."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import cache
from types import UnionType
from typing import Annotated, Any, ClassVar, TypeVar, Union, get_args, get_origin

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, JsonValue, PrivateAttr, Strict, model_validator
from pydantic_core import PydanticCustomError
from typing_extensions import Self

from edge.serve.apis.other_fields import (
    LLAMA_IGNORED,
    LLAMA_REFUSED,
    NEUTRAL,
    VLLM_IGNORED,
    VLLM_REFUSED,
    Refused,
    is_empty,
    is_neutral,
    refusal,
)
from edge.serve.http.errors import BadRequest
from edge.serve.served import Generation
from edge.serve.tools.functions import json_text
from edge.text.templates.template import RESERVED
from edge.text.thinking_format import AUTO, thinking_format
from edge.weights.adapter import MAX_SCALE

MAX_SEED = 2**32 - 2  # equals edge.llm.sampler's, whose import would load llama.cpp into this process
MAX_ANSWERS = 64  # answers of one request
MAX_BATCH = 2048  # texts of one embeddings request
MAX_LOGPROBS = 20
MAX_STOPS = 256  # more stop strings would slow each token down
MAX_SCALAR = 64  # characters of a number that is written as text
MAX_BIASES = 1024  # equals edge.llm.sampler's
MAX_VARIABLES = 64
NEVER = -1e6  # bias that no logit outweighs
MAX_PRIORITY = 2**31 - 1
MAX_TOP_K = 2**31 - 1  # equals edge.llm.sampler's
MAX_WHOLE = 2**63  # larger floating-point numbers are not converted to integers
# Default sampling parameters of these APIs.
DEFAULTS = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0}

T = TypeVar("T")
Kind = type  # alias for `type` in classes with a field of that name
Items = Annotated[list[T], Field(fail_fast=True)]
"""List that reports only its first error, because errors of a million items would fill the memory."""


def _bias_pairs(value: Any) -> Any:
    """Return biases in llama.cpp's form [[ID, bias or false], ...] as an object."""
    if not isinstance(value, list):
        return value
    if len(value) > MAX_BIASES:
        raise PydanticCustomError("too_long", "at most {n} entries are allowed", {"n": MAX_BIASES})
    biases: dict[Any, Any] = {}
    for pair in value:
        token, bias = pair if isinstance(pair, list) and len(pair) == 2 else (None, None)
        if isinstance(token, bool) or not isinstance(token, int):
            raise PydanticCustomError(
                "bias", "logit_bias needs [[ID, bias], ...], got {pair}; /tokenize returns the ids of a text",
                {"pair": repr(pair)[:80]},
            )  # fmt: skip
        biases[token] = NEVER if bias is False else bias
    return biases


def kind_of(value: Any) -> Any:
    """Return the field `type` of JSON, or of an object made of it; None if there is none."""
    return value.get("type") if isinstance(value, dict) else getattr(value, "type", None)


def at_most(n: int) -> BeforeValidator:
    """Return a validator that refuses an object with more than n entries before it collects their errors."""

    def check(value: Any) -> Any:
        if isinstance(value, dict) and len(value) > n:
            raise PydanticCustomError("too_long", "at most {n} entries are allowed", {"n": n})
        return value

    return BeforeValidator(check)


def _without_empty(value: Any) -> Any:
    return [item for item in value if item not in ("", None)] if isinstance(value, list) else value


Biases = Annotated[
    dict[Annotated[int, Strict(False)], float],  # keys in JSON are strings
    at_most(MAX_BIASES),
    BeforeValidator(_bias_pairs),
]
Stop = Annotated[str, Field(max_length=1000)]
Stops = Annotated[Items[Stop], BeforeValidator(_without_empty)]
JsonObject = dict[str, JsonValue]
FunctionName = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,128}$")]


@cache
def _required_and_boolean(fields: type[Fields]) -> tuple[frozenset[str], frozenset[str]]:
    """Return the names of required fields, and of fields that accept false."""
    known = {field.alias or name: field for name, field in fields.model_fields.items()}
    required = frozenset(name for name, field in known.items() if field.is_required())
    return required, frozenset(name for name, field in known.items() if _takes_false(field.annotation))


def _takes_false(annotation: Any) -> bool:
    is_list = get_origin(annotation) in (list, dict)
    return annotation in (bool, Any) or (not is_list and any(map(_takes_false, get_args(annotation))))


@cache
def _scalars(fields: type[Fields]) -> Mapping[str, frozenset[type]]:
    """Return the types of each field that is a number or a boolean and never text."""
    known = {field.alias or name: _members(field.annotation) for name, field in fields.model_fields.items()}
    return {name: types for name, types in known.items() if types and types <= {bool, int, float}}


def _members(annotation: Any) -> frozenset[Any]:
    """Return the members of a union without None."""
    if get_origin(annotation) in (Union, UnionType):
        return frozenset().union(*map(_members, get_args(annotation)))
    return frozenset() if annotation is type(None) else frozenset({annotation})


def _scalar(value: Any, types: frozenset[type]) -> Any:
    """Convert a text or number to the number or boolean that it represents. Return other values unchanged.

    Forms and environment variables can only hold texts.
    """
    if isinstance(value, str) and len(value) <= MAX_SCALAR:
        with suppress(ValueError):
            read = json.loads(value.strip().lower())
            is_meant = bool in types if isinstance(read, bool) else isinstance(read, int | float)
            value = read if is_meant else value
    is_bit = types == {bool} and type(value) in (int, float) and value in (0, 1)
    return bool(value) if is_bit else value


class Fields(BaseModel):
    """Base class of requests and their parts.

    A number or boolean may be written as text, and an integer as 5.0. A field whose value has no effect counts as
    absent. Unknown fields are ignored.
    """

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)

    refused: ClassVar[Refused] = {}  # unsupported fields without which the answer would be wrong
    ignored: ClassVar[frozenset[str]] = frozenset()  # other known but unsupported fields
    other_names: ClassVar[Mapping[str, str]] = {}  # other servers' names of supported fields
    # Optional fields for which an empty value of this type is meaningful.
    empty_values: ClassVar[Mapping[str, Kind]] = {}

    @model_validator(mode="before")
    @classmethod
    def _normalize(cls, values: Any) -> Any:
        """Drop fields without effect, rename fields to the names of this API, and convert whole numbers to integers."""
        if not isinstance(values, dict):
            return values
        required, boolean = _required_and_boolean(cls)
        scalars = _scalars(cls)
        own: dict[str, Any] = {}
        for own_name, value in values.items():
            name = cls.other_names.get(own_name, own_name)
            if name in scalars:
                value = _scalar(value, scalars[name])
            is_set = not is_neutral(value, () if name in cls.model_fields else NEUTRAL.get(name, ()))
            is_kept = (
                name in required or (value is False and name in boolean) or type(value) is cls.empty_values.get(name)
            )
            if not (is_set or is_kept):
                continue
            if name != own_name and not is_empty(values.get(name)):
                continue  # the name of this API takes precedence
            is_whole = type(value) is float and value.is_integer() and abs(value) < MAX_WHOLE
            own[name] = int(value) if is_whole else value
        return own

    @model_validator(mode="after")
    def _refuse(self) -> Self:
        """Raise an error for an unsupported field if ignoring it would give a wrong answer."""
        for name, value in (self.model_extra or {}).items():
            if name in self.refused and not is_neutral(value, self.refused[name]):
                raise PydanticCustomError("refused", "{words}", {"words": refusal(name), "field": name})
        return self

    def ignored_names(self) -> Iterator[str]:
        """Yield the names of set fields that have no effect. Fields of parts are qualified: `part.field`."""
        yield from (name for name in self.model_extra or () if name not in self.refused)
        for name in filter(self.model_fields_set.__contains__, type(self).model_fields):
            value = getattr(self, name)
            for part in value if isinstance(value, list) else (value,):
                if isinstance(part, Fields):
                    yield from (f"{name}.{inner}" for inner in part.ignored_names())


class AdapterScale(Fields):
    id: int = Field(ge=0, description="id in /lora-adapters")
    scale: float = Field(ge=-MAX_SCALE, le=MAX_SCALE)


class GeneratingRequest(Fields):
    """Fields of all requests that generate answers."""

    model: str | None = Field(None, description="default: the first of /v1/models")
    stream: bool | None = Field(None, description="send server-sent events while the answer is generated")
    typical_p: float | None = Field(None, description="locally typical sampling; default 1: off")
    dry_multiplier: float | None = Field(None, description="DRY: penalty for prolonging a repetition; default 0: off")
    dry_base: float | None = Field(None, description="growth of that penalty with each token; default 1.75")
    dry_allowed_length: int | None = Field(None, description="tokens of a repetition without penalty; default 2")
    dry_penalty_last_n: int | None = Field(None, description="last tokens that DRY considers; default -1: all, 0: off")
    dry_sequence_breakers: Items[str] | str | None = Field(None, description='default "\\n", ":", "\\"", "*"')
    xtc_probability: float | None = Field(None, description="XTC: probability of removing likely tokens; default 0")
    xtc_threshold: float | None = Field(None, description="least probability of a likely token; default 0.1")
    allow_repetition: bool | None = Field(None, description="true: do not stop repetition loops")
    ignore_eos: bool | None = Field(None, description="true: continue after the end token, up to max_tokens")
    min_tokens: int | None = Field(None, ge=0, description="minimum tokens of an answer, at most max_tokens")

    priority: int | None = Field(
        None, ge=-MAX_PRIORITY, le=MAX_PRIORITY, description="requests with lower values begin first; default 0"
    )
    lora: Items[AdapterScale] | None = Field(None, description="adapters for this answer; others are inactive")

    refused: ClassVar[Refused] = {**LLAMA_REFUSED, **VLLM_REFUSED}
    ignored = LLAMA_IGNORED | VLLM_IGNORED
    empty_values: ClassVar[Mapping[str, Kind]] = {"lora": list}  # an empty list turns all adapters off
    effort_field: ClassVar[str] = "reasoning_effort"  # name of the reasoning effort field
    budget_field: ClassVar[str] = "thinking"  # name of the thinking budget field
    _ignored: list[str] = PrivateAttr(default_factory=list)

    def ignore(self, name: str) -> None:
        """Record a field that has no effect with this model or with the request's other fields."""
        self._ignored.append(name)

    def ignored_names(self) -> Iterator[str]:
        """Yield the names of set fields that have no effect."""
        yield from self._ignored
        yield from super().ignored_names()

    def admitted(self, about: Mapping[str, Any]) -> None:
        """Called when the model is loaded. about: the result of ServedModel.about."""


class StreamOptions(Fields):
    include_usage: bool | None = None

    ignored = frozenset({"include_obfuscation"})  # events are never obfuscated


class SamplingFields(GeneratingRequest):
    """Sampling fields of chats, completions and responses."""

    temperature: float | None = Field(None, description="0: greedy; default 1")
    top_p: float | None = Field(None, description="default 1: all")
    top_k: int | None = Field(None, description="number of likeliest tokens to keep; default 0: all")
    min_p: float | None = Field(None, description="least probability relative to the likeliest token; default 0")
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repeat_penalty: float | None = Field(None, description="above 1: penalty for tokens among the last 64")
    seed: int | None = Field(None, description="-1: random")
    stop: Stop | Stops | None = Field(None, description=f"at most {MAX_STOPS} stop strings")

    other_names: ClassVar[Mapping[str, str]] = {"repetition_penalty": "repeat_penalty"}

    def sampling(self) -> dict[str, Any]:
        """Return the set fields in the form of `Generation.sampling`."""
        seed = () if self.seed == -1 else ("seed",)  # -1: random, as in other servers
        names = (*DEFAULTS, "frequency_penalty", "presence_penalty", "repeat_penalty", *seed)
        return given_sampling(self, names) | ({"stop": stops} if (stops := self.stops()) else {})

    def stops(self) -> list[str]:
        """Return the stop strings. Raises BadRequest if there are too many."""
        return stop_strings(self.stop)


def stop_strings(stop: str | list[str] | None, param: str = "stop") -> list[str]:
    """Return the stop strings of a field. param: name of the field. Raises BadRequest if there are too many."""
    stops = [stop] if isinstance(stop, str) else stop or []
    if len(stops) > MAX_STOPS:
        raise BadRequest(f"{len(stops)} stop strings, at most {MAX_STOPS} are allowed", param)
    return stops


class SamplingRequest(SamplingFields):
    """Sampling fields of OpenAI's API, with llama.cpp's additions."""

    max_tokens: int | None = Field(None, description="maximum tokens; below 0: until the context is full")
    logit_bias: Biases | None = Field(None, description="{ID: bias, ...}, or [[ID, bias or false], ...]")
    n: int | None = Field(None, ge=0, le=MAX_ANSWERS, description="answers to each prompt; 0: 1")
    include_stop_str_in_output: bool | None = Field(None, description="true: include the stop string at the end")
    stream_options: StreamOptions | None = None
    grammar: str | None = Field(None, description="GBNF grammar of the answer, start rule `root`")
    regex: str | None = Field(None, description="regular expression that the answer matches")
    lark: str | None = Field(None, description="grammar of the answer in llguidance's Lark dialect")
    json_schema: JsonObject | None = Field(None, description="JSON schema of the answer")

    other_names: ClassVar[Mapping[str, str]] = {
        **SamplingFields.other_names, "n_predict": "max_tokens", "n_cmpl": "n", "guided_regex": "regex",
    }  # fmt: skip

    @model_validator(mode="before")
    @classmethod
    def _map_guided(cls, values: Any) -> Any:
        """Map vLLM's constraint fields to fields of this API."""
        return with_constraints_of_vllm(values) if isinstance(values, dict) else values

    @property
    def limit(self) -> int | None:
        """Maximum tokens of an answer, or None for as many as fit."""
        return limit(self.max_tokens)

    @property
    def include_usage(self) -> bool:
        """True if the stream's last event includes the usage."""
        return bool(self.stream_options and self.stream_options.include_usage)

    def sampling(self) -> dict[str, Any]:
        """Return the set fields in the form of `Generation.sampling`."""
        return super().sampling() | given_sampling(self, ("logit_bias", *CONSTRAINTS), defaults={})


_CHOICES = re.compile(r"([\\.+*?()|\[\]{}^$])")  # special characters of regular expressions
_HINTS = ("backend", "disable_", "whitespace_pattern")  # parts of field names about how a constraint is enforced


def with_constraints_of_vllm(values: dict[str, Any]) -> dict[str, Any]:
    """Return a request with vLLM's `structured_outputs` and `guided_...` replaced by fields of this API.

    Raises PydanticCustomError for an unsupported constraint.
    """
    outer = values.get("structured_outputs")
    if not isinstance(outer, dict):
        outer = {} if is_empty(outer) else {"structured_outputs": outer}
    constraints = {name: value for name, value in outer.items() if not is_empty(value)}
    constraints |= {
        name[7:]: value for name, value in values.items() if name.startswith("guided_") and not is_empty(value)
    }
    if not constraints:
        return values
    own = {name: value for name, value in values.items() if not name.startswith(("guided_", "structured_outputs"))}
    for name, value in constraints.items():
        field, own_value = _own_constraint(name, value)
        if not is_empty(own.get(field)) and own[field] != own_value:
            words = f"guided_{name[:80]} and {field} are two constraints of the answer; leave one out"
            raise PydanticCustomError("refused", "{words}", {"words": words, "field": field})
        own[field] = own_value
    return own


def _own_constraint(name: str, value: Any) -> tuple[str, Any]:
    """Return this API's field and value for a constraint of vLLM. Raises PydanticCustomError if there is none."""
    if name == "json":
        return "json_schema", _json_of(value)
    if name == "json_object":
        return "response_format", {"type": "json_object"}
    if name == "regex":
        return "regex", value
    if name == "grammar":
        return "grammar" if "::=" in str(value) else "lark", value
    if name == "choice" and isinstance(value, list) and any(value) and all(isinstance(item, str) for item in value):
        return "regex", "|".join(_CHOICES.sub(r"\\\1", item) for item in value)
    if any(hint in name for hint in _HINTS):
        return f"guided_{name}", value
    words = f"{name[:80]} of structured_outputs is not supported; use json, regex, choice or grammar"
    raise PydanticCustomError("refused", "{words}", {"words": words, "field": "structured_outputs"})


def _json_of(value: Any) -> Any:
    """Parse a value that is JSON text. Return other values unchanged."""
    try:
        return json.loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError):
        return value


CONSTRAINTS = ("grammar", "regex", "lark")
SAMPLING = (  # sampling fields common to all APIs
    "typical_p", "dry_multiplier", "dry_base", "dry_allowed_length", "dry_penalty_last_n", "dry_sequence_breakers",
    "xtc_probability", "xtc_threshold", "allow_repetition", "ignore_eos", "min_tokens",
)  # fmt: skip


def given_sampling(request: BaseModel, names: Iterable[str], defaults: Mapping[str, Any] = DEFAULTS) -> dict[str, Any]:
    """Return the set sampling fields of a request, and defaults for the others.

    Values beyond a sampler's off value are replaced by that off value.
    """
    values = {name: value for name in (*names, *SAMPLING) if (value := getattr(request, name, None)) is not None}
    for name in ("temperature", "top_k", "min_p"):
        if values.get(name, 0) < 0:
            values[name] = 0
    for name in ("top_p", "typical_p"):
        if values.get(name, 0) > 1:
            values[name] = 1.0
    if values.get("top_k", 0) > MAX_TOP_K:
        values["top_k"] = 0
    if values.get("repeat_penalty") == 0:
        del values["repeat_penalty"]
    for prefix, switch in (("dry_", "dry_multiplier"), ("xtc_", "xtc_probability")):
        if not values.get(switch):  # without the switch, the other fields have no effect
            values = {name: value for name, value in values.items() if not name.startswith(prefix)}
    if isinstance(breakers := values.get("dry_sequence_breakers"), str):
        values["dry_sequence_breakers"] = _breakers(breakers)
    return {**defaults, **values}


def _breakers(text: str) -> list[str]:
    """Return the list in a JSON text, or else the text as the only item."""
    try:
        breakers = json.loads(text)
    except (ValueError, RecursionError):
        return [text]
    return breakers if isinstance(breakers, list) and all(isinstance(item, str) for item in breakers) else [text]


def constrained(sampling: Mapping[str, Any], constraints: Mapping[str, Any]) -> dict[str, Any]:
    """Return sampling parameters with additional constraints. Raises BadRequest for more than one constraint."""
    present = [name for name in ("json_schema", *CONSTRAINTS) if name in sampling or name in constraints]
    twice = [name for name in constraints if name in sampling]
    if len(present) > 1 or twice:
        raise BadRequest(
            "an answer can have only one constraint: response_format, tools that must be called or are strict, "
            "grammar, regex or lark; leave out the others"
        )
    return {**sampling, **constraints}


def limit(max_tokens: int | None) -> int | None:
    """Return the maximum tokens of an answer. None: as many as fit, which requests ask for by a number below 0."""
    return None if max_tokens is None or max_tokens < 0 else max_tokens


def repeated(generation: Generation, n: int) -> list[Generation]:
    """Return the generation n times, for n answers. With a seed, which may have 64 bits, each gets the next seed."""
    seed = generation.sampling.get("seed")
    if seed is None:
        return [replace(generation, place=i) for i in range(n)]
    return [
        replace(generation, sampling={**generation.sampling, "seed": (seed + i) % (MAX_SEED + 1)}) for i in range(n)
    ]


Name = Annotated[str, Field(pattern=r"^[A-Za-z][A-Za-z0-9_]{0,63}$")]
TemplateVariables = Annotated[dict[Name, JsonValue], at_most(MAX_VARIABLES)]


# Thinking budgets by effort, for templates that have no variable for efforts.
EFFORTS: Mapping[str, int] = {
    "none": 0, "minimal": 256, "low": 1024, "medium": 4096, "high": AUTO, "xhigh": AUTO, "max": AUTO
}  # fmt: skip


def template_variables(template: str, extra: Mapping[str, Any] | None, effort: str | None = None) -> dict[str, Any]:
    """Return the template variables of a request, including its effort if the template uses it.

    template: source of the template.
    extra: variables in the request.
    Raises BadRequest for a reserved variable name.
    """
    variables = dict(extra or {})
    if reserved := sorted(RESERVED & variables.keys()):
        raise BadRequest(f"{', '.join(reserved)}: these template variables are reserved", "chat_template_kwargs")
    json_text(variables, "chat_template_kwargs")
    if effort is not None and "reasoning_effort" in template:
        variables.setdefault("reasoning_effort", effort)
    return variables


def think_tokens(
    request: GeneratingRequest,
    template: str,
    extra: Mapping[str, Any] | None,
    effort: str | None = None,
    budget: int | None = None,
) -> int | None:
    """Return the thinking budget of a request in tokens (see `AUTO`), or None if it has none.

    An unknown effort has no effect. Efforts and budgets have no effect if the template does not support thinking.

    template: source of the template.
    extra: template variables in the request.
    effort: reasoning effort in the request.
    budget: tokens in the request.
    """
    knows_effort = "reasoning_effort" in template
    thinks = bool(knows_effort or "enable_thinking" in template or thinking_format(template))
    if effort is not None and not knows_effort and (effort not in EFFORTS or (EFFORTS[effort] and not thinks)):
        request.ignore(request.effort_field)
        effort = None
    if budget and not thinks:
        request.ignore(request.budget_field)
        budget = None
    variable = (extra or {}).get("enable_thinking")
    if budget is None and effort is None:
        return None if not isinstance(variable, bool) else AUTO if variable else 0
    if budget is not None:
        return budget
    think = EFFORTS.get(effort or "", AUTO)
    return AUTO if think and knows_effort else think
