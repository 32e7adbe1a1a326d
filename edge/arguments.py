"""Arguments of the Python API: checks by their annotations, and errors that name parameters instead of options."""

from __future__ import annotations

import inspect
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import is_dataclass
from difflib import get_close_matches
from functools import cache, wraps
from numbers import Integral, Real
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, ParamSpec, TypeVar, Union, get_args, get_origin, get_type_hints

from quant.text import with_article

P = ParamSpec("P")
Q = TypeVar("Q")
R = TypeVar("R")

# Options of the commands that are parameters of the same name. Messages of errors mention them.
PARAMETERS = frozenset(
    "acceptance batch concurrency context draft fresh gpu-layers gpu-memory imatrix insecure kv-type labels lora memory"
    " parallel prefer prefix-cache prompt-tokens reproducible shares threads transport types window wire".split()
)
_OTHERS = {"fit": "size"}
_SWITCHES = ("fresh", "insecure", "reproducible")
_OPTION = re.compile(
    r"(?<![\w-])--(?P<name>[a-z][a-z-]*[a-z])"
    r"(?: (?P<number>\d+(?![\w.]))| (?P<word>\d+MiB|off|mtp|ngram|tensor|pipeline|speed|quality)\b)?"
)
_KINDS: dict[Any, tuple[type, str, str]] = {  # by annotation: class, name, name of several
    bool: (bool, "True or False", "truth values"),
    bytes: (bytes, "bytes", "bytes"),
    float: (Real, "a number", "numbers"),
    int: (Integral, "a whole number", "whole numbers"),
    str: (str, "a text", "texts"),
    Path: (Path, "a Path", "Paths"),
    os.PathLike: (os.PathLike, "a path", "paths"),
    NoneType: (NoneType, "None", "None"),
}


def in_parameters(message: object) -> str:
    """Return a message that names parameters where it names options of the commands: `memory` for `--memory`."""
    return _OPTION.sub(_parameter, str(message))


def _parameter(option: re.Match[str]) -> str:
    name = option["name"]
    if name not in PARAMETERS and name not in _OTHERS:
        return option[0]  # an option of a command that the message shows
    parameter = _OTHERS.get(name, name.replace("-", "_"))
    value = option["number"] or (f'"{option["word"]}"' if option["word"] else "True" if name in _SWITCHES else "")
    return f"{parameter}={value}" if value else parameter


def named(name: str, parse: Callable[[Q], R], value: Q) -> R:
    """Return `parse(value)`. A ValueError of `parse` begins with the name of the parameter."""
    try:
        return parse(value)
    except ValueError as error:
        raise ValueError(f"{name} {error}") from None


def checked(function: Callable[P, R]) -> Callable[P, R]:
    """Decorate a function: arguments that do not fit its annotations raise TypeError, which names the parameter.

    For an unknown parameter, the error names the parameter whose fields include it, or the nearest one.
    """
    signature = inspect.signature(function)

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            values = signature.bind(*args, **kwargs).arguments
        except TypeError as error:
            unknown = next((name for name in kwargs if name not in signature.parameters), None)
            hint = "" if unknown is None else _hint(unknown, signature.parameters, _hints(function))
            raise TypeError(f"{function.__name__}: {error}{hint}") from None
        _check(values, _hints(function))
        return function(*args, **kwargs)

    return call


def check_fields(values: Any) -> None:
    """Raise TypeError, which names the field, if a value of a dataclass does not fit its annotation."""
    kind: Any = type(values)
    _check(vars(values), _hints(kind))


def _hint(unknown: str, parameters: Mapping[str, object], hints: Mapping[str, Any]) -> str:
    for name in parameters:
        for kind in _parts(hints.get(name, Any)):
            if is_dataclass(kind) and unknown in kind.__dataclass_fields__:
                return f"; write {name}={_origin(kind).__name__}({unknown}=...)"
    near = get_close_matches(unknown, parameters, n=1)
    return f"; did you mean {near[0]}?" if near else ""


@cache
def _hints(annotated: Any) -> dict[str, Any]:
    return get_type_hints(annotated)


def _check(values: Mapping[str, Any], hints: Mapping[str, Any]) -> None:
    for name, value in values.items():
        kind = hints.get(name, Any)
        if _fits(value, kind):
            continue
        if isinstance(value, str) and any(_origin(part) is Sequence for part in _parts(kind)):
            raise ValueError(f"{name} must be a list, such as [{value!r:.80}]")
        raise TypeError(f"{name} must be {_text(kind)}, got {value!r:.80}")


def _parts(kind: Any) -> tuple[Any, ...]:
    """Return the members of a union, or the kind itself."""
    return get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)


def _origin(kind: Any) -> Any:
    return get_origin(kind) or kind


def _fits(value: Any, kind: Any) -> bool:
    origin, args = _origin(kind), get_args(kind)
    if kind is Any or origin.__module__.startswith("numpy"):
        return True
    if origin in (Union, UnionType):
        return any(_fits(value, part) for part in args)
    if origin is Literal:
        return isinstance(value, str)  # the function checks which
    if origin in _KINDS:
        return isinstance(value, _KINDS[origin][0])
    if origin is Sequence:
        is_list = hasattr(value, "__getitem__") and hasattr(value, "__len__")
        return is_list and not isinstance(value, str | bytes | Mapping) and all(_fits(item, args[0]) for item in value)
    if origin is Mapping:
        is_mapping = isinstance(value, Mapping)
        return is_mapping and all(_fits(key, args[0]) and _fits(item, args[1]) for key, item in value.items())
    if origin is Iterable:
        return hasattr(value, "__iter__") and not isinstance(value, str | bytes)
    # Another object may take the place of an instance, for instance in tests. Plain data may not.
    return callable(value) or type(value).__module__ != "builtins"


def _text(kind: Any, *, several: bool = False) -> str:
    """Return the name of a kind of values."""
    origin, args = _origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        *first, last = dict.fromkeys(_text(part, several=several) for part in args)
        return f"{', '.join(first)} or {last}" if first else last
    if origin is Literal:
        return f"{'texts' if several else 'a text'} among {', '.join(map(repr, args))}"
    if origin in _KINDS:
        _, name, name_of_several = _KINDS[origin]
        return name_of_several if several else name
    if origin is Sequence:
        return f"{'lists' if several else 'a list'} of {_text(args[0], several=True)}"
    if origin is Mapping:
        keys, values = (_text(part, several=True) for part in args)
        return f"{'mappings' if several else 'a mapping'} of {keys} to {values}"
    name = "function" if origin is Callable else "value" if kind is Any else origin.__name__
    return f"{name}s" if several else with_article(name)
