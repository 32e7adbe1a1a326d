"""Functions that a model may call, and which of them a request lets it call."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from edge.serve.http.errors import BadRequest
from edge.serve.tools.sizes import JsonSize

MAX_FUNCTIONS = 128


@dataclass(frozen=True)
class Function:
    """A function that a model may call."""

    name: str
    description: str = ""
    parameters: Mapping[str, Any] = field(default_factory=dict)  # JSON schema of an object
    strict: bool = False  # a call must follow the schema

    def to_json(self) -> dict[str, Any]:
        """Return the function in the form of templates."""
        described = {"name": self.name, "description": self.description, "parameters": self.parameters}
        return {"type": "function", "function": described}


@dataclass(frozen=True)
class FunctionUse:
    """The functions of a request, and which of them must be called."""

    functions: Sequence[Function] = ()
    choice: Literal["auto", "none", "required"] = "auto"
    name: str | None = None  # the function that must be called
    several: bool | None = None  # allow more than one call; None: unless a call must come

    def __post_init__(self) -> None:
        """Raise BadRequest if two have one name, the required one does not exist, or a schema is not that of an
        object."""
        names = [function.name for function in self.functions]
        if len(names) > MAX_FUNCTIONS:
            raise BadRequest(f"{len(names)} tools are given, {MAX_FUNCTIONS} are the most", "tools")
        if twice := next((name for name in names if names.count(name) > 1), None):
            raise BadRequest(f"two tools are named {twice!r}", "tools")
        if self.name is not None and self.name not in names:
            raise BadRequest(f"no tool is named {self.name!r}", "tool_choice")
        if self.choice == "required" and not names:
            raise BadRequest("a tool must be called, and none is given", "tool_choice")
        for function in self.functions:
            if function.parameters.get("type", "object") != "object":
                raise BadRequest(f"the parameters of {function.name!r} must be a schema of an object", "tools")

    @property
    def must_call(self) -> bool:
        """True if the answer must have a call."""
        return self.name is not None or self.choice == "required"

    @property
    def callable(self) -> Sequence[Function]:
        """Functions that may be called."""
        if self.name is not None:
            return [function for function in self.functions if function.name == self.name]
        return () if self.choice == "none" else self.functions


def json_text(value: Any, param: str) -> str:
    """Return JSON of a part of a request. BadRequest if it is larger than sizes.py allows, or has numbers that JSON
    does not have."""
    JsonSize(param).add(value)
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except ValueError:  # a whole number of thousands of digits
        raise BadRequest(f"{param} has a number that is too large", param) from None


Message = Mapping[str, Any]
"""A message in the form of templates: `role`, `content`, and for calls `tool_calls`, `tool_call_id`, `name`."""
