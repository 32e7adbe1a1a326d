"""Fields of conversations and tools in Anthropic's API."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Discriminator, Field, JsonValue, Tag

from edge.serve.apis.fields import (
    Fields,
    FunctionName,
    GeneratingRequest,
    Items,
    JsonObject,
    TemplateVariables,
    kind_of,
    template_variables,
    think_tokens,
)
from edge.serve.apis.history import CallId, Role, linked, past_call
from edge.serve.apis.openai_fields import ResponseFormat, text_schema
from edge.serve.apis.other_fields import MESSAGES_IGNORED, MESSAGES_REFUSED, Refused
from edge.serve.apis.texts import KNOWN_PARTS, other_text, system_text
from edge.serve.apis.tool_fields import ChosenTool, OtherTool, function_use, tool_tag
from edge.serve.media import Attached, Part, attached, joined
from edge.serve.tools.conversation import Conversation, conversation
from edge.serve.tools.functions import Function, FunctionUse, Message
from edge.text.thinking_format import AUTO


class ToolUseBlock(Fields):
    type: Literal["tool_use"]
    id: CallId = None
    name: str | None = None
    input: JsonValue = None

    ignored = frozenset({"cache_control", "caller", "toolset_name"})


class ToolResultBlock(Fields):
    type: Literal["tool_result"]
    tool_use_id: CallId = None
    content: str | Items[Part] | JsonObject | None = None
    is_error: bool | None = None

    ignored = frozenset({"cache_control", "toolset_name"})


class OtherBlock(Fields):
    """A block in an earlier message that belongs to a tool run by a provider."""

    type: str

    @property
    def problem(self) -> str:
        """Reason why this block cannot be part of the last question."""
        return f"a block of the type {self.type[:80]!r} is not supported; describe its content in a text block"

    def ignored_names(self) -> Iterator[str]:
        """Yield nothing, because the whole block is in the prompt."""
        return iter(())


class ThinkingBlock(Fields):
    """A thought before an answer. Redacted thoughts are left out."""

    type: Literal["thinking", "redacted_thinking"]
    thinking: str | None = None

    ignored = frozenset({"data", "signature"})  # signatures are neither made nor checked


def _kind(block: Any) -> str:
    """Return the tag of a block."""
    kind = kind_of(block)
    if not isinstance(kind, str) or kind in KNOWN_PARTS or kind == "search_result":
        return "text"
    kinds = {"tool_use": "call", "tool_result": "result", "thinking": "thinking", "redacted_thinking": "thinking"}
    return kinds.get(kind, "other")


Block = Annotated[
    Annotated[Part, Tag("text")]
    | Annotated[ToolUseBlock, Tag("call")]
    | Annotated[ToolResultBlock, Tag("result")]
    | Annotated[ThinkingBlock, Tag("thinking")]
    | Annotated[OtherBlock, Tag("other")],
    Discriminator(_kind),
]


class InputMessage(Fields):
    role: Role
    content: str | Items[Block] | None = None


class AnthropicTool(Fields):
    type: str = Field("custom", description="custom")
    name: FunctionName
    description: str | None = None
    input_schema: JsonObject
    strict: bool | None = None

    ignored = frozenset(
        {"allowed_callers", "cache_control", "defer_loading", "eager_input_streaming", "input_examples"}
    )


def _tool_tag(tool: Any) -> str:
    """Return the tag of a tool. A provider runs tools of other types than custom."""
    return tool_tag(tool, "custom")


class ToolChoice(Fields):
    type: str = Field(description="auto, any, tool, or none")
    name: str | None = None
    disable_parallel_tool_use: bool | None = Field(None, description="true: one call at most; false: any number")


AnyTool = Annotated[
    Annotated[AnthropicTool, Tag("Function")] | Annotated[OtherTool, Tag("Other")], Discriminator(_tool_tag)
]


class OutputConfig(Fields):
    format: ResponseFormat | None = None
    effort: str | None = Field(None, max_length=40, description="reasoning effort")

    ignored = frozenset({"task_budget"})


class Thinking(Fields):
    type: str = Field(description="enabled, disabled, or adaptive (the model decides)")
    budget_tokens: int | None = Field(None, description="maximum tokens of thoughts; below 0: unlimited")
    display: str | None = Field(None, description="omitted: do not send thoughts")

    @property
    def tokens(self) -> int:
        """Thinking budget in tokens, see `AUTO`."""
        return 0 if self.type == "disabled" else AUTO if self.budget_tokens is None else max(self.budget_tokens, AUTO)


class MessagesInput(GeneratingRequest):
    """Fields that determine the prompt."""

    messages: Annotated[Items[InputMessage], Field(min_length=1)]
    system: str | Items[Part] | None = None
    tools: Items[AnyTool] | None = None
    tool_choice: ToolChoice | None = None
    output_config: OutputConfig | None = None
    output_format: ResponseFormat | None = Field(None, description="as output_config.format")
    thinking: Thinking | None = None
    chat_template_kwargs: TemplateVariables | None = Field(None, description="variables of the model's chat template")

    refused: ClassVar[Refused] = {**GeneratingRequest.refused, **MESSAGES_REFUSED}
    ignored = GeneratingRequest.ignored | MESSAGES_IGNORED
    effort_field = "output_config.effort"


def conversation_of(request: MessagesInput, template: str) -> Conversation:
    """Return the conversation with the functions that may be called. Raises BadRequest."""
    functions = [
        Function(tool.name, tool.description or "", tool.input_schema, bool(tool.strict))
        for tool in request.tools or ()
        if isinstance(tool, AnthropicTool)
    ]
    text = system_text(request.system)
    system = [{"role": "system", "content": text}] if text else []
    messages = _combined(linked(part for message in request.messages for part in _messages(message)))
    output = request.output_config.format if request.output_config else None
    schema = text_schema(output or request.output_format)
    budget = request.thinking.tokens if request.thinking else None
    if budget == AUTO and request.thinking and request.thinking.type != "enabled":
        budget = None  # without a warning for models that do not think
    effort = request.output_config.effort if request.output_config else None
    variables = template_variables(template, request.chat_template_kwargs, effort)
    think = think_tokens(request, template, request.chat_template_kwargs, effort, budget)
    use = _use(request, functions)
    return conversation([*system, *messages], use, template, schema, variables, think, continues=True)


def _use(request: MessagesInput, functions: list[Function]) -> FunctionUse:
    choice = request.tool_choice
    disabled = choice.disable_parallel_tool_use if choice else None
    chosen = ChosenTool(type=choice.type, name=choice.name) if choice else None
    has_others = len(functions) < len(request.tools or ())
    several = None if disabled is None else not disabled
    return function_use(request, functions, chosen, several, has_others=has_others)


def media_of(request: MessagesInput) -> Attached:
    """Return the pictures. Raises BadRequest as `attached` does."""
    turns: list[tuple[str, str, object]] = [("system", "system", request.system)]
    for number, message in enumerate(request.messages):
        where, content = f"messages.{number}.content", message.content
        blocks = content if isinstance(content, list) else ()
        turns += [(where, "tool", block.content) for block in blocks if isinstance(block, ToolResultBlock)]
        turns.append((where, message.role, [block for block in blocks if isinstance(block, OtherBlock | Part)]))
    return attached(turns)


def _combined(messages: list[Message]) -> list[Message]:
    """Return messages with consecutive texts of the same role joined."""
    combined: list[Message] = []
    for (role, is_text), group in groupby(messages, lambda message: (message["role"], len(message) == 2)):
        same = list(group)
        texts = [message["content"] for message in same if is_text and message["content"]]
        combined += [{"role": role, "content": "\n\n".join(texts)}] if is_text else same
    return combined


def _messages(message: InputMessage) -> list[Message]:
    """Return a message in the form that templates use, with tool results as separate messages."""
    if not isinstance(message.content, list):
        return [{"role": message.role, "content": message.content or ""}]
    messages: list[dict[str, Any]] = []
    texts = [
        other_text(block) if isinstance(block, OtherBlock) else block.content
        for block in message.content
        if isinstance(block, OtherBlock | Part)
    ]
    thought = "".join(block.thinking or "" for block in message.content if isinstance(block, ThinkingBlock))
    calls = [block for block in message.content if isinstance(block, ToolUseBlock)]
    for block in message.content:
        if isinstance(block, ToolResultBlock):
            content = ("Error: " if block.is_error else "") + joined(block.content)
            messages.append({"role": "tool", "content": content, "tool_call_id": block.tool_use_id})
    if texts or calls or thought or not messages:
        own = {"reasoning_content": thought} if thought else {}
        messages.append({"role": message.role, "content": "".join(texts), **own})
    if calls:
        messages[-1]["tool_calls"] = [past_call(call.id, call.name, call.input) for call in calls]
    return list(messages)
