"""Process that compiles and renders chat templates: requests and answers are lines of JSON.

A template is code from whoever made the model file. It gets what Hugging Face transformers gives to chat templates, in
Jinja's sandbox, which keeps it from files and from Python's internals. The kernel bounds what it takes: the processor
time of a request ends this process, and so does memory if it does not raise MemoryError first. The process ends when
its parent does, whose end of the socket is then closed.
"""

from __future__ import annotations

import datetime
import json
import os
import sys
from collections.abc import Iterator
from contextlib import suppress
from typing import Any, NoReturn

import jinja2
import jinja2.nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from devices.processes.limits import limit_cpu, limit_memory, prefer_oom_kill
from edge.errors import TemplateError
from edge.templates.process import CPU_S

MAX_CHARACTERS = 16 << 20  # of a prompt
ROOM_BYTES = 24 << 20  # memory for a request, beside that for its own messages
_ROOM_A_CHARACTER = 24  # bytes: some copies of a text, in the widest characters
_LONGEST_REASON = 500  # characters of a template's error


def main() -> None:
    """Answer requests until the parent closes the socket."""
    prefer_oom_kill()
    renderer = _Renderer()
    for line in sys.stdin.buffer:
        request = json.loads(line)
        limit_cpu(CPU_S)
        limit_memory(ROOM_BYTES + _ROOM_A_CHARACTER * (len(line) - len(request["source"])))
        try:
            answer = _line(text=renderer.answer(request))
        except (RecursionError, MemoryError) as error:
            answer = _line(error=f"chat template needs too much memory: {type(error).__name__}")
        except Exception as error:  # of any kind: the template is code, and it is at fault
            answer = _line(error=str(error)[:_LONGEST_REASON])
        limit_cpu(0)
        limit_memory(None)  # until the next request, which the parent may send in any size
        sys.stdout.buffer.write(answer)
        sys.stdout.buffer.flush()


def _line(**answer: str) -> bytes:
    return json.dumps(answer, ensure_ascii=False).encode(errors="surrogatepass") + b"\n"


class _Generation(Extension):
    """Jinja extension for {% generation %} ... {% endgeneration %}, which marks text to train on; only its body is
    rendered."""

    tags = {"generation"}  # noqa: RUF012 - declared so by Extension

    def parse(self, parser: Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Sandbox(ImmutableSandboxedEnvironment):
    """The environment that transformers has for chat templates."""

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _Generation])
        self.filters["tojson"] = _tojson

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        # Templates of Kimi K2 keep lists. The messages of a request are a copy that is used once.
        return (isinstance(obj, list) and attr in ("append", "pop")) or super().is_safe_attribute(obj, attr, value)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own escapes <, > and &, which would change the prompt.
    value = list(value) if isinstance(value, Iterator) else value
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


class _Renderer:
    """Renders templates, and keeps the one it compiled last."""

    def __init__(self) -> None:
        self._environment = _Sandbox()
        self._source: str | None = None
        self._template: jinja2.Template | None = None

    def answer(self, request: dict[str, Any]) -> str:
        """Return the prompt's text; "" for a request that only checks the template. TemplateError."""
        template = self._compiled(request["source"])
        if request["messages"] is None:
            return ""
        pieces, length = [], 0
        try:
            for piece in template.generate(
                messages=request["messages"],
                add_generation_prompt=request["add_generation_prompt"],
                raise_exception=_raise,
                strftime_now=lambda form: datetime.datetime.now().strftime(form),
                tools=request["tools"],
                documents=None,
                **request["special"],
                **request["variables"],
            ):
                length += len(piece)
                if length > MAX_CHARACTERS:
                    raise TemplateError(f"chat template: it wrote more than {MAX_CHARACTERS} characters")
                pieces.append(piece)
        except (TemplateError, RecursionError, MemoryError):
            raise
        except Exception as error:
            raise TemplateError(f"chat template failed on these messages: {error}") from error
        return "".join(pieces)

    def _compiled(self, source: str) -> jinja2.Template:
        if self._template is None or source != self._source:
            try:
                self._template, self._source = self._environment.from_string(source), source
            except jinja2.TemplateSyntaxError as error:
                raise TemplateError(f"chat template, line {error.lineno}: {error.message}") from error
            except (SyntaxError, RecursionError, MemoryError) as error:  # Python's, for what Jinja compiles to
                raise TemplateError("chat template: it is nested too deeply, or too large") from error
        return self._template


def _raise(message: str) -> NoReturn:
    raise TemplateError(f"chat template refuses these messages: {message}")


if __name__ == "__main__":
    with suppress(BrokenPipeError, ConnectionResetError):  # the parent has gone
        main()
    os._exit(0)  # nothing is left to flush, and what a template left behind need not be freed
