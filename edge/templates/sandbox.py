"""Sandbox for chat templates: Jinja as Hugging Face configures it, less what can make much out of little.

A template is code from whoever made the model file. It has no access to files or Python's internals, may use only the
filters and methods that published templates use, and what grows is bounded, with a reason in the error: loop steps,
calls, sums, products and texts put together. What is left (containers that contain themselves many times over, a source
of a megabyte) ends with the process that it runs in: edge.templates.child.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sized
from typing import Any, cast

import jinja2
import jinja2.nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.filters import do_indent
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from edge.errors import TemplateError

MAX_STEPS = 200_000  # loop steps and calls of one rendering; a thousand messages need a few thousand
MAX_CHARACTERS = 16 << 20
MAX_INDENT = 16
MAX_PRODUCT = 1 << 16  # of two numbers, or of a text and a number: an indent, a ruler

# What published templates use, less what can make much out of little.
FILTERS = """abs capitalize count d default dictsort e escape first float groupby int items last length list lower map
max min reject rejectattr reverse round safe select selectattr sort string sum title trim unique upper""".split()
TEXT_METHODS = frozenset(
    """capitalize count endswith find index isalnum isalpha isdecimal isdigit islower isnumeric isspace istitle isupper
    join lower lstrip partition removeprefix removesuffix replace rfind rindex rpartition rsplit rstrip split splitlines
    startswith strip swapcase title upper""".split()
)


class Sandbox(ImmutableSandboxedEnvironment):
    """A Jinja environment with bounds. Call `start` before each compiling and each rendering."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _Generation])
        self.steps_left = 0
        self._protected: set[int] = set()
        self.globals = {name: self.globals[name] for name in ("range", "namespace", "dict")}
        bounded = {"replace": _replace, "join": _join, "indent": _indent, "tojson": _tojson}
        own = {"_counted": self._counted, "_joined": _join}
        self.filters = {name: self.filters[name] for name in FILTERS} | bounded | own

    def compiled(self, source: str) -> jinja2.Template:
        """Return the compiled template, with every loop and every ~ counted."""
        code = self.compile(_Bounded().visit(self.parse(source)))
        return jinja2.Template.from_code(self, code, self.make_globals(None))

    def start(self, protected: Any = None) -> None:
        """Reset the step count to MAX_STEPS. protected: a value whose lists the template must not change."""
        self.steps_left = MAX_STEPS
        self._protected = set(_lists(protected))

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        if isinstance(obj, list) and attr in ("append", "pop") and id(obj) not in self._protected:
            return True  # the template made it, and calls are counted
        return super().is_safe_attribute(obj, attr, value) and (not isinstance(obj, str) or attr in TEXT_METHODS)

    def call(self, context: Any, obj: Any, *args: Any, **kwargs: Any) -> Any:
        self._step()  # macros can call themselves
        text = getattr(obj, "__self__", None)
        bounded = _BOUNDED_METHODS.get(getattr(obj, "__name__", ""))
        if isinstance(text, str) and bounded is not None:
            own = {name: value for name, value in kwargs.items() if name not in ("_loop_vars", "_block_vars")}
            return bounded(text, *args, **own)  # Jinja adds its own to calls within loops
        return super().call(context, obj, *args, **kwargs)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        sizes = [len(x) if isinstance(x, Sized) else abs(x) for x in (left, right)]
        if operator == "%" and isinstance(left, str):
            raise TemplateError("chat template: formatting text with % is not supported; use ~")
        if operator == "**" or (operator == "*" and sizes[0] * sizes[1] > MAX_PRODUCT) or sum(sizes) > MAX_CHARACTERS:
            kinds = f"{type(left).__name__} and {type(right).__name__}"  # not their text, which may be endless
            raise TemplateError(f"chat template: {operator} with {kinds} makes something too large")
        return super().call_binop(context, operator, left, right)

    def _counted(self, items: Any) -> Any:
        # Jinja loops over an undefined value zero times.
        return items if isinstance(items, jinja2.Undefined) else self._count(items)

    def _count(self, items: Iterable[Any]) -> Iterator[Any]:
        for item in items:
            self._step()
            yield item

    def _step(self) -> None:
        self.steps_left -= 1
        if self.steps_left < 0:
            raise TemplateError(f"chat template does not end: over {MAX_STEPS} steps")


def _lists(value: Any) -> Iterator[int]:
    """Yield the identity of each list in a value."""
    if isinstance(value, list):
        yield id(value)
    for inner in value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ():
        yield from _lists(inner)


class _Bounded(NodeTransformer):
    """AST transformer: passes the iterables of loops, and the operands of ~, through filters of the sandbox."""

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
    """Jinja extension for {% generation %} ... {% endgeneration %}, which marks text to train on; only its body is
    rendered."""

    tags = {"generation"}  # noqa: RUF012 - declared so by Extension

    def parse(self, parser: Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


# Filters and methods whose results can be far larger than their arguments: the size is checked before they run.


def _replace(text: Any, old: str, new: str, count: int = -1) -> str:
    whole, part = str(text), str(old)
    _check_length(len(whole) + whole.count(part) * len(str(new)))
    return whole.replace(part, str(new), -1 if count is None else count)


def _join(items: Iterable[Any], d: str = "", attribute: str | None = None) -> str:
    texts = [str(item if attribute is None else item[attribute]) for item in items]
    _check_length(sum(map(len, texts)) + len(texts) * len(d))
    return d.join(texts)


def _join_text(d: str, items: Iterable[Any]) -> str:
    return _join(items, d)


def _indent(text: Any, width: int = 4, first: bool = False, blank: bool = False) -> str:
    lines = str(text).splitlines()
    _check_length(len(str(text)) + len(lines) * abs(width))
    return str(do_indent(str(text), width, first, blank))


def _check_length(length: int) -> None:
    if length > MAX_CHARACTERS:
        raise TemplateError(f"chat template: it builds a text of {length} characters, over {MAX_CHARACTERS}")


def _tojson(value: Any, indent: int | None = None, **_: Any) -> str:
    # Jinja's own escapes <, > and &, which would change the prompt.
    value = list(value) if isinstance(value, Iterator) else value
    return json.dumps(value, ensure_ascii=False, indent=None if indent is None else min(indent, MAX_INDENT))


_BOUNDED_METHODS: dict[str, Callable[..., str]] = {"replace": _replace, "join": _join_text}
