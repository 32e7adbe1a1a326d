"""Test limits of requests: a request that meets a limit exactly is answered, and one beyond it is refused by name."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import httpx
import pytest

from edge.serve.apis.fields import MAX_ANSWERS, MAX_BATCH, MAX_BIASES, MAX_LOGPROBS, MAX_STOPS, MAX_VARIABLES
from edge.serve.apis.tokens import MOST_CHARACTERS
from edge.serve.app import create_app
from edge.serve.http.bodies import MOST_ITEMS, MOST_STRINGS, SHORT_BYTES, check_values
from edge.serve.http.errors import BadRequest
from edge.serve.options import ServeOptions
from edge.serve.tools.functions import MAX_FUNCTIONS
from edge.serve.tools.sizes import MOST_CHARACTERS as MOST_OF_FIELD
from edge.serve.tools.sizes import MOST_DEPTH, MOST_NAME, MOST_VALUES, JsonSize
from tests.serve.scripted import ScriptedModels
from tests.serve.serving import serving

CHAT = {"messages": [{"role": "user", "content": "Hi"}]}


class Limited(NamedTuple):
    """A request whose size is a number."""

    path: str
    most: int
    body: Callable[[int], dict[str, Any]]

    def __str__(self) -> str:
        return f"{self.path} {self.most}"


def tool(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


LIMITED = [
    *(
        Limited(path, MAX_BATCH, lambda n, name=name: {name: ["a"] * n})  # type: ignore[misc]
        for path, name in (("/v1/embeddings", "input"), ("/embedding", "content"), ("/api/embed", "input"))
    ),
    Limited("/v1/rerank", MAX_BATCH, lambda n: {"query": "a", "documents": ["a"] * n}),
    Limited("/v1/completions", MAX_ANSWERS, lambda n: {"prompt": "a", "n": n}),
    Limited("/v1/completions", MAX_LOGPROBS, lambda n: {"prompt": "a", "logprobs": n}),
    Limited("/completion", MAX_LOGPROBS, lambda n: {"prompt": "a", "n_probs": n}),
    Limited("/v1/chat/completions", MAX_ANSWERS, lambda n: {**CHAT, "n": n}),
    Limited("/v1/chat/completions", MAX_LOGPROBS, lambda n: {**CHAT, "logprobs": True, "top_logprobs": n}),
    Limited("/v1/chat/completions", MAX_BIASES, lambda n: {**CHAT, "logit_bias": {str(i): 1 for i in range(n)}}),
    Limited("/v1/chat/completions", MAX_BIASES, lambda n: {**CHAT, "logit_bias": [[i, 1] for i in range(n)]}),
    Limited("/v1/chat/completions", MAX_FUNCTIONS, lambda n: {**CHAT, "tools": [tool(f"f{i}") for i in range(n)]}),
    Limited("/v1/chat/completions", 128, lambda n: {**CHAT, "tools": [tool("f" * n)]}),
    Limited("/v1/chat/completions", 40, lambda n: {**CHAT, "reasoning_effort": "e" * n}),
    Limited("/v1/chat/completions", 1000, lambda n: {**CHAT, "stop": "a" * n}),
    Limited(
        "/v1/chat/completions",
        MAX_VARIABLES,
        lambda n: {**CHAT, "chat_template_kwargs": {f"v{i}": 1 for i in range(n)}},
    ),
    Limited("/v1/messages", MAX_STOPS, lambda n: {**CHAT, "max_tokens": 5, "stop_sequences": ["a"] * n}),
    Limited("/v1/responses", MAX_VARIABLES, lambda n: {"input": "a", "metadata": {f"v{i}": "1" for i in range(n)}}),
    Limited("/api/chat", MAX_LOGPROBS, lambda n: {**CHAT, "stream": False, "logprobs": True, "top_logprobs": n}),
    Limited("/api/chat", MAX_STOPS, lambda n: {**CHAT, "stream": False, "options": {"stop": ["a"] * n}}),
    Limited("/tokenize", MOST_CHARACTERS, lambda n: {"content": "a" * n}),
]


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with serving(create_app(ScriptedModels(), ServeOptions())) as address:
        yield address


@pytest.mark.parametrize("limited", LIMITED, ids=str)
def test_request_of_the_limit_is_answered_and_one_more_is_refused(url: str, limited: Limited) -> None:
    own = httpx.post(url + limited.path, json=limited.body(limited.most), timeout=60)
    assert own.status_code == 200, own.text[:300]
    beyond = httpx.post(url + limited.path, json=limited.body(limited.most + 1), timeout=60)
    assert beyond.status_code == 400
    assert str(limited.most) in beyond.text


def nested(depth: int) -> Any:
    value: Any = 1
    for level in range(depth):
        value = [value] if level % 2 else {"a": value}
    return value


@pytest.mark.parametrize(
    ("most", "value"),
    [
        (MOST_DEPTH, nested),
        (MOST_NAME, lambda n: {"a" * n: 1}),
        (MOST_NAME, lambda n: {"$ref": "#" * n}),
        (MOST_NAME, lambda n: {"properties": [{"$ref": "#" * n}]}),
        (MOST_VALUES - 1, lambda n: [1] * n),  # the list is a value, too
        (MOST_OF_FIELD, lambda n: "a" * n),
        (MOST_OF_FIELD - 1, lambda n: {"a": "a" * n}),
    ],
    ids=lambda value: str(value) if isinstance(value, int) else "",
)
def test_json_of_the_limit_is_taken_and_more_is_refused(most: int, value: Callable[[int], Any]) -> None:
    JsonSize("tools").add(value(most))
    with pytest.raises(BadRequest):
        JsonSize("tools").add(value(most + 1))
    # Values of one field are counted together, and only those of one field.
    JsonSize("format").add(value(most))


def test_body_of_the_limit_is_taken_and_more_is_refused() -> None:
    for most, body in (
        (MOST_STRINGS, lambda n: json.dumps(["a"] * n)),
        (MOST_ITEMS + 1, lambda n: json.dumps([1] * n)),  # n items have n - 1 commas
    ):
        assert len(body(most)) > SHORT_BYTES
        check_values(body(most).encode())
        with pytest.raises(BadRequest):
            check_values(body(most + 1).encode())
