"""Chat templates: messages to one prompt text, by the Jinja template inside a GGUF, in a sandbox.

What a template sees is what Hugging Face gives it: messages, a few flags, the special tokens, and two functions.
"""

from __future__ import annotations

import datetime
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import jinja2

from edge.errors import TemplateError
from edge.sandbox import MAX_CHARACTERS, Sandbox

Message = Mapping[str, str]
"""{"role": "system" | "user" | "assistant", "content": text}"""

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


class ChatTemplate:
    """A compiled template. `stops` are strings that end an answer where the model has no token for it."""

    def __init__(self, source: str, *, bos: str = "", eos: str = "", stops: Sequence[str] = ()) -> None:
        """TemplateError, with the line, where the source is not valid Jinja."""
        self.source = source
        self.stops = tuple(stops)
        self._special = {"bos_token": bos, "eos_token": eos}
        self._environment = Sandbox()
        try:
            self._template = self._environment.compiled(source)
        except jinja2.TemplateSyntaxError as error:
            raise TemplateError(f"chat template, line {error.lineno}: {error.message}") from error
        except (SyntaxError, RecursionError, MemoryError) as error:  # Python's, for what Jinja compiles to
            raise TemplateError("chat template: it is nested too deeply") from error

    @classmethod
    def for_model(cls, metadata: Mapping[str, Any], bos: str, eos: str) -> ChatTemplate:
        """The template of a GGUF; where it has none, ChatML if the vocabulary has its tokens, else a transcript."""
        own = metadata.get("tokenizer.chat_template")
        if isinstance(own, str) and own.strip():
            return cls(own, bos=bos, eos=eos)
        if {"<|im_start|>", "<|im_end|>"} <= set(metadata.get("tokenizer.ggml.tokens", ())):
            return cls(CHATML, bos=bos, eos=eos)
        return cls(TRANSCRIPT, bos=bos, eos=eos, stops=TRANSCRIPT_STOPS)

    def render(self, messages: Sequence[Message], *, add_generation_prompt: bool = True) -> str:
        """The prompt text. TemplateError where the template refuses these messages or does not end."""
        self._environment.start()
        pieces, length = [], 0
        try:
            for piece in self._template.generate(
                messages=[dict(m) for m in messages],
                add_generation_prompt=add_generation_prompt,
                raise_exception=_raise,
                strftime_now=lambda form: datetime.datetime.now().strftime(form),
                tools=None,
                documents=None,
                **self._special,
            ):
                length += len(piece)
                if length > MAX_CHARACTERS:
                    raise TemplateError(f"chat template: it wrote more than {MAX_CHARACTERS} characters")
                pieces.append(piece)
        except TemplateError:
            raise
        except (jinja2.TemplateError, ArithmeticError, LookupError, TypeError, ValueError, AttributeError) as error:
            raise TemplateError(f"chat template failed on these messages: {error}") from error
        except (RecursionError, MemoryError) as error:
            raise TemplateError(f"chat template does not end: {type(error).__name__}") from error
        return "".join(pieces)


def _raise(message: str) -> NoReturn:
    raise TemplateError(f"chat template refuses these messages: {message}")
