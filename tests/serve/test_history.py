"""Test earlier turns that clients send back: answers of this server and of others continue a conversation."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import product
from typing import Any

import httpx
import pytest

from edge.serve.apis import history
from edge.serve.apis.responses import RESPONSES
from edge.serve.app import create_app
from edge.serve.options import ServeOptions
from tests.serve.scripted import ScriptedModels
from tests.serve.serving import serving
from tests.support.helpers import calls
from tests.support.multimodal import png

HERMES = "<tool_call> tools tool_calls"
PICTURE = base64.b64encode(png()).decode()
UNSEEN = "[a picture that this model cannot see]"
APIS = ("/v1/chat/completions", "/v1/responses", "/v1/messages", "/api/chat")
Turn = Mapping[str, Any]
every_api = pytest.mark.parametrize("api", APIS)


@pytest.fixture(scope="module")
def models() -> ScriptedModels:
    scripted = ScriptedModels()
    scripted.scripted.template = HERMES
    return scripted


@pytest.fixture(scope="module")
def url(models: ScriptedModels) -> Iterator[str]:
    with serving(create_app(models, ServeOptions())) as address:
        yield address


def called(api: str, name: Any, arguments: Any, result: str | list[dict[str, Any]] | None = "ok") -> dict[str, Any]:
    """Return a request of an API with an earlier call, its result, and a question."""
    if api == "/v1/responses":
        call = {"type": "function_call", "call_id": "c1", "name": name, "arguments": arguments}
        items = [] if result is None else [{"type": "function_call_output", "call_id": "c1", "output": result}]
        return {"input": [{"role": "user", "content": "a"}, call, *items, {"role": "user", "content": "b"}]}
    if api == "/v1/messages":
        use = {"type": "tool_use", "id": "c1", "name": name, "input": arguments}
        blocks = [] if result is None else [{"type": "tool_result", "tool_use_id": "c1", "content": result}]
        answer = [{"role": "user", "content": [*blocks, {"type": "text", "text": "b"}]}]
        return {
            "max_tokens": 5,
            "messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": [use]}, *answer],
        }
    call = {"id": "c1", "type": "function", "function": {"name": name, "arguments": arguments}}
    own = [] if result is None else [{"role": "tool", "tool_call_id": "c1", "content": result}]
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": None, "tool_calls": [call]}, *own]
    return {"messages": [*messages, {"role": "user", "content": "b"}], "stream": False}


def post(url: str, path: str, body: Turn, status: int = 200) -> Any:
    reply = httpx.post(url + path, json=body, timeout=60)
    assert reply.status_code == status, reply.text
    return reply.json()


def messages_of(url: str, models: ScriptedModels, path: str, body: Turn) -> Sequence[Turn]:
    """Return the messages that the model got."""
    post(url, path, body)
    return models.scripted.requests[-1].messages or ()


def the_call(messages: Sequence[Turn]) -> dict[str, Any]:
    [call] = [call for message in messages for call in message.get("tool_calls") or ()]
    function: dict[str, Any] = call["function"]
    return function


@every_api
@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ('{"city": "Par', {"arguments": '{"city": "Par'}),
        ("", {}),
        (" ", {}),
        (None, {}),
        ("null", {}),
        ('{"city": "Paris"}', {"city": "Paris"}),
        ({"city": "Paris"}, {"city": "Paris"}),
        ("[1, 2]", {"arguments": [1, 2]}),
        ([1, 2], {"arguments": [1, 2]}),
        ("7", {"arguments": 7}),
        ('"Paris"', {"arguments": "Paris"}),
        ("Paris", {"arguments": "Paris"}),
        ('{"n": NaN}', {"arguments": '{"n": NaN}'}),
        ('{"n": 1e999}', {"arguments": '{"n": 1e999}'}),
        ('{"n": "\\ud800"}', {"arguments": '{"n": "\\ud800"}'}),
        ('{"n": ' + "9" * 5000 + "}", {"arguments": '{"n": ' + "9" * 5000 + "}"}),
        ("[" * 5000, {"arguments": "[" * 5000}),
        ('{"a":' * 150 + "1" + "}" * 150, None),
    ],
    ids=range(18),
)
def test_arguments_of_any_kind_go_on(
    url: str, models: ScriptedModels, api: str, arguments: Any, expected: dict[str, Any] | None
) -> None:
    got = the_call(messages_of(url, models, api, called(api, "weather", arguments)))
    assert got["name"] == "weather"
    assert got["arguments"] == (json.loads(arguments) if expected is None else expected)


@every_api
@pytest.mark.parametrize("name", ["get weather!", "ä" * 500, "", None, '"}</tool_call>'], ids=range(5))
def test_names_of_any_kind_go_on(url: str, models: ScriptedModels, api: str, name: str | None) -> None:
    assert the_call(messages_of(url, models, api, called(api, name, "{}")))["name"] == (name or "")


@every_api
def test_a_call_without_a_result_and_a_result_without_a_call_go_on(url: str, models: ScriptedModels, api: str) -> None:
    assert the_call(messages_of(url, models, api, called(api, "weather", "{}", None)))["name"] == "weather"
    body = called(api, "weather", "{}", "sunny")
    key = "input" if api == "/v1/responses" else "messages"
    messages = messages_of(url, models, api, {**body, key: [body[key][0], *body[key][2:]]})
    assert all(message["role"] == "user" for message in messages)
    assert sum("<tool_response>\nsunny\n</tool_response>" in message["content"] for message in messages) == 1


def test_results_without_ids_and_calls_that_share_one_find_each_other(url: str, models: ScriptedModels) -> None:
    def call(name: str, **own: Any) -> dict[str, Any]:
        return {"function": {"name": name, "arguments": "{}"}, **own}

    messages = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "tool_calls": [call("x", id="1"), call("y", id="1"), call("z"), call("w", id=4)]},
        {"role": "tool", "tool_call_id": "1", "content": "of x"},
        {"role": "tool", "tool_call_id": "1", "content": "of y"},
        {"role": "tool", "content": "of z"},
        {"role": "tool", "tool_call_id": 4, "content": "of w"},
        {"role": "assistant", "content": None, "function_call": {"name": "old", "arguments": "{"}},
        {"role": "function", "name": "old", "content": "of old"},
        {"role": "user", "content": "b"},
    ]
    got = messages_of(url, models, "/v1/chat/completions", {"messages": messages})
    names = {call["id"]: call["function"]["name"] for message in got for call in message.get("tool_calls") or ()}
    assert len(names) == 5
    results = [message for message in got if message["role"] == "tool"]
    assert [message["content"] for message in results] == [f"of {names[m['tool_call_id']]}" for m in results]
    assert [names[message["tool_call_id"]] for message in results] == ["x", "y", "z", "w", "old"]


def test_an_id_that_comes_again_is_that_of_the_latest_call() -> None:
    def turn(name: str) -> dict[str, Any]:
        return {"role": "assistant", "content": "", "tool_calls": [history.past_call("1", name, "{}")]}

    result = {"role": "tool", "tool_call_id": "1", "content": "r"}
    assert [m.get("tool_call_id") for m in history.linked([turn("a"), turn("b"), result, result])] == [
        None,
        None,
        "1",
        "1",
    ]


ITEMS: dict[str, Callable[[str], Turn]] = {
    "thought": lambda text: {"type": "reasoning", "summary": [{"type": "summary_text", "text": text}]},
    "text": lambda text: {"role": "assistant", "content": text},
    "call": lambda text: {"type": "function_call", "call_id": text, "name": text, "arguments": "{}"},
    "user": lambda text: {"role": "user", "content": text},
}


@pytest.mark.parametrize("n_items", range(1, 6))
def test_thoughts_of_a_response_come_once_before_the_text_or_call_that_follows_them(n_items: int) -> None:
    for kinds in product(ITEMS, repeat=n_items):
        items = [ITEMS[kind](f"{kind}{place}") for place, kind in enumerate(kinds)]
        expected: list[str] = []
        thoughts: list[str] = []
        for place, kind in enumerate(kinds):
            if kind == "thought":
                thoughts.append(f"{kind}{place}")
                continue
            if kind != "user":
                expected += thoughts
                thoughts = []
            expected.append(f"{kind}{place}")
        if all(kind == "thought" for kind in kinds):
            continue  # such an input has no message
        generation = RESPONSES.parse(RESPONSES.request.model_validate({"input": items}), HERMES).generations[0]
        order: list[str] = []
        for message in generation.messages or ():
            order += filter(None, message.get("reasoning_content", "").split("\n\n"))
            order += filter(None, [message["content"]])
            order += [call["function"]["name"] for call in message.get("tool_calls", ())]
        assert order == expected, kinds


@pytest.mark.parametrize("client_id", ["one", None])
@pytest.mark.parametrize("name", ["a", "b"])
def test_calls_and_results_take_time_by_their_number(client_id: str | None, name: str) -> None:
    """Each was compared with all others, and a request of some megabytes stopped the server for hours."""

    def n_calls(n: int) -> int:
        turn = {"role": "assistant", "content": "", "tool_calls": [history.past_call(client_id, "a", None)]}
        result = {"role": "tool", "content": "", "tool_call_id": client_id, "name": name}
        return calls(lambda: history.linked([*[turn] * n, *[result] * n]))

    assert n_calls(400) < 2.2 * n_calls(200)


@pytest.mark.parametrize(
    ("message", "content"),
    [
        ({"role": "assistant"}, ""),
        ({"role": "assistant", "content": None, "tool_calls": None}, ""),
        ({"role": "assistant", "content": "x", "tool_calls": []}, "x"),
        ({"role": "user", "content": None}, ""),
        ({"role": "system", "content": None}, ""),
        ({"role": "tool", "content": {"temperature": 5}}, '<tool_response>\n{"temperature": 5}\n</tool_response>'),
        ({"role": "assistant", "refusal": "No."}, "No."),
        ({"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]}, "No."),
        ({"role": "assistant", "content": "Hi", "audio": {"id": "a"}}, "Hi"),
        ({"role": "model", "content": ["a", {"text": "b"}]}, "ab"),
        ({"role": "HUMAN", "content": [{"type": "text", "text": None}]}, ""),
        (
            {"role": "assistant", "content": [{"type": "thinking", "thinking": "hm"}, {"type": "text", "text": "x"}]},
            "x",
        ),
    ],
    ids=range(12),
)
def test_messages_that_say_little_go_on(url: str, models: ScriptedModels, message: Turn, content: str) -> None:
    for path in ("/v1/chat/completions", "/api/chat"):
        if path == "/api/chat" and "refusal" in message:
            continue
        got = messages_of(url, models, path, {"messages": [message, {"role": "user", "content": "b"}], "stream": False})
        assert got[0]["content"] == content
        assert got[-1]["content"] == "b"


def test_a_role_of_no_meaning_is_named(url: str) -> None:
    for path in ("/v1/chat/completions", "/api/chat", "/v1/messages"):
        body = {"messages": [{"role": "critic", "content": "x"}], "max_tokens": 5}
        error = post(url, path, body, 400)["error"]
        assert "the role must be one of system, user, assistant, tool" in (
            error if path == "/api/chat" else error["message"]
        )


def anthropic(*blocks: dict[str, Any]) -> list[dict[str, Any]]:
    use = {"type": "tool_use", "id": "c1", "name": "look", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "c1", "content": list(blocks)}
    return [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": [use]},
        {"role": "user", "content": [result]},
    ]


SOURCE = {"type": "base64", "media_type": "image/png", "data": PICTURE}
PDF = {"type": "base64", "media_type": "application/pdf", "data": "JVBERi0="}


@pytest.mark.parametrize(
    ("block", "text"),
    [
        ({"type": "text", "text": "plain"}, "plain"),
        (
            {"type": "document", "title": "T", "source": {"type": "text", "media_type": "text/plain", "data": "w"}},
            "T\nw",
        ),
        ({"type": "document", "source": {"type": "content", "content": [{"type": "text", "text": "w"}]}}, "w"),
        ({"type": "document", "source": {"type": "content", "content": "w"}}, "w"),
        ({"type": "document", "source": {"type": "base64", "media_type": "text/csv", "data": "dw=="}}, "w"),
        ({"type": "document", "title": "T", "source": PDF}, "[document T: this model cannot read it]"),
        (
            {"type": "document", "source": {"type": "url", "url": "http://x/a.pdf"}},
            "[document: this model cannot read it]",
        ),
        (
            {"type": "search_result", "title": "T", "source": "http://s", "content": [{"type": "text", "text": "w"}]},
            "T\nhttp://s\nw",
        ),
        ({"type": "tool_reference", "tool_name": "grep"}, "grep"),
        ({"type": "image", "source": {"type": "file", "file_id": "f"}}, UNSEEN),
        ({"type": "image"}, UNSEEN),
        ({"type": "hologram", "shape": [1]}, "[hologram: this model cannot read it]"),
        ({"type": "hologram", "content": {"type": ["odd"], "text": 5}}, "[hologram: this model cannot read it]"),
    ],
    ids=range(13),
)
def test_a_result_of_any_kind_is_text(url: str, models: ScriptedModels, block: dict[str, Any], text: str) -> None:
    later = [{"role": "assistant", "content": "c"}, {"role": "user", "content": "d"}]
    for messages in (anthropic(block), [*anthropic(block), *later]):
        got = messages_of(url, models, "/v1/messages", {"messages": messages, "max_tokens": 5})
        assert [message["content"] for message in got if message["role"] == "tool"] == [text]
        assert post(url, "/v1/messages/count_tokens", {"messages": messages})["input_tokens"]


@pytest.mark.parametrize(
    ("part", "text"),
    [
        (
            {"type": "input_file", "filename": "a.pdf", "file_data": "data:application/pdf;base64,JVBERi0="},
            "[input_file a.pdf: this model cannot read it]",
        ),
        ({"type": "input_file", "filename": "a.txt", "file_data": "data:text/plain;base64,d29yZHM="}, "words"),
        ({"type": "file", "file": {"filename": "a.txt", "file_data": "data:text/plain;base64,d29yZHM="}}, "words"),
        ({"type": "input_image", "file_id": "f"}, UNSEEN),
        ({"type": "video_url", "video_url": {"url": "http://x/a.mp4"}}, "[video_url: this model cannot read it]"),
    ],
    ids=range(5),
)
def test_a_part_of_an_earlier_turn_is_text_and_one_of_the_last_question_is_read_or_refused(
    url: str, models: ScriptedModels, part: dict[str, Any], text: str
) -> None:
    question = {"role": "user", "content": [part]}
    later = [question, {"role": "assistant", "content": "c"}, {"role": "user", "content": "d"}]
    for api, key in (("/v1/chat/completions", "messages"), ("/v1/responses", "input")):
        assert messages_of(url, models, api, {key: later})[0]["content"] == text
        if text == "words":
            assert messages_of(url, models, api, {key: [question]})[0]["content"] == text
        else:
            assert f"{key}.0.content" in post(url, api, {key: [question]}, 400)["error"]["message"]


def picture(api: str) -> dict[str, Any]:
    url = f"data:image/png;base64,{PICTURE}"
    if api == "/v1/responses":
        return {"type": "input_image", "image_url": url}
    return (
        {"type": "image", "source": SOURCE}
        if api == "/v1/messages"
        else {"type": "image_url", "image_url": {"url": url}}
    )


def test_a_picture_in_a_result_needs_not_be_seen_and_one_in_the_question_does(url: str, models: ScriptedModels) -> None:
    for api in APIS[:3]:
        messages_of(url, models, api, called(api, "look", "{}", [picture(api)]))
        generation = models.scripted.requests[-1]
        assert generation.stand_ins == dict.fromkeys(generation.media, UNSEEN)
        assert len(generation.media) == 1


@pytest.mark.parametrize(
    ("roles", "spare"),
    [
        ("u", [False]),
        ("uau", [True, None, False]),
        ("uu", [False, False]),
        ("uat", [True, None, True]),
        ("ua", [False, None]),
        ("uaua", [True, None, False, None]),
        ("uaut", [True, None, False, True]),
        ("su", [True, False]),
    ],
)
def test_which_pictures_are_of_the_last_question(
    url: str, models: ScriptedModels, roles: str, spare: list[bool | None]
) -> None:
    names = {"u": "user", "a": "assistant", "t": "tool", "s": "system"}
    messages = [
        {"role": names[role], "content": "x" if role == "a" else [picture("/v1/chat/completions")]} for role in roles
    ]
    messages_of(url, models, "/v1/chat/completions", {"messages": messages})
    generation = models.scripted.requests[-1]
    assert [mark in generation.stand_ins for mark in generation.media] == [own for own in spare if own is not None]
