"""Test that errors of the Python API name the parameter: wrong types of every parameter, and messages with options."""

import inspect
import random
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, Literal, get_type_hints

import numpy as np
import pytest

import edge
from edge import arguments
from edge.arguments import PARAMETERS, checked, in_parameters
from edge.models.demo import MODEL_PATH
from tests.support import ROOT

ANY: Any = edge  # for calls that a type checker refuses
WRONG = 5j  # no parameter takes complex numbers
UNCHECKED = {
    "Cluster.connected", "EngineOptions.check_sequences", "Front.plan", "Model.scales", "OnnxModel.over",
    "PlanChoice.with_own", "Model.prompt_tokens", "Steps.step", "Steps.say", "ShowStep", "Chat.messages",
    "Front.__init__", "Model.__init__", "RequestStream.__init__", "Pieces.__init__",
}  # fmt: skip
"""Functions that programs do not call: they are for other modules, or the program implements them."""


def functions() -> Iterator[tuple[str, Callable[..., Any]]]:
    """Yield the functions of the API that programs call with arguments, and their names."""
    for name in edge.__all__:
        public = getattr(edge, name)
        if inspect.isfunction(public):
            yield name, public
        elif not issubclass(public, BaseException) and not is_dataclass(public):
            for method, function in vars(public).items():
                function = function.__func__ if isinstance(function, classmethod | staticmethod) else function
                path = f"{name}.{method}"
                is_public = not method.startswith("_") or method == "__init__"
                if inspect.isfunction(function) and is_public and not {name, path} & UNCHECKED:
                    yield path, function
    yield "PlanChoice.load", vars(edge.PlanChoice)["load"].__func__
    yield "PlanChoice.save", edge.PlanChoice.save


def cases() -> Iterator[Any]:
    """Yield each parameter that has a type."""
    for path, function in functions():
        hints = get_type_hints(function)
        for name, parameter in inspect.signature(function).parameters.items():
            if parameter.kind != parameter.VAR_KEYWORD and name in hints and hints[name] is not Any:
                yield pytest.param(function, name, id=f"{path}-{name}")


@pytest.mark.parametrize(("function", "name"), list(cases()))
def test_an_argument_of_a_wrong_type_is_refused_by_its_name(function: Callable[..., Any], name: str) -> None:
    parameters = inspect.signature(function).parameters.values()
    required = {p.name: None for p in parameters if p.default is p.empty and p.kind != p.VAR_KEYWORD}
    # The check of other arguments comes in the order of the parameters, so they are replaced by objects that fit.
    stand_ins = {p: _fitting(function, p) for p in required}
    with pytest.raises(TypeError, match=rf"^{name} must be .*, got 5j$"):
        function(**{**stand_ins, name: WRONG})


def _fitting(function: Callable[..., Any], name: str) -> Any:
    kind = get_type_hints(function).get(name, Any)
    return next((value for value in ("a", 1, [], {}, b"", object, None) if arguments._fits(value, kind)), None)


@pytest.mark.parametrize("kind", [edge.EngineOptions, edge.PlanOptions, edge.SamplingParams, edge.Exchange])
def test_a_field_of_a_wrong_type_is_refused_by_its_name(kind: type) -> None:
    for field in fields(kind):
        with pytest.raises(TypeError, match=rf"^{field.name} must be .*, got 5j$"):
            kind(**{field.name: WRONG})


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: edge.load(threads=0), "threads must be from 1 to 512, got 0"),
        (lambda: edge.load(memory="x"), "memory needs a size such as 2GiB"),
        (lambda: edge.load(gpu_memory="x"), "gpu_memory needs a size"),
        (lambda: edge.load(prefix_cache="x"), "prefix_cache needs a size"),
        (lambda: edge.load(prefix_cache=-1), "prefix_cache must be 0 bytes or more, got -1"),
        (lambda: edge.load(kontext=5), "unexpected keyword argument 'kontext'"),
        (lambda: edge.load(memory="20MiB"), "Use a larger memory, a smaller batch or kv_type"),
        (lambda: edge.quantize(MODEL_PATH, "no", size="x"), "size needs a size"),
        (lambda: edge.quantize(MODEL_PATH, "no", type="q8_0", threads=0), "threads must be from 1"),
        (lambda: ANY.Model.generate(object(), "a", temperature=0), r"write sampling=SamplingParams\(temperature="),
        (lambda: ANY.plan("a", edge.Cluster(), objektive="ttft"), "plan: .*'objektive'; did you mean objective"),
        (lambda: edge.Cluster("pi"), r"workers must be a list, such as \['pi'\]"),
        (lambda: edge.PlanOptions(context=0), "context must be 1 or more, got 0"),
        (lambda: edge.PlanOptions(acceptance=2), "acceptance must be from 0 to 1, got 2"),
        (lambda: edge.SamplingParams(stop="ab"), r"stop must be a list, such as \['ab'\]"),
    ],
)  # fmt: skip
def test_a_refused_value_is_named(call: Callable[[], object], message: str) -> None:
    with pytest.raises((edge.EdgeError, ValueError, TypeError), match=message):
        call()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda c: edge.plan(None, c, objective="x"), "objective 'x'; known are"),
        (lambda c: edge.plan(None, c, limits={"x": 1.0}), "objective 'x' of limits"),
        (lambda c: edge.plan(None, c, parallel="x"), "parallel is 'x'"),
        (lambda c: edge.plan(None, c, types="q8_0"), r"types must be a list, such as \['q8_0'\]"),
        (lambda c: edge.pareto(None, c, axes=list("x")), "objective 'x' of axes"),
        (lambda c: edge.pareto(None, c, measure=-1), "measure must be 0 or more, got -1"),
    ],
)  # fmt: skip
def test_a_refused_value_of_a_plan_is_named(call: Callable[[edge.Cluster], object], message: str) -> None:
    with edge.Cluster() as cluster, pytest.raises(ValueError, match=message):
        call(cluster)


