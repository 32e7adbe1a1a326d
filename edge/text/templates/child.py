"""Child process that compiles and renders chat templates. Requests and answers are lines of JSON.

A template is untrusted code from the author of the model file. It runs in Jinja's sandbox, without access to files and
to Python's internals, and gets the same variables as in Hugging Face transformers. The kernel limits each request: too
much processor time ends this process. Too much memory raises MemoryError or ends the process. The process also ends
when its parent closes the socket.
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
from edge.text.templates.process import CPU_S

MAX_CHARACTERS = 16 << 20  # maximum characters of a prompt
ROOM_BYTES = 24 << 20  # memory for a request, in addition to its own messages
_ROOM_A_CHARACTER = 24  # bytes: several copies of a text, in the widest characters
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
            answer = _line(stopped=f"chat template needs too much memory: {type(error).__name__}")
        except Exception as error:  # the template's code may raise any exception
            answer = _line(error=str(error)[:_LONGEST_REASON])
        limit_cpu(0)
        limit_memory(None)  # reading the next request of any size must not fail
        sys.stdout.buffer.write(answer)
        sys.stdout.buffer.flush()


def _line(**answer: str) -> bytes:
    return json.dumps(answer, ensure_ascii=False).encode(errors="surrogatepass") + b"\n"


class _Generation(Extension):
    """Jinja extension for {% generation %} ... {% endgeneration %}, which marks text to train on. Renders its body."""

    tags = {"generation"}  # noqa: RUF012 - declared so by Extension

    def parse(self, parser: Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Sandbox(ImmutableSandboxedEnvironment):
    """Jinja environment equal to the one of transformers for chat templates."""

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _Generation])
        self.filters["tojson"] = _tojson

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        # Templates of Kimi K2 append to lists. This is safe because each request has its own copy of the messages.
        return (isinstance(obj, list) and attr in ("append", "pop")) or super().is_safe_attribute(obj, attr, value)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes <, > and &, which would change the prompt.
    value = list(value) if isinstance(value, Iterator) else value
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


class _Renderer:
    """Renders templates and caches the last compiled one."""

    def __init__(self) -> None:
        self._environment = _Sandbox()
        self._source: str | None = None
        self._template: jinja2.Template | None = None

    def answer(self, request: dict[str, Any]) -> str:
        """Return the prompt text, or "" if the request only checks the template. Raises TemplateError."""
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
                    raise TemplateError(f"chat template wrote more than {MAX_CHARACTERS} characters")
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
            # Python failed to compile the code that Jinja generated.
            except (SyntaxError, RecursionError, MemoryError) as error:
                raise TemplateError("chat template is nested too deeply, or too large") from error
        return self._template


def _raise(message: str) -> NoReturn:
    raise TemplateError(f"chat template refuses these messages: {message}")


if __name__ == "__main__":
    with suppress(BrokenPipeError, ConnectionResetError):  # the parent has ended
        main()
    os._exit(0)  # skip finalizers: nothing is left to flush or to free
