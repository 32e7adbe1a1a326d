"""A conversation as Anthropic's API has it, with its tools."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from edge.serve.apis.fields import Fields, FunctionName, GeneratingRequest, JsonObject
from edge.serve.http.errors import BadRequest
from edge.serve.tools.asking import Conversation, conversation
from edge.serve.tools.functions import Function, FunctionUse
from edge.serve.tools.prompt import Message


class TextBlock(Fields):
    type: Literal["text"]
    text: str


class ToolUseBlock(Fields):
    type: Literal["tool_use"]
    id: str
    name: FunctionName
    input: JsonObject


class ToolResultBlock(Fields):
    type: Literal["tool_result"]
    tool_use_id: str
    content: str | list[TextBlock] | None = None
    is_error: bool | None = None


class ThinkingBlock(Fields):
    """Of another model; it is left out."""

    type: Literal["thinking", "redacted_thinking"]


Block = Annotated[TextBlock | ToolUseBlock | ToolResultBlock | ThinkingBlock, Field(discriminator="type")]


class InputMessage(Fields):
    role: Literal["user", "assistant"]
    content: str | list[Block]


class AnthropicTool(Fields):
    type: Literal["custom"] | None = None
    name: FunctionName
    description: str | None = None
    input_schema: JsonObject
    strict: bool | None = None


class ToolChoice(Fields):
    type: Literal["auto", "any", "tool", "none"]
    name: FunctionName | None = None
    disable_parallel_tool_use: bool | None = Field(None, description="false: more than one call where some must come")


class OutputFormat(Fields):
    type: Literal["json_schema"]
    json_schema: JsonObject = Field(alias="schema")


class OutputConfig(Fields):
    format: OutputFormat | None = None


class MessagesInput(GeneratingRequest):
    """What stands in the prompt."""

    messages: Annotated[list[InputMessage], Field(min_length=1)]
    system: str | list[TextBlock] | None = None
    tools: list[AnthropicTool] | None = None
    tool_choice: ToolChoice | None = None
    output_config: OutputConfig | None = None

    @property
    def template_matters(self) -> bool:
        """Where there are functions, or were."""
        blocks = [block for message in self.messages if isinstance(message.content, list) for block in message.content]
        return bool(self.tools) or any(isinstance(block, ToolUseBlock | ToolResultBlock) for block in blocks)


def conversation_of(request: MessagesInput, template: str) -> Conversation:
    """What is said and may be called. BadRequest."""
    functions = [
        Function(one.name, one.description or "", one.input_schema, bool(one.strict)) for one in request.tools or ()
    ]
    system = [{"role": "system", "content": _text(request.system)}] if request.system else []
    said = [part for message in request.messages for part in _messages(message)]
    output = request.output_config.format if request.output_config else None
    schema = output.json_schema if output else None
    return conversation([*system, *said], _use(functions, request.tool_choice), template, schema)


def _use(functions: list[Function], choice: ToolChoice | None) -> FunctionUse:
    if choice is None:
        return FunctionUse(functions)
    if choice.type == "tool" and choice.name is None:
        raise BadRequest("tool_choice: a choice of type tool needs a name")
    several = choice.disable_parallel_tool_use is False and choice.type == "any"
    name = choice.name if choice.type == "tool" else None
    kinds: dict[str, Literal["auto", "none", "required"]] = {"any": "required", "none": "none"}
    return FunctionUse(functions, kinds.get(choice.type, "auto"), name, several)


def _text(content: str | list[TextBlock] | None) -> str:
    return content if isinstance(content, str) else "".join(block.text for block in content or ())


def _messages(message: InputMessage) -> list[Message]:
    """A message as templates take it. Results of functions are messages of their own there."""
    if isinstance(message.content, str):
        return [{"role": message.role, "content": message.content}]
    said: list[dict[str, Any]] = []
    texts = [block.text for block in message.content if isinstance(block, TextBlock)]
    calls = [block for block in message.content if isinstance(block, ToolUseBlock)]
    for block in message.content:
        if isinstance(block, ToolResultBlock):
            content = ("Error: " if block.is_error else "") + _text(block.content)
            said.append({"role": "tool", "content": content, "tool_call_id": block.tool_use_id})
    if texts or calls or not said:
        said.append({"role": message.role, "content": "".join(texts)})
    if calls:
        said[-1]["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.input}}
            for call in calls
        ]
    return list(said)