def test_token_ids_are_checked_before_llama_cpp_sees_them() -> None:
    with edge.load(context=64) as model:
        most = model.engine.model.n_vocab - 1
        rng = random.Random(3)
        for wrong in (-1, most + 1, 2**31, -(2**40)):
            tokens = [rng.randrange(most) for _ in range(rng.randrange(5))] + [wrong]
            with pytest.raises(ValueError, match=rf"^tokens has the token id {wrong}; ids of this model are from 0"):
                model.detokenize(tokens)
            with pytest.raises(ValueError, match=rf"^prompt has the token id {wrong};"):
                model.generate(tokens)
            with model.stream() as requests, pytest.raises(ValueError, match=r"^prompt has the token id"):
                requests.add(tokens, max_tokens=1)
        assert model.detokenize(np.array([most])) == model.detokenize([most])


def test_arguments_that_fit_are_passed_on() -> None:
    @checked
    def function(
        a: int | None, b: float = 1, *, c: Sequence[str] = (), d: Mapping[str, int] | None = None,
        e: Literal["x", "y"] = "x", f: Path | None = None, g: bool = False, **others: Any,
    ) -> tuple[object, ...]:  # fmt: skip
        return a, b, c, d, e, f, g, others

    assert function(np.int64(3), np.float32(2)) == (3, 2, (), None, "x", None, False, {})
    given_values = (None, 2.5, ("a",), {"k": 1}, "y", Path("p"), True)
    assert function(None, 2.5, c=("a",), d={"k": 1}, e="y", f=Path("p"), g=True, h=5j) == (*given_values, {"h": 5j})
    for wrong in ({"c": b"ab"}, {"c": {"a": 1}}, {"c": [1]}, {"d": {"k": "v"}}, {"e": 1}, {"f": "p"}, {"g": "no"}):
        with pytest.raises(TypeError, match=f"^{next(iter(wrong))} must be"):
            function(1, **wrong)
    with pytest.raises(TypeError, match="missing a required argument: 'a'"):
        function(b=1)  # type: ignore[call-arg]
    with pytest.raises(ValueError, match=r"^c must be a list, such as \['ab'\]$"):
        function(1, c="ab")


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ("use a larger --context or a smaller --kv-type", "use a larger context or a smaller kv_type"),
        ("use --draft off, or --concurrency 1", 'use draft="off", or concurrency=1'),
        ("say --insecure here too", "say insecure=True here too"),
        ("this model needs --parallel pipeline", 'this model needs parallel="pipeline"'),
        ("Take --fit 120MiB or more", 'Take size="120MiB" or more'),
        ("use --context 512 (saves 3.5 MiB)", "use context=512 (saves 3.5 MiB)"),
        ("edge model list --known shows", "edge model list --known shows"),
        ("pip install --force-reinstall --no-binary x", "pip install --force-reinstall --no-binary x"),
        ("a--context and ---memory", "a--context and ---memory"),
    ],
)
def test_messages_name_parameters(message: str, expected: str) -> None:
    assert in_parameters(message) == expected
    assert in_parameters(expected) == expected


def test_parameters_have_the_names_of_options_in_messages() -> None:
    """Each option that a message mentions is a parameter of the same name, or belongs to a command."""
    callables: list[Any] = [function for _, function in functions()]
    names = {name for function in callables for name in inspect.signature(function).parameters}
    names |= {field.name for kind in (edge.EngineOptions, edge.PlanOptions) for field in fields(kind)}
    assert {name.replace("-", "_") for name in PARAMETERS} <= names
    sources = [path for room in ("edge", "partition") for path in (ROOT / room).rglob("*.py")]
    rooms = ("serve", "worker", "doctor", "models", "pictures")  # these speak to users of commands
    mentioned = set()
    for path in sources:
        if not set(rooms) & set(path.parts):
            for line in path.read_text().splitlines():
                for literal in re.findall(r'"((?:[^"\\]|\\.)*)"', line):
                    mentioned |= set(re.findall(r"(?<![\w-])--([a-z][a-z-]*[a-z])", literal))
    of_commands = {"plan", "type", "workers"}  # in commands that messages and pages show
    assert {name for name in mentioned if name.replace("-", "_") in names} - of_commands <= PARAMETERS


def test_only_programs_that_use_names_of_edge_read_parameters() -> None:
    code = """
import edge
from edge.errors import ContextFull
print(ContextFull("use a larger --context"))
edge.EdgeError
print(ContextFull("use a larger --context"), repr(ContextFull("use --context")))
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [
        "use a larger --context", "use a larger context ContextFull('use --context')"
    ]  # fmt: skip
