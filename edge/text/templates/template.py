"""Chat templates: render messages to a prompt text with the Jinja template of a GGUF file, in a separate process.

As in Hugging Face transformers, a template gets messages, several flags, the special tokens and two functions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from types import MappingProxyType
from typing import Any

from edge.errors import TemplateError, TemplateStopped
from edge.text.templates.formats import format_of
from edge.text.templates.forms import MessageForm, formed, plainest, with_parts
from edge.text.templates.probing import tools_form, turns_form
from edge.text.templates.process import TemplateProcess
from edge.text.thinking_format import AUTO, switches, thinking_format, with_thoughts

MAX_SOURCE = 1 << 20  # characters of a template; published ones have up to 20,000
# Variables that every template receives.
RESERVED = frozenset(
    "messages add_generation_prompt raise_exception strftime_now tools documents bos_token eos_token".split()
)
CONTINUES = "continues"  # key of a last message whose text is the beginning of the answer
_MOST_FORMS = 64  # maximum templates whose forms are cached
_END_MARK = "\ue000"  # private-use character without a standard meaning
Message = Mapping[str, Any]
"""Message {"role": "system" | "user" | "assistant", "content": text}, with other fields such as tool calls.

`reasoning_content` is the thought of the model before the text.
"""

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Template of models that were not trained to chat: a transcript to continue. Its stop strings end the answer.
TRANSCRIPT = (
    "{% for m in messages %}{% if m.role == 'system' %}{{ m.content }}\n\n"
    "{% else %}{{ m.role | capitalize }}: {{ m.content | trim }}\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}Assistant:{% endif %}"
)
TRANSCRIPT_STOPS = ("\nUser:", "\nAssistant:")
_forms: dict[tuple[str, bool], MessageForm] = {}  # by template source and presence of tools


class ChatTemplate:
    """A valid chat template. `stops`: strings that end an answer if the model has no end token for it."""

    def __init__(
        self,
        source: str,
        *,
        bos: str = "",
        eos: str = "",
        stops: Sequence[str] = (),
        process: TemplateProcess | None = None,
    ) -> None:
        """process: renders the template; None: a new process.

        Raises TemplateError if the source is not valid Jinja (with the line), or exceeds a limit during compilation.
        """
        if len(source) > MAX_SOURCE:
            raise TemplateError(f"chat template is too long: {len(source)} characters of at most {MAX_SOURCE}")
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
        """Return the template of a GGUF file. A model without one gets ChatML if its vocabulary has the tokens of
        ChatML, otherwise a transcript."""
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
        """Return the prompt text.

        tools: functions that the model may call, as JSON values.
        variables: variables of this template other than `RESERVED`, such as `enable_thinking`, as JSON values. They
        override `think`.
        think: thinking budget in tokens, see `edge.text.thinking_format.AUTO`.

        Raises TemplateError if the template refuses these messages, does not end, or exceeds its memory limit.
        """
        if messages and messages[-1].get(CONTINUES):
            return self._continued(messages[:-1], messages[-1]["content"], tools, variables)
        if reserved := RESERVED & variables.keys():
            raise TemplateError(f"chat template: {', '.join(sorted(reserved))} cannot be a variable; rename it")
        own = partial(self._formed, messages, tools, {**switches(think), **variables}, add_generation_prompt)
        form = self._form_for(messages, tools)
        try:
            return own(form)
        except TemplateStopped:
            raise
        except TemplateError:  # this conversation differed from all probes
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
        """Return the prompt up to the end of the answer's given beginning.

        A mark finds this position, because the same text may also occur earlier in the prompt.
        """
        answer = {"role": "assistant", "content": f"{begun}{_END_MARK}"}
        with suppress(TemplateError):  # some templates do not accept an answer as the last message
            form = self._form_for(messages, tools)._replace(user_last=False)
            text = self._formed([*messages, answer], tools, {**switches(0), **variables}, False, form)
            prompt, *rest = text.split(_END_MARK)
            if len(rest) == 1 and prompt.rstrip().casefold().endswith(begun.strip().casefold()):
                return prompt
        # The template changed or dropped the text, or the text itself contains the mark.
        prompt = self.render(messages, tools=tools, variables=variables, think=0)
        return f"{prompt}{self.thinking.to_answer(prompt) if self.thinking else ''}{begun}"

    def _form_for(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> MessageForm:
        """Return the form in which the template writes the whole conversation. Raises TemplateStopped."""
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
        """Render a conversation in a form."""
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
