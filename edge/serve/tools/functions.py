"""Functions of a request, and the choice among them."""

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
    strict: bool = False  # calls must follow the schema

    def to_json(self) -> dict[str, Any]:
        """Return the function in the form that templates use."""
        described = {"name": self.name, "description": self.description, "parameters": self.parameters}
        return {"type": "function", "function": described}


@dataclass(frozen=True)
class FunctionUse:
    """The functions of a request, and the choice among them."""

    functions: Sequence[Function] = ()
    choice: Literal["auto", "none", "required"] = "auto"
    name: str | None = None  # function that must be called
    several: bool | None = None  # whether several calls are allowed; None: only if no call is required

    def __post_init__(self) -> None:
        """Raise BadRequest if names are not unique, the required function is missing, or a schema is not an
        object's."""
        names = [function.name for function in self.functions]
        if len(names) > MAX_FUNCTIONS:
            raise BadRequest(f"{len(names)} tools, at most {MAX_FUNCTIONS} are allowed", "tools")
        if twice := next((name for name in names if names.count(name) > 1), None):
            raise BadRequest(f"two tools are named {twice!r}", "tools")
        if self.name is not None and self.name not in names:
            raise BadRequest(f"no tool is named {self.name!r}", "tool_choice")
        if self.choice == "required" and not names:
            raise BadRequest("a tool must be called, but the request has none", "tool_choice")
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
    """Return a part of a request as JSON.

    Raises BadRequest if it exceeds the limits of sizes.py, or has numbers that JSON cannot represent.
    """
    JsonSize(param).add(value)
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except ValueError:  # an integer with thousands of digits
        raise BadRequest(f"{param} has a number that is too large", param) from None


Message = Mapping[str, Any]
"""Message in the form that templates use: `role`, `content`, and `tool_calls`, `tool_call_id`, `name` for calls."""
