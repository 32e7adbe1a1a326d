"""Fields of conversations and tools in OpenAI's responses API."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Discriminator, Field, JsonValue, Tag, model_validator

from edge.serve.apis.fields import (
    MAX_LOGPROBS,
    MAX_VARIABLES,
    Fields,
    GeneratingRequest,
    Items,
    JsonObject,
    SamplingFields,
    StreamOptions,
    TemplateVariables,
    at_most,
    kind_of,
    template_variables,
    think_tokens,
)
from edge.serve.apis.history import CallId, Role, linked, past_call
from edge.serve.apis.openai_fields import ResponseFormat, text_schema
from edge.serve.apis.other_fields import RESPONSES_IGNORED, RESPONSES_REFUSED, Refused
from edge.serve.apis.texts import KNOWN_PARTS, other_text, system_text
from edge.serve.apis.tool_fields import ChosenTool, FunctionFields, OtherTool, function_use, tool_tag
from edge.serve.http.errors import BadRequest
from edge.serve.media import Attached, Content, Part, attached, joined
from edge.serve.tools.conversation import Conversation, conversation
from edge.serve.tools.functions import Message

LOGPROBS = "message.output_text.logprobs"


class MessageItem(Fields):
    type: Literal["message"] = "message"
    role: Role
    content: str | Items[Part] | JsonObject | None = None

    ignored = frozenset({"id", "phase", "status"})


class FunctionCallItem(Fields):
    type: Literal["function_call"]
    call_id: CallId = None
    name: str | None = None
    arguments: JsonValue = Field(None, description="JSON text of an object, or the object")
    namespace: str | None = None

    ignored = frozenset({"async", "caller", "id", "status"})


class FunctionOutputItem(Fields):
    type: Literal["function_call_output"]
    call_id: CallId = None
    output: str | Items[Part] | JsonObject | None = None

    ignored = frozenset({"caller", "id", "name", "namespace", "status"})


class ReasoningText(Fields):
    type: str = Field(description="reasoning_text or summary_text")
    text: str


class ReasoningItem(Fields):
    """A thought before the next message or call."""

    type: Literal["reasoning"]
    content: Items[ReasoningText] | None = None
    summary: Items[ReasoningText] | None = None

    ignored = frozenset({"encrypted_content", "id", "status"})


class OtherItem(Fields):
    """Another item of an earlier answer, such as a call of a tool that a provider or the client runs."""

    type: str

    def ignored_names(self) -> Iterator[str]:
        """Yield nothing, because the whole item is in the prompt."""
        return iter(())


_TAGS = {"message": "Message", "function_call": "Call", "function_call_output": "Output", "reasoning": "Reasoning"}


def _item_tag(item: Any) -> str:
    """Return the tag of an item. Items without a type, and parts of messages, are validated as messages."""
    kind = kind_of(item)
    is_part = kind in KNOWN_PARTS or (isinstance(kind, str) and kind.startswith(("input_", "output_")))
    return _TAGS.get(kind, "Other") if isinstance(kind, str) and kind and not is_part else "Message"


Item = Annotated[
    Annotated[MessageItem, Tag("Message")]
    | Annotated[FunctionCallItem, Tag("Call")]
    | Annotated[FunctionOutputItem, Tag("Output")]
    | Annotated[ReasoningItem, Tag("Reasoning")]
    | Annotated[OtherItem, Tag("Other")],
    Discriminator(_item_tag),
]


class FunctionTool(FunctionFields):
    type: str = Field("function", description="function")

    ignored = frozenset({"allowed_callers", "async", "defer_loading", "output_schema"})

    @model_validator(mode="before")
    @classmethod
    def _flatten(cls, tool: Any) -> Any:
        """Accept a tool in the form of the chat API, too."""
        function = tool.get("function") if isinstance(tool, dict) and "name" not in tool else None
        return {"type": "function", **function} if isinstance(function, dict) else tool


class NamespaceTool(Fields):
    """Functions with a common prefix, such as the functions of one MCP server in Codex."""

    type: Literal["namespace"]
    name: str
    tools: Items[
        Annotated[
            Annotated[FunctionTool, Tag("Function")] | Annotated[OtherTool, Tag("Other")], Discriminator(tool_tag)
        ]
    ] = Field(default_factory=list)

    ignored = frozenset({"description"})


def _tool_tag(tool: Any) -> str:
    return "Namespace" if kind_of(tool) == "namespace" else tool_tag(tool)


Tool = Annotated[
    Annotated[FunctionTool, Tag("Function")]
    | Annotated[NamespaceTool, Tag("Namespace")]
    | Annotated[OtherTool, Tag("Other")],
    Discriminator(_tool_tag),
]


def name_in_prompt(namespace: str | None, name: str) -> str:
    """Return the name of a function in the prompt."""
    return f"{namespace}{'' if namespace.endswith('_') else '__'}{name}" if namespace else name


class TextFields(Fields):
    format: ResponseFormat | None = None

    ignored = frozenset({"verbosity"})


class Reasoning(Fields):
    effort: str | None = Field(None, max_length=40, description="none: turn thinking off")

    # Thoughts are always sent unchanged.
    ignored = frozenset({"context", "generate_summary", "mode", "summary"})


class ResponsesRequest(SamplingFields):
    input: str | Annotated[Items[Item], Field(min_length=1)]
    instructions: str | None = None
    max_output_tokens: int | None = Field(None, description="below 0: until the context is full")
    metadata: Annotated[dict[str, str], at_most(MAX_VARIABLES)] | None = None
    include: Items[str] | None = Field(None, description=f"{LOGPROBS}: include log-probabilities")
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    text: TextFields | None = None
    tools: Items[Tool] | None = None
    tool_choice: str | ChosenTool | None = Field(None, description="auto, none, required, or a function")
    parallel_tool_calls: bool | None = Field(None, description="as in chats")

    reasoning: Reasoning | None = None
    chat_template_kwargs: TemplateVariables | None = Field(None, description="variables of the model's chat template")
    stream_options: StreamOptions | None = None

    refused: ClassVar[Refused] = {**GeneratingRequest.refused, **RESPONSES_REFUSED}
    ignored = GeneratingRequest.ignored | RESPONSES_IGNORED
    other_names: ClassVar[Mapping[str, str]] = {
        **SamplingFields.other_names,
        **dict.fromkeys(("max_tokens", "max_completion_tokens", "n_predict"), "max_output_tokens"),
        "n_cmpl": "n",
    }
    effort_field = "reasoning.effort"

    @property
    def in_namespaces(self) -> dict[str, tuple[str, FunctionTool]]:
        """Functions in namespaces: namespace and tool, by their names in the prompt."""
        spaces = [tool for tool in self.tools or () if isinstance(tool, NamespaceTool)]
        inner = [(space.name, tool) for space in spaces for tool in space.tools if isinstance(tool, FunctionTool)]
        return {name_in_prompt(space, tool.name): (space, tool) for space, tool in inner}


def conversation_of(request: ResponsesRequest, template: str) -> Conversation:
    """Return the conversation with the functions that may be called. Raises BadRequest."""
    if request.top_logprobs and LOGPROBS not in (request.include or ()):
        request.ignore("top_logprobs")
    functions = [tool.to_function() for tool in request.tools or () if isinstance(tool, FunctionTool)]
    for name, (_, tool) in request.in_namespaces.items():
        functions.append(replace(tool.to_function(), name=name))
    has_others = any(not isinstance(tool, FunctionTool) for tool in request.tools or ())
    use = function_use(request, functions, request.tool_choice, request.parallel_tool_calls, has_others=has_others)
    instructions = system_text(request.instructions)
    messages = [{"role": "system", "content": instructions}] if instructions else []
    if isinstance(request.input, str):
        conversation_messages: list[Message] = [*messages, {"role": "user", "content": request.input}]
    else:
        conversation_messages = [*messages, *_messages(request.input)]
    schema = text_schema(request.text.format if request.text else None)
    effort = request.reasoning.effort if request.reasoning else None
    variables = template_variables(template, request.chat_template_kwargs, effort)
    think = think_tokens(request, template, request.chat_template_kwargs, effort)
    return conversation(conversation_messages, use, template, schema, variables, think)


def _messages(items: list[Item]) -> list[Message]:
    """Return items in the form that templates use.

    Consecutive calls, or a text of the model and its calls, are joined to one message. Thoughts become part of the
    message after them.
    """
    messages: list[dict[str, Any]] = []
    thought = ""
    for item in items:
        if isinstance(item, ReasoningItem):
            own = "".join(part.text for part in item.content or item.summary or ())
            thought = "\n\n".join(filter(None, (thought, own)))
            continue
        if isinstance(item, MessageItem):
            content = system_text(item.content) if item.role == "system" else joined(item.content)
            messages.append({"role": item.role, "content": content})
        elif isinstance(item, FunctionCallItem):
            if thought or not messages or messages[-1]["role"] != "assistant":
                messages.append({"role": "assistant", "content": ""})
            call = past_call(item.call_id, name_in_prompt(item.namespace, item.name or ""), item.arguments)
            messages[-1].setdefault("tool_calls", []).append(call)
        elif isinstance(item, OtherItem):
            role = "user" if item.type.endswith("_output") else "assistant"
            messages.append({"role": role, "content": other_text(item)})
        elif isinstance(item, FunctionOutputItem):
            messages.append({"role": "tool", "content": joined(item.output), "tool_call_id": item.call_id})
        if thought and messages[-1]["role"] == "assistant":
            messages[-1]["reasoning_content"], thought = thought, ""
    if not messages:
        raise BadRequest("input has no message", "input")
    return linked(messages)


def media_of(request: ResponsesRequest) -> Attached:
    """Return the pictures and sounds. Raises BadRequest as `attached` does."""
    turns: list[tuple[str, str, Content]] = []
    for number, item in enumerate([] if isinstance(request.input, str) else request.input):
        if isinstance(item, MessageItem):
            turns.append((f"input.{number}.content", item.role, item.content))
        elif isinstance(item, FunctionOutputItem):
            turns.append((f"input.{number}.output", "tool", item.output))
        else:
            turns.append(("input", "assistant", None))
    return attached(turns)
