"""Tools of a request, and the choice among them, in all forms that clients send."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, ClassVar, Literal

from pydantic import Field, JsonValue

from edge.serve.apis.fields import Fields, FunctionName, GeneratingRequest, Items, JsonObject, kind_of
from edge.serve.http.errors import BadRequest
from edge.serve.tools.functions import Function, FunctionUse

_MODES: dict[str, Literal["auto", "none", "required"]] = {
    "auto": "auto", "none": "none", "required": "required", "any": "required"
}  # fmt: skip


class OtherTool(Fields):
    """A tool that a provider runs, or a tool whose input is not JSON. The model does not see it."""

    type: str = Field("unknown", description="any but function")

    def ignored_names(self) -> Iterator[str]:
        """Yield only the tool's type."""
        yield self.type


def tool_tag(tool: Any, function_type: str = "function") -> str:
    """Return the tag of a tool. A tool without a type is a function, as is one of the type `function_type`."""
    kind = kind_of(tool)
    return "Other" if isinstance(kind, str) and kind not in ("", function_type) else "Function"


class FunctionFields(Fields):
    name: FunctionName
    description: str | None = None
    parameters: JsonObject | None = None
    strict: bool | None = None

    def to_function(self) -> Function:
        """Return the function in the form of a conversation."""
        return Function(self.name, self.description or "", self.parameters or {}, bool(self.strict))


class NamedFunction(Fields):
    name: str


class ChosenTool(Fields):
    """A choice of tools: one tool that must be called, or tools of which one may or must be called."""

    type: str
    name: str | None = None
    function: NamedFunction | None = None
    mode: str | None = None  # auto or required; only for allowed_tools
    tools: Items[JsonValue] | None = None  # only for allowed_tools
    allowed_tools: JsonObject | None = None

    ignored: ClassVar[frozenset[str]] = frozenset({"custom", "server_label"})

    @property
    def function_name(self) -> str | None:
        """Name of the chosen function."""
        return self.function.name if self.function else self.name


def function_use(
    request: GeneratingRequest,
    functions: Sequence[Function],
    choice: str | ChosenTool | None,
    parallel: bool | None,
    *,
    has_others: bool,
) -> FunctionUse:
    """Return the functions of a request and the choice among them.

    has_others: the request has tools that are not functions. Choosing one of these has no effect.
    Raises BadRequest for an invalid choice.
    """
    if isinstance(choice, ChosenTool) and choice.type not in _MODES:
        if choice.type == "allowed_tools":
            inner = choice.allowed_tools or {"mode": choice.mode, "tools": choice.tools}
            allowed = [_name_of(tool) for tool in _list(inner.get("tools"))]
            functions = [function for function in functions if function.name in allowed]
            choice = str(inner.get("mode") or "auto")
        elif choice.type in ("function", "tool"):
            name = choice.function_name
            if name is None:
                raise BadRequest(f"a choice of the type {choice.type} needs the name of a function", "tool_choice")
            if not has_others or name in [function.name for function in functions]:
                return FunctionUse(functions, name=name)
            choice = None
            request.ignore("tool_choice")
        else:
            choice = None
            request.ignore("tool_choice")
    mode = choice.type if isinstance(choice, ChosenTool) else choice or "auto"
    if mode not in _MODES and mode in [function.name for function in functions]:
        return FunctionUse(functions, name=mode)
    if mode not in _MODES:
        raise BadRequest(f"tool_choice must be auto, none, required or a tool's name, got {mode!r:.80}", "tool_choice")
    if _MODES[mode] == "required" and has_others and not functions:
        request.ignore("tool_choice")
        mode = "auto"
    return FunctionUse(functions, _MODES[mode], several=parallel)


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _name_of(tool: Any) -> Any:
    """Return the name of a function in a list of allowed tools, or None for any other tool."""
    if not isinstance(tool, dict):
        return None
    function = tool.get("function")
    return function.get("name") if isinstance(function, dict) else tool.get("name")
