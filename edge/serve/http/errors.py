"""Errors in HTTP: a status, and a body in the form of the API that was called."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pydantic import ValidationError
from starlette.exceptions import HTTPException

from edge.errors import (
    ConstraintUnavailable,
    ContextFull,
    EdgeError,
    EmptyPrompt,
    EngineGone,
    HubError,
    Interrupted,
    MediaError,
    NotAllowed,
    NotEnoughMemory,
    Overloaded,
    PoisonousRequest,
    SamplingError,
    TemplateError,
    UnknownModel,
    WorkerError,
)
from partition.errors import PlanError
from quant.errors import ModelFileError

RETRY_S = 1  # an answer takes seconds, and then its slot is free
RESTART_S = 5  # time to reload a model


class BadRequest(EdgeError):
    """The request is invalid. `param`: name of the invalid field."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class NotThere(EdgeError):
    """The server does not have this resource."""


@dataclass(frozen=True)
class Failure:
    """Description of an error for the client."""

    status: int
    message: str
    code: str | None = None
    param: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)


# The first matching class applies: (status, code, seconds until a retry).
_KNOWN: tuple[tuple[type[EdgeError], int, str | None, int | None], ...] = (
    (EmptyPrompt, 400, None, None),
    (ContextFull, 400, "context_length_exceeded", None),
    (ConstraintUnavailable, 503, "overloaded", RETRY_S),
    (SamplingError, 400, None, None),
    (MediaError, 400, None, None),
    (TemplateError, 400, None, None),
    (PlanError, 400, None, None),
    (ModelFileError, 400, "model_not_usable", None),
    (UnknownModel, 404, "model_not_found", None),
    (NotThere, 404, None, None),
    (NotAllowed, 403, None, None),
    (HubError, 404, None, None),
    (Overloaded, 429, "overloaded", RETRY_S),
    (PoisonousRequest, 400, "request_ends_engine", None),  # not a 5xx status, because clients retry those automatically
    (EngineGone, 503, "engine_gone", RESTART_S),
    (WorkerError, 503, "worker_failed", RESTART_S),
    (NotEnoughMemory, 503, "not_enough_memory", None),
    (Interrupted, 503, "interrupted", RESTART_S),
)
# Type of the error in OpenAI's API and in Anthropic's API, by status.
_TYPES = {
    400: ("invalid_request_error", "invalid_request_error"),
    401: ("authentication_error", "authentication_error"),
    403: ("permission_error", "permission_error"),
    404: ("not_found_error", "not_found_error"),
    413: ("invalid_request_error", "request_too_large"),
    429: ("rate_limit_error", "rate_limit_error"),
    503: ("server_error", "overloaded_error"),
}

_TYPE_NAMES = {"str", "int", "float", "bool", "dict", "list"}


def failure(error: Exception) -> Failure:
    """Describe an error for the client. The message of an unexpected error is not disclosed."""
    if isinstance(error, ValidationError):
        return _invalid(error)
    if isinstance(error, HTTPException):
        return Failure(error.status_code, error.detail, headers=dict(error.headers or {}))
    if isinstance(error, BadRequest):
        return Failure(400, str(error), param=error.param)
    for kind, status, code, retry_s in _KNOWN:
        if isinstance(error, kind):
            return Failure(status, str(error), code, headers={"Retry-After": str(retry_s)} if retry_s else {})
    return Failure(500, str(error) if isinstance(error, EdgeError) else "internal error; the server's log has it")


def is_anthropic(path: str) -> bool:
    """Return True if a path belongs to Anthropic's API."""
    return path == "/v1/messages" or path.startswith("/v1/messages/")


def error_body(failed: Failure, path: str) -> dict[str, Any]:
    """Return the JSON of an error in the form of the API that the path belongs to:

    OpenAI's, Anthropic's, Ollama's or the Open Inference Protocol's.
    """
    if path.startswith(("/api/", "/v2/")):
        return {"error": failed.message}
    openai_type, anthropic_type = _TYPES.get(
        failed.status,
        ("invalid_request_error", "invalid_request_error") if failed.status < 500 else ("server_error", "api_error"),
    )
    if is_anthropic(path):
        return {"type": "error", "error": {"type": anthropic_type, "message": failed.message}}
    values = {"message": failed.message, "type": openai_type, "param": failed.param, "code": failed.code}
    return {"error": values}


def _invalid(error: ValidationError) -> Failure:
    """Describe the deepest invalid field. For a union, this is the best matching member, or several."""
    errors = error.errors(include_url=False, include_input=False)
    wrong = max(errors, key=lambda e: len(e["loc"]))
    at = ".".join(str(part) for part in wrong["loc"] if isinstance(part, int) or _is_field(part))
    equal = (e for e in errors if e["loc"][:-1] == wrong["loc"][:-1] and not _is_field(str(e["loc"][-1])))
    members = [wrong, *equal] if wrong["loc"] and not _is_field(str(wrong["loc"][-1])) else [wrong]
    what = " or: ".join(dict.fromkeys(e["msg"].removeprefix("Value error, ") for e in members))
    field = wrong.get("ctx", {}).get("field", "")  # field within the invalid part
    return Failure(400, (f"{at}: {what}" if at else what)[:1000], param=".".join(filter(None, (at, field))) or None)


def _is_field(part: str) -> bool:
    """Return True if a part of an error location is a field name.

    Locations also contain the members of unions, such as `str`, `list[str]`, `literal['a']` or a class name.
    """
    return part.islower() and part.isidentifier() and part not in _TYPE_NAMES
