"""Chat templates: render messages to one prompt text with the Jinja template inside a GGUF, in a process of its own.

A template gets the variables that Hugging Face gives it: messages, a few flags, the special tokens, and two functions.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from itertools import product
from types import MappingProxyType
from typing import Any, NamedTuple

from edge.errors import TemplateError
from edge.templates.process import TemplateProcess
from edge.thinking.format import AUTO, switches, thinking_format, with_thoughts

MAX_SOURCE = 1 << 20  # characters of a template; published ones have up to 20,000
# Variables that every template is given.
RESERVED = frozenset(
    "messages add_generation_prompt raise_exception strftime_now tools documents bos_token eos_token".split()
)
Message = Mapping[str, Any]
"""{"role": "system" | "user" | "assistant", "content": text}, and other fields of a template, such as tool calls;
`reasoning_content` is what the model thought before it."""

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# For models that were never taught to chat: a transcript they can continue. Its stop strings end the answer.
TRANSCRIPT = (
    "{% for m in messages %}{% if m.role == 'system' %}{{ m.content }}\n\n"
    "{% else %}{{ m.role | capitalize }}: {{ m.content | trim }}\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}Assistant:{% endif %}"
)
TRANSCRIPT_STOPS = ("\nUser:", "\nAssistant:")


class CallForm(NamedTuple):
    """A form of calls in messages."""

    text_arguments: bool = False  # arguments as JSON text, not as an object
    no_content: bool = False  # a message with calls and no text has None as its content
    single: bool = False  # a message has one call, and its result follows
    short_ids: bool = False  # identifiers have nine letters and digits, as those of Mistral


_FORMS = tuple(CallForm(*flags[::-1]) for flags in product((False, True), repeat=4))


def _probe_call(number: int) -> dict[str, Any]:
    function = {"name": "probe_function", "arguments": {"probe_key": f"probe_value_{number}"}}
    return {"id": f"call_{number:024}", "type": "function", "function": function}  # as long as those of most servers


_CALLS = [_probe_call(0), _probe_call(1)]
_PROBE: tuple[Message, ...] = (
    {"role": "user", "content": "probe"},
    {"role": "assistant", "content": "", "tool_calls": _CALLS},
    *({"role": "tool", "content": "probe", "tool_call_id": call["id"], "name": "probe_function"} for call in _CALLS),
)
_PROBE_PARAMETERS = {"type": "object", "properties": {"probe_key": {"type": "string", "description": "probe"}}}
_PROBE_FUNCTION = {"name": "probe_function", "description": "probe", "parameters": _PROBE_PARAMETERS}
PROBE_TOOLS = ({"type": "function", "function": _PROBE_FUNCTION},)


def call_form(render: Callable[[Sequence[Message]], str]) -> CallForm:
    """Return the first form in which a template writes both calls, and no object as Python prints it; the plainest if
    there is none. render: returns a prompt, with PROBE_TOOLS; TemplateError."""
    for form in _FORMS:
        try:
            text = render(in_form(_PROBE, form))
        except TemplateError:
            continue
        if all(f"probe_value_{number}" in text for number in (0, 1)) and "'probe_key'" not in text:
            return form
    return _FORMS[0]


def in_form(messages: Sequence[Message], form: CallForm) -> list[Message]:
    """Return messages with their calls in a form."""
    if form.text_arguments:
        messages = [_with_text_arguments(message) for message in messages]
    if form.no_content:
        messages = [
            {**message, "content": None} if message.get("tool_calls") and not message.get("content") else message
            for message in messages
        ]
    if form.single:
        messages = _single(messages)
    if form.short_ids:
        messages = [_with_short_ids(message) for message in messages]
    return list(messages)


def _with_text_arguments(message: Message) -> Message:
    if not message.get("tool_calls"):
        return message
    calls = [
        {**call, "function": {**call["function"], "arguments": _as_text(call["function"]["arguments"])}}
        for call in message["tool_calls"]
    ]
    return {**message, "tool_calls": calls}


def _as_text(arguments: Any) -> str:
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


def _with_short_ids(message: Message) -> Message:
    if message.get("tool_calls"):
        return {**message, "tool_calls": [{**call, "id": _short(call.get("id"))} for call in message["tool_calls"]]}
    return {**message, "tool_call_id": _short(message["tool_call_id"])} if "tool_call_id" in message else message


def _short(identifier: Any) -> str:
    text = str(identifier)
    is_short = re.fullmatch("[a-zA-Z0-9]{9}", text)
    return text if is_short else hashlib.sha256(text.encode(errors="replace")).hexdigest()[:9]


def _single(messages: Sequence[Message]) -> list[Message]:
    """Return messages with one call each, and its result behind it."""
    split: list[Message] = []
    rest = list(messages)
    while rest:
        message = rest.pop(0)
        calls = message.get("tool_calls") or ()
        if len(calls) < 2:
            split.append(message)
            continue
        n_results = next((n for n, result in enumerate(rest) if result["role"] != "tool"), len(rest))
        results, rest = rest[:n_results], rest[n_results:]
        for number, call in enumerate(calls):
            own = message if number == 0 else {"role": message["role"], "content": ""}
            split.append({**own, "tool_calls": [call]})
            matching = [result for result in results if result.get("tool_call_id") == call.get("id")] or results[:1]
            split += matching[:1]
            results = [result for result in results if result not in matching[:1]]
        split += results
    return split


class ChatTemplate:
    """A valid chat template. `stops` are strings that end an answer when the model has no token for it."""

    def __init__(
        self,
        source: str,
        *,
        bos: str = "",
        eos: str = "",
        stops: Sequence[str] = (),
        process: TemplateProcess | None = None,
    ) -> None:
        """process: renders the template; by default, a new process. TemplateError, with the line, if the source is not
        valid Jinja, or takes too much to compile."""
        if len(source) > MAX_SOURCE:
            raise TemplateError(f"chat template: it has {len(source)} characters, {MAX_SOURCE} are the most")
        self.source = source
        self.stops = tuple(stops)
        self.thinking = thinking_format(source)
        self._special = {"bos_token": bos, "eos_token": eos}
        self._process = process or TemplateProcess()
        self._ask(None)

    @classmethod
    def for_model(
        cls, metadata: Mapping[str, Any], bos: str, eos: str, process: TemplateProcess | None = None
    ) -> ChatTemplate:
        """Return the template of a GGUF; without one, ChatML if the vocabulary has its tokens, else a transcript."""
        own = metadata.get("tokenizer.chat_template")
        if isinstance(own, str) and own.strip():
            return cls(own, bos=bos, eos=eos, process=process)
        if {"<|im_start|>", "<|im_end|>"} <= set(metadata.get("tokenizer.ggml.tokens", ())):
            return cls(CHATML, bos=bos, eos=eos, process=process)
        return cls(TRANSCRIPT, bos=bos, eos=eos, stops=TRANSCRIPT_STOPS, process=process)

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        variables: Mapping[str, Any] = MappingProxyType({}),
        think: int = AUTO,
        add_generation_prompt: bool = True,
    ) -> str:
        """Return the prompt text. tools: functions that the model may call, as JSON has them. variables: what this
        template takes beside `RESERVED`, such as `enable_thinking`; data as JSON has it. think: tokens of thoughts, as
        `edge.thinking.format.AUTO` says; `variables` come first. TemplateError if the template refuses these
        messages, does not end, or takes more memory than it may."""
        if reserved := RESERVED & variables.keys():
            raise TemplateError(f"chat template: {', '.join(sorted(reserved))} cannot be given as a variable")
        if any(message.get("tool_calls") for message in messages):
            messages = in_form(messages, self._call_form)
        own = with_thoughts(messages, self.source)
        return self._ask(own, tools, {**switches(think), **variables}, add_generation_prompt)

    @cached_property
    def _call_form(self) -> CallForm:
        """The form in which the template takes calls."""
        return call_form(lambda messages: self._ask([dict(message) for message in messages], PROBE_TOOLS))

    def _ask(
        self,
        messages: list[dict[str, Any]] | None,
        tools: Sequence[Mapping[str, Any]] = (),
        variables: Mapping[str, Any] = MappingProxyType({}),
        add_generation_prompt: bool = False,
    ) -> str:
        return self._process.ask(
            {
                "source": self.source,
                "special": self._special,
                "messages": messages,
                "tools": [dict(tool) for tool in tools],
                "variables": dict(variables),
                "add_generation_prompt": add_generation_prompt,
            }
        )
