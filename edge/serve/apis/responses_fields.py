"""Fields of conversations and tools in OpenAI's responses."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from edge.serve.apis.chat import Choice, FunctionFields, NamedFunction, OfFunction, called, function_use
from edge.serve.apis.fields import (
    MAX_LOGPROBS,
    MAX_VARIABLES,
    Fields,
    FunctionName,
    GeneratingRequest,
    Items,
    JsonObject,
    SamplingFields,
    StreamOptions,
    TemplateVariables,
    at_most,
    template_variables,
    think_tokens,
)
from edge.serve.apis.openai_fields import AnyJson, AnyText, JsonSchema, text_schema
from edge.serve.apis.other_fields import OPENAI_IGNORED, RESPONSES_REFUSED, Refused
from edge.serve.http.errors import BadRequest
from edge.serve.media import Part, joined, media_in
from edge.serve.tools.conversation import Conversation, conversation
from edge.serve.tools.functions import Message

LOGPROBS = "message.output_text.logprobs"


class MessageItem(Fields):
    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: str | Items[Part]

    ignored = frozenset({"id", "phase", "status"})


class FunctionCallItem(Fields):
    type: Literal["function_call"]
    call_id: str
    name: FunctionName
    arguments: str = Field(description="JSON of an object")

    refused: ClassVar[Refused] = {"namespace": ()}
    ignored = frozenset({"async", "caller", "id", "status"})


class FunctionOutputItem(Fields):
    type: Literal["function_call_output"]
    call_id: str
    output: str | Items[Part]

    refused: ClassVar[Refused] = {"namespace": ()}
    ignored = frozenset({"caller", "id", "name", "status"})


class ReasoningText(Fields):
    type: Literal["reasoning_text", "summary_text"]
    text: str


class ReasoningItem(Fields):
    """A thought before the next message or call."""

    type: Literal["reasoning"]
    content: Items[ReasoningText] | None = None
    summary: Items[ReasoningText] | None = None

    ignored = frozenset({"encrypted_content", "id", "status"})


Item = MessageItem | FunctionCallItem | FunctionOutputItem | ReasoningItem


class FunctionTool(FunctionFields, OfFunction):
    refused: ClassVar[Refused] = {"allowed_callers": (["direct"],), "async": (), "defer_loading": ()}
    ignored = frozenset({"output_schema"})


class NamedTool(NamedFunction, OfFunction):
    pass


class FlatSchema(JsonSchema):
    type: Literal["json_schema"]
    json_schema: JsonObject = Field(alias="schema")


class TextFields(Fields):
    format: Annotated[AnyText | AnyJson | FlatSchema, Field(discriminator="type")] | None = None

    refused: ClassVar[Refused] = {"verbosity": ("medium",)}


class Reasoning(Fields):
    effort: str | None = Field(None, max_length=40, description="none: do not think")

    refused: ClassVar[Refused] = {"mode": ("standard",)}
    ignored = frozenset({"context", "generate_summary", "summary"})  # thoughts are sent as they are


class ResponsesRequest(SamplingFields):
    input: str | Annotated[Items[Item], Field(min_length=1)]
    instructions: str | None = None
    max_output_tokens: int | None = Field(None, ge=1)
    metadata: Annotated[dict[str, str], at_most(MAX_VARIABLES)] | None = None
    include: Items[str] | None = Field(None, description=f"{LOGPROBS}: with probabilities")
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    text: TextFields | None = None
    tools: Items[FunctionTool] | None = None
    tool_choice: Choice | NamedTool | None = None
    parallel_tool_calls: bool | None = Field(None, description="as in chats")

    reasoning: Reasoning | None = None
    chat_template_kwargs: TemplateVariables | None = Field(None, description="variables of the model's chat template")
    stream_options: StreamOptions | None = None

    refused: ClassVar[Refused] = {**GeneratingRequest.refused, **RESPONSES_REFUSED}
    # An input that is too long is refused, not cut, so `truncation` has no effect.
    ignored = GeneratingRequest.ignored | OPENAI_IGNORED | {"background_options", "max_tool_calls", "truncation"}


def conversation_of(request: ResponsesRequest, template: str) -> Conversation:
    """Return the messages, and the functions that may be called. BadRequest."""
    if request.top_logprobs is not None and LOGPROBS not in (request.include or ()):
        raise BadRequest(f"top_logprobs needs include: [{LOGPROBS!r}]", "top_logprobs")
    functions = [tool.to_function() for tool in request.tools or ()]
    use = function_use(functions, request.tool_choice, request.parallel_tool_calls)
    messages = [{"role": "system", "content": request.instructions}] if request.instructions else []
    if isinstance(request.input, str):
        conversation_messages: list[Message] = [*messages, {"role": "user", "content": request.input}]
    else:
        conversation_messages = [*messages, *_messages(request.input)]
    schema = text_schema(request.text.format if request.text else None)
    effort = request.reasoning.effort if request.reasoning else None
    variables = template_variables(template, request.chat_template_kwargs, effort)
    think = think_tokens(template, request.chat_template_kwargs, effort)
    return conversation(conversation_messages, use, template, schema, variables, think)


def _messages(items: list[Item]) -> list[Message]:
    """Return items in the form of templates, in which consecutive calls, or a text of the model and its calls, are one
    message, and a thought is a part of the message behind it."""
    messages: list[dict[str, Any]] = []
    thought = ""
    for item in items:
        if isinstance(item, ReasoningItem):
            thought = "".join(part.text for part in item.content or item.summary or ())
            continue
        if isinstance(item, MessageItem):
            role = "system" if item.role == "developer" else item.role
            messages.append({"role": role, "content": joined(item.content)})
        elif isinstance(item, FunctionCallItem):
            if thought or not messages or messages[-1]["role"] != "assistant":
                messages.append({"role": "assistant", "content": ""})
            call = {"id": item.call_id, "type": "function", "function": called(item.name, item.arguments)}
            messages[-1].setdefault("tool_calls", []).append(call)
        elif isinstance(item, FunctionOutputItem):
            messages.append({"role": "tool", "content": joined(item.output), "tool_call_id": item.call_id})
        if thought and messages[-1]["role"] == "assistant":
            messages[-1]["reasoning_content"], thought = thought, ""
    if not messages:
        raise BadRequest("there is no message", "input")
    return list(messages)


def media_of(request: ResponsesRequest) -> dict[str, str]:
    """Return the files of pictures and sounds, by their marks."""
    items = [] if isinstance(request.input, str) else request.input
    contents = [item.content for item in items if isinstance(item, MessageItem)]
    return media_in([*contents, *(item.output for item in items if isinstance(item, FunctionOutputItem))])
