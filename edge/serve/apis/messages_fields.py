"""Fields of conversations and tools in Anthropic's API."""

from __future__ import annotations

from itertools import groupby
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Discriminator, Field, Tag

from edge.serve.apis.fields import (
    Fields,
    FunctionName,
    GeneratingRequest,
    Items,
    JsonObject,
    TemplateVariables,
    template_variables,
    think_tokens,
)
from edge.serve.apis.other_fields import MESSAGES_IGNORED, MESSAGES_REFUSED, Refused
from edge.serve.http.errors import BadRequest
from edge.serve.media import Part, joined, media_in
from edge.serve.tools.conversation import Conversation, conversation
from edge.serve.tools.functions import Function, FunctionUse, Message
from edge.thinking.format import AUTO


class ToolUseBlock(Fields):
    type: Literal["tool_use"]
    id: str
    name: FunctionName
    input: JsonObject

    ignored = frozenset({"cache_control", "caller", "toolset_name"})


class ToolResultBlock(Fields):
    type: Literal["tool_result"]
    tool_use_id: str
    content: str | Items[Part] | None = None
    is_error: bool | None = None

    ignored = frozenset({"cache_control", "toolset_name"})


class ThinkingBlock(Fields):
    """A thought before an answer; a redacted one is left out."""

    type: Literal["thinking", "redacted_thinking"]
    thinking: str = ""

    ignored = frozenset({"data", "signature"})  # nothing is signed, so nothing is checked


def _kind(block: Any) -> str:
    """Return the kind of a block; an unknown one is read as text, whose type is then refused."""
    kind = block.get("type") if isinstance(block, dict) else getattr(block, "type", None)
    kinds = {"tool_use": "call", "tool_result": "result", "thinking": "thinking", "redacted_thinking": "thinking"}
    return kinds.get(kind, "text") if isinstance(kind, str) else "text"


Block = Annotated[
    Annotated[Part, Tag("text")]
    | Annotated[ToolUseBlock, Tag("call")]
    | Annotated[ToolResultBlock, Tag("result")]
    | Annotated[ThinkingBlock, Tag("thinking")],
    Discriminator(_kind),
]


class InputMessage(Fields):
    role: Literal["user", "assistant"]
    content: str | Items[Block]


class AnthropicTool(Fields):
    type: Literal["custom"] | None = None
    name: FunctionName
    description: str | None = None
    input_schema: JsonObject
    strict: bool | None = None

    refused: ClassVar[Refused] = {"allowed_callers": (["direct"],), "defer_loading": (), "input_examples": ([],)}
    ignored = frozenset({"cache_control", "eager_input_streaming"})


class ToolChoice(Fields):
    type: Literal["auto", "any", "tool", "none"]
    name: FunctionName | None = None
    disable_parallel_tool_use: bool | None = Field(None, description="true: one call at most; false: any number")


class OutputFormat(Fields):
    type: Literal["json_schema"]
    json_schema: JsonObject = Field(alias="schema")


class OutputConfig(Fields):
    format: OutputFormat | None = None
    effort: str | None = Field(None, max_length=40, description="how much to think")

    refused: ClassVar[Refused] = {"task_budget": ()}


class Thinking(Fields):
    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = Field(None, ge=1, description="tokens of thoughts")
    display: str | None = Field(None, description="omitted: do not send thoughts")

    @property
    def tokens(self) -> int:
        """Tokens of thoughts, as in `think_tokens`."""
        return 0 if self.type == "disabled" else self.budget_tokens or AUTO


class MessagesInput(GeneratingRequest):
    """Fields that make up the prompt."""

    messages: Annotated[Items[InputMessage], Field(min_length=1)]
    system: str | Items[Part] | None = None
    tools: Items[AnthropicTool] | None = None
    tool_choice: ToolChoice | None = None
    output_config: OutputConfig | None = None
    thinking: Thinking | None = None
    chat_template_kwargs: TemplateVariables | None = Field(None, description="variables of the model's chat template")

    refused: ClassVar[Refused] = {**GeneratingRequest.refused, **MESSAGES_REFUSED}
    ignored = GeneratingRequest.ignored | MESSAGES_IGNORED


def conversation_of(request: MessagesInput, template: str) -> Conversation:
    """Return the messages, and the functions that may be called. BadRequest."""
    functions = [
        Function(tool.name, tool.description or "", tool.input_schema, bool(tool.strict))
        for tool in request.tools or ()
    ]
    system = [{"role": "system", "content": joined(request.system)}] if request.system else []
    messages = _combined([part for message in request.messages for part in _messages(message)])
    output = request.output_config.format if request.output_config else None
    schema = output.json_schema if output else None
    budget = request.thinking.tokens if request.thinking else None
    if budget == AUTO and request.thinking and request.thinking.type == "adaptive":
        budget = None  # also for models that do not think
    effort = request.output_config.effort if request.output_config else None
    variables = template_variables(template, request.chat_template_kwargs, effort)
    think = think_tokens(template, request.chat_template_kwargs, effort, budget)
    use = _use(functions, request.tool_choice)
    return conversation([*system, *messages], use, template, schema, variables, think, continues=True)


def _use(functions: list[Function], choice: ToolChoice | None) -> FunctionUse:
    if choice is None:
        return FunctionUse(functions)
    if choice.type == "tool" and choice.name is None:
        raise BadRequest("tool_choice: a choice of type tool needs a name")
    disabled = choice.disable_parallel_tool_use
    several = None if disabled is None or choice.type == "tool" else not disabled
    name = choice.name if choice.type == "tool" else None
    kinds: dict[str, Literal["auto", "none", "required"]] = {"any": "required", "none": "none"}
    return FunctionUse(functions, kinds.get(choice.type, "auto"), name, several)


def media_of(request: MessagesInput) -> dict[str, str]:
    """Return the files of pictures, by their marks."""
    contents = [message.content for message in request.messages]
    blocks = [block for content in contents if isinstance(content, list) for block in content]
    results = [block.content for block in blocks if isinstance(block, ToolResultBlock)]
    return media_in([request.system, *contents, *results])


def _combined(messages: list[Message]) -> list[Message]:
    """Return messages in which consecutive texts of one role are one."""
    combined: list[Message] = []
    for (role, is_text), group in groupby(messages, lambda message: (message["role"], len(message) == 2)):
        same = list(group)
        texts = [message["content"] for message in same if is_text and message["content"]]
        combined += [{"role": role, "content": "\n\n".join(texts)}] if is_text else same
    return combined


def _messages(message: InputMessage) -> list[Message]:
    """Return a message in the form of templates, in which results of functions are messages of their own."""
    if isinstance(message.content, str):
        return [{"role": message.role, "content": message.content}]
    messages: list[dict[str, Any]] = []
    texts = [block.content for block in message.content if isinstance(block, Part)]
    thought = "".join(block.thinking for block in message.content if isinstance(block, ThinkingBlock))
    calls = [block for block in message.content if isinstance(block, ToolUseBlock)]
    for block in message.content:
        if isinstance(block, ToolResultBlock):
            content = ("Error: " if block.is_error else "") + joined(block.content)
            messages.append({"role": "tool", "content": content, "tool_call_id": block.tool_use_id})
    if texts or calls or thought or not messages:
        own = {"reasoning_content": thought} if thought else {}
        messages.append({"role": message.role, "content": "".join(texts), **own})
    if calls:
        messages[-1]["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.input}}
            for call in calls
        ]
    return list(messages)
