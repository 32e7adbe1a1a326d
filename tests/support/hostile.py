"""Grammars, schemas and regular expressions that try to take unlimited time, all memory, or a parser's whole stack."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

Constraint = tuple[str, str]  # a field of SamplingParams, and its text


def hostile_constraints() -> list[Constraint]:
    """Some 220, of many families, mild and wild ones of each mixed."""
    families = [list(family()) for family in _FAMILIES]
    longest = max(map(len, families))
    return [family[n] for n in range(longest) for family in families if n < len(family)]


def doubling(depth: int) -> str:
    """A grammar of a few hundred bytes whose rules each come to twice as many parses as the one before."""
    rules = "".join(f"r{n} ::= r{n - 1} r{n - 1} | r{n - 1}\n" for n in range(1, depth + 1))
    return f'root ::= r{depth} r{depth}\n{rules}r0 ::= "a" | ""\n'


def _doubling() -> Iterator[Constraint]:
    for depth in (8, 12, 16, 20, 24, 30, 60):
        yield "grammar", doubling(depth)


def _doubling_in_lark() -> Iterator[Constraint]:
    for depth in (8, 12, 16, 20, 24, 30, 60):
        rules = "".join(f"r{n}: r{n - 1} r{n - 1} | r{n - 1}\n" for n in range(1, depth + 1))
        yield "lark", f'start: r{depth} r{depth}\n{rules}r0: "a" |\n'


def _ambiguous() -> Iterator[Constraint]:
    """Many ways to read the same text, which only following it shows."""
    for n in (2, 4, 8, 16, 32):
        names = [f"x{i}" for i in range(n)]
        rules = "\n".join(f'{name} ::= [a-z ] root | [a-z ] root [a-z ] | "."' for name in names)
        yield "grammar", f"root ::= {' | '.join(names)}\n{rules}\n"
    for n in (2, 4, 8, 16):
        yield "grammar", "root ::= " + " ".join(["([a-z ]* [a-zA-Z ]*)"] * n * 4) + ' "!"'
        yield "grammar", "root ::= " + " ".join([f"(.* | .* .* ){{0,{n}}}"] * n)


def _repeated() -> Iterator[Constraint]:
    for n in (100, 1_000, 2_000, 10_000, 1_000_000, 2**31 - 1, 2**63):
        yield "regex", f"(a{{1,{n}}}){{1,{n}}}"
        yield "grammar", f'root ::= "a"{{1,{n}}}'
        yield "grammar", f'root ::= (("a"{{0,{n}}}){{0,{n}}}){{0,{n}}}'
        yield "lark", f"start: /[ab]/{{0,{n}}}"
        yield "json_schema", json.dumps({"type": "string", "minLength": n, "maxLength": n})
        yield "json_schema", json.dumps({"type": "array", "items": {"type": "integer"}, "minItems": n})


def _catastrophic() -> Iterator[Constraint]:
    for n in (5, 15, 30, 60):
        yield "regex", "(a+)+" * n + "b"
        yield "regex", "(" * n + "a" + ")+" * n + "$"
        yield "regex", "(a|aa|aaa)*" * n
        yield "regex", f"(.*a.{{{n}}})|(.*b.{{{n}}})"
        yield "regex", f"[ab]*a[ab]{{{n}}}"
        yield "regex", f"(?=.*a.{{{n}}}).*"
        yield "regex", f"(x+x+)+y{{{n}}}(?!z)"
        yield "lark", f"start: A\nA: (/[ab]*a[ab]{{{n}}}/ & /[ab]*b[ab]{{{n}}}/) | ~(/(a|b)*{'a?' * n}/)"


def _unicode() -> Iterator[Constraint]:
    for n in (1, 20, 200, 2_000):
        yield "regex", r"[\p{L}\p{N}\p{S}]" + f"{{{n}}}"
        yield "regex", f"(?i)[^\\x00-\\x{{10fffe}}]*\\w{{{n}}}\\W{{{n}}}"
        yield "grammar", "root ::= [" + "".join(chr(0x4E00 + 2 * i) for i in range(10 * n)) + "]{1,40}"


def _nested() -> Iterator[Constraint]:
    for n in (100, 450, 5_000, 100_000):
        yield "grammar", "root ::= " + "(" * n + '"a"' + ")" * n
        yield "grammar", "root ::= " + '("a" | ' * n + '"b"' + ")" * n
        yield "regex", "(" * n + "a" + ")" * n
        yield "regex", "a|(" * n + "b" + ")" * n
        yield "lark", "start: " + "(" * n + '"a"' + ")" * n
        yield "json_schema", '{"items":' * n + "{}" + "}" * n
        yield "json_schema", '{"anyOf":[{"type":"null"},' * n + "{}" + "]}" * n


def _left_recursive() -> Iterator[Constraint]:
    yield "grammar", 'root ::= root "a" | "a"'
    yield "grammar", "root ::= root"
    yield "grammar", "root ::= root root | "
    yield "grammar", 'root ::= a\na ::= b\nb ::= a "x" | ""'
    yield "grammar", 'root ::= (("")*)* "a"'
    yield "grammar", "root ::= (root*)*"
    yield "lark", 'start: start "a" | "a"'
    yield "lark", "start: start start |"
    yield "lark", "start: a*\na: b*\nb: a* |"
    yield "regex", "(()*)*"
    yield "regex", "((a*)*)*{0}"


def _references() -> Iterator[Constraint]:
    loop: dict[str, Any] = {"$ref": "#"}
    yield "json_schema", json.dumps(loop)
    yield "json_schema", json.dumps({"allOf": [loop, loop]})
    yield (
        "json_schema",
        json.dumps({"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}),
    )
    yield "json_schema", json.dumps({"type": "object", "properties": {"a": {"anyOf": [loop, loop]}}, "required": ["a"]})
    for n in (8, 16, 24, 40):
        for how in ("anyOf", "allOf", "oneOf"):
            definitions = {f"d{i}": {how: [{"$ref": f"#/$defs/d{i - 1}"}] * 2} for i in range(1, n)}
            definitions["d0"] = {"type": "object", "properties": {"a": {"$ref": f"#/$defs/d{n - 1}"}}}  # type: ignore[dict-item]
            yield "json_schema", json.dumps({"$defs": definitions, "$ref": f"#/$defs/d{n - 1}"})


def _large() -> Iterator[Constraint]:
    for n in (1_000, 20_000, 200_000):
        yield "json_schema", json.dumps({"enum": [f"value {i * 7919}" for i in range(n)]})
        properties = {f"property{i}": {"type": "string", "pattern": f"^a{{{i % 50}}}b*$"} for i in range(n // 10)}
        yield "json_schema", json.dumps({"type": "object", "properties": properties})
        yield "regex", "|".join(f"word{i * 7919}" for i in range(n))
        yield "grammar", "root ::= " + " | ".join(f'"w{i * 7919}"' for i in range(n))
        yield "lark", "start: " + " | ".join(f'"w{i * 7919}"' for i in range(n))
    size = 10 << 20
    yield "regex", "a" * size
    yield "regex", "." * (size // 10)
    yield "grammar", f'root ::= "{"a" * size}"'
    yield "lark", f'start: "{"a" * size}"'
    yield "json_schema", json.dumps({"const": "a" * size})
    yield "json_schema", "[" * size
    yield "grammar", "root ::= " + "a " * 1_000_000


def _numbers() -> Iterator[Constraint]:
    for n in (10, 100, 300):
        yield "json_schema", json.dumps({"type": "integer", "multipleOf": 10**n + 7, "minimum": 3})
        yield (
            "json_schema",
            json.dumps({"type": "number", "minimum": 10**-n, "maximum": 1.7e300, "multipleOf": 0.000013}),
        )
        yield (
            "json_schema",
            json.dumps({"allOf": [{"type": "integer", "multipleOf": prime} for prime in (97, 89, 83, 79)[:n]]}),
        )
        patterns = [{"type": "string", "pattern": f"^.*{i}.{{{n // 5}}}$"} for i in range(min(n, 40))]
        yield "json_schema", json.dumps({"allOf": patterns})


_FAMILIES: tuple[Callable[[], Iterator[Constraint]], ...] = (
    _doubling, _doubling_in_lark, _ambiguous, _repeated, _catastrophic, _unicode, _nested, _left_recursive,
    _references, _large, _numbers,
)  # fmt: skip
