"""Chat templates: messages to one prompt text, by the Jinja template inside a GGUF, in a sandbox.

A template is code from whoever made the file. It runs with no access to Python's internals, may not loop or build
text without bound, and has a fixed set of variables and functions: those the Hugging Face templates use.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence, Sized
from typing import Any, NoReturn, cast

import jinja2
import jinja2.nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from edge.errors import TemplateError

Message = Mapping[str, str]
"""{"role": "system" | "user" | "assistant", "content": text}"""

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# For models that were never taught to chat: a transcript they can continue. Its stop strings end the answer.
TRANSCRIPT = (
    "{% for m in messages %}{% if m.role == 'system' %}{{ m.content }}\n\n"
    "{% else %}{{ m.role | capitalize }}: {{ m.content }}\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}Assistant:{% endif %}"
)
TRANSCRIPT_STOPS = ("\nUser:", "\nAssistant:")

MAX_STEPS = 200_000  # loop steps and calls of one rendering; a thousand messages need a few thousand
MAX_CHARACTERS = 16 << 20
MAX_PRODUCT = 1 << 16  # of two numbers, or of a text and a number: an indent, a ruler


class ChatTemplate:
    """A compiled template. `stops` are strings that end an answer where the model has no token for it."""

    def __init__(self, source: str, *, bos: str = "", eos: str = "", stops: Sequence[str] = ()) -> None:
        """TemplateError, with the line, where the source is not valid Jinja."""
        self.source = source
        self.stops = tuple(stops)
        self._special = {"bos_token": bos, "eos_token": eos}
        self._environment = _Sandbox()
        try:
            self._template = self._environment.compiled(source)
        except jinja2.TemplateSyntaxError as error:
            raise TemplateError(f"chat template, line {error.lineno}: {error.message}") from error
        except RecursionError as error:
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
        self._environment.steps_left = MAX_STEPS
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


class _Sandbox(ImmutableSandboxedEnvironment):
    """Jinja as Hugging Face configures it for chat templates, with bounds on steps and on what is put together."""

    intercepted_binops = frozenset({"+", "*", "**"})

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _Generation])
        self.steps_left = 0
        self.filters |= {"tojson": _tojson, "_counted": self._counted, "_joined": self._joined}

    def compiled(self, source: str) -> jinja2.Template:
        """The template, with every loop and every ~ made to count."""
        code = self.compile(_Bounded().visit(self.parse(source)))
        return jinja2.Template.from_code(self, code, self.make_globals(None))

    def call(self, *args: Any, **kwargs: Any) -> Any:
        self._step()  # macros can call themselves
        return super().call(*args, **kwargs)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        sizes = [len(x) if isinstance(x, Sized) else abs(x) for x in (left, right)]
        if operator == "**" or (operator == "*" and sizes[0] * sizes[1] > MAX_PRODUCT) or sum(sizes) > MAX_CHARACTERS:
            raise TemplateError(
                f"chat template: {operator} with {left!r:.20} and {right!r:.20} makes something too large"
            )
        return super().call_binop(context, operator, left, right)

    def _counted(self, items: Any) -> Any:
        # Jinja loops over an undefined value zero times.
        return items if isinstance(items, jinja2.Undefined) else self._count(items)

    def _count(self, items: Iterable[Any]) -> Iterator[Any]:
        for item in items:
            self._step()
            yield item

    def _joined(self, items: Iterable[Any]) -> str:
        text = "".join(str(item) for item in items)
        if len(text) > MAX_CHARACTERS:
            raise TemplateError(f"chat template: it builds a text of more than {MAX_CHARACTERS} characters")
        return text

    def _step(self) -> None:
        self.steps_left -= 1
        if self.steps_left < 0:
            raise TemplateError(f"chat template does not end: over {MAX_STEPS} steps")


class _Bounded(NodeTransformer):
    """Passes what loops run over, and what ~ joins, through filters of the sandbox."""

    def visit_For(self, loop: jinja2.nodes.For) -> jinja2.nodes.Node:  # noqa: N802 - the visitor's name for it
        if loop.recursive:
            raise TemplateError(f"chat template, line {loop.lineno}: recursive loops are not supported")
        loop.iter = _filtered(loop.iter, "_counted")
        return self.generic_visit(loop)

    def visit_Concat(self, join: jinja2.nodes.Concat) -> jinja2.nodes.Node:  # noqa: N802
        return self.generic_visit(_filtered(jinja2.nodes.List(join.nodes, lineno=join.lineno), "_joined"))


def _filtered(value: jinja2.nodes.Node, name: str) -> jinja2.nodes.Filter:
    return jinja2.nodes.Filter(cast(jinja2.nodes.Expr, value), name, [], [], None, None, lineno=value.lineno)


class _Generation(Extension):
    """{% generation %} ... {% endgeneration %} marks what to train on; to render it is to render its body."""

    tags = {"generation"}  # noqa: RUF012 - declared so by Extension

    def parse(self, parser: Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _tojson(value: Any, indent: int | None = None, **_: Any) -> str:
    # Jinja's own escapes <, > and &, which would change the prompt.
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _raise(message: str) -> NoReturn:
    raise TemplateError(f"chat template refuses these messages: {message}")
