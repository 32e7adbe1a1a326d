"""Chat templates: render messages to one prompt text with the Jinja template inside a GGUF, in a process of its own.

A template gets the variables that Hugging Face gives it: messages, a few flags, the special tokens, and two functions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from types import MappingProxyType
from typing import Any

from edge.errors import TemplateError, TemplateStopped
from edge.templates.formats import format_of
from edge.templates.forms import MessageForm, formed, plainest, with_parts
from edge.templates.probing import tools_form, turns_form
from edge.templates.process import TemplateProcess
from edge.thinking.format import AUTO, switches, thinking_format, with_thoughts

MAX_SOURCE = 1 << 20  # characters of a template; published ones have up to 20,000
# Variables that every template is given.
RESERVED = frozenset(
    "messages add_generation_prompt raise_exception strftime_now tools documents bos_token eos_token".split()
)
CONTINUES = "continues"  # key of a last message whose text begins the answer
_MOST_FORMS = 64  # of templates that this process remembers
_END_MARK = "\ue000"  # for private use: no standard gives it a meaning
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
_forms: dict[tuple[str, bool], MessageForm] = {}  # by the source of a template, and whether there are tools


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
        if messages and messages[-1].get(CONTINUES):
            return self._continued(messages[:-1], messages[-1]["content"], tools, variables)
        if reserved := RESERVED & variables.keys():
            raise TemplateError(f"chat template: {', '.join(sorted(reserved))} cannot be given as a variable")
        own = partial(self._formed, messages, tools, {**switches(think), **variables}, add_generation_prompt)
        form = self._form_for(messages, tools)
        try:
            return own(form)
        except TemplateStopped:
            raise
        except TemplateError:  # no probe was like this conversation
            with suppress(TemplateError):
                return own(plainest(form))
            raise

    def _continued(
        self,
        messages: Sequence[Message],
        begun: str,
        tools: Sequence[Mapping[str, Any]],
        variables: Mapping[str, Any],
    ) -> str:
        """Return the prompt that the template writes up to the end of an answer's beginning. A mark says where that is,
        as the same text may come elsewhere."""
        answer = {"role": "assistant", "content": f"{begun}{_END_MARK}"}
        with suppress(TemplateError):  # some take no answer for the last message
            form = self._form_for(messages, tools)._replace(user_last=False)
            text = self._formed([*messages, answer], tools, {**switches(0), **variables}, False, form)
            prompt, *rest = text.split(_END_MARK)
            if len(rest) == 1 and prompt.rstrip().casefold().endswith(begun.strip().casefold()):
                return prompt
        # The template does not write the text as it is, or not at all, or some text has the mark.
        prompt = self.render(messages, tools=tools, variables=variables, think=0)
        return f"{prompt}{self.thinking.to_answer(prompt) if self.thinking else ''}{begun}"

    def _form_for(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> MessageForm:
        """Return the form in which the template writes everything in a conversation. TemplateStopped."""
        has_tools = bool(tools) or any(message["role"] == "tool" or message.get("tool_calls") for message in messages)
        if (self.source, has_tools) not in _forms:
            if len(_forms) >= _MOST_FORMS:
                _forms.clear()
            _forms[self.source, has_tools] = (
                tools_form(self._probe, self._form_for((), ())) if has_tools else turns_form(self._probe)
            )
        return _forms[self.source, has_tools]

    def _probe(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]], form: MessageForm) -> str:
        return self._formed(messages, tools, {}, True, form)

    def _formed(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]],
        variables: Mapping[str, Any],
        add_generation_prompt: bool,
        form: MessageForm,
    ) -> str:
        """Return the prompt of a conversation in a form."""
        own, own_tools = formed(messages, tools, form, format_of(self.source))
        with_all = with_parts(with_thoughts(own, self.source), form)
        return self._ask(with_all, own_tools, variables, add_generation_prompt)

    def _ask(
        self,
        messages: list[dict[str, Any]] | None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] = MappingProxyType({}),
        add_generation_prompt: bool = False,
    ) -> str:
        return self._process.ask(
            {
                "source": self.source,
                "special": self._special,
                "messages": messages,
                "tools": None if tools is None else [dict(tool) for tool in tools],
                "variables": dict(variables),
                "add_generation_prompt": add_generation_prompt,
            }
        )
