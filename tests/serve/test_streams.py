"""Test the streams of all APIs: the order of events, the resulting answers, failures, and readers that disconnect."""

import asyncio
import json
import socket
from collections.abc import Iterator
from contextlib import suppress
from http.client import HTTPConnection
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from edge.errors import (
    ConstraintUnavailable,
    ContextFull,
    EdgeError,
    EngineGone,
    NotEnoughMemory,
    Overloaded,
    SamplingError,
    TemplateError,
)
from edge.serve.app import create_app
from edge.serve.http import generating
from edge.serve.options import ServeOptions
from edge.text.templates.formats import FORMATS, CallFormat
from edge.text.templates.writing import written_calls
from tests.serve.scripted import Scripted, ScriptedModels
from tests.serve.serving import events_of, serving
from tests.support.helpers import until

CHAT, COMPLETIONS, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"
HI = [{"role": "user", "content": "Hi"}]
SCHEMA = {"type": "object", "properties": {"x": {"type": "integer"}, "y": {"type": "string"}}}
ASK: dict[str, dict[str, Any]] = {
    CHAT: {"messages": HI},
    COMPLETIONS: {"prompt": "Hi", "max_tokens": 500},
    RESPONSES: {"input": "Hi"},
    MESSAGES: {"messages": HI, "max_tokens": 500},
}
TOOLS: dict[str, dict[str, Any]] = {
    CHAT: {"tools": [{"type": "function", "function": {"name": "f", "parameters": SCHEMA}}]},
    RESPONSES: {"tools": [{"type": "function", "name": "f", "parameters": SCHEMA}]},
    MESSAGES: {"tools": [{"name": "f", "input_schema": SCHEMA}]},
}
OTHERS = list({form.name: form for form in reversed(FORMATS) if form.name != "hermes"}.values())
CALL = 'Wait.\n<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>'
every_api = pytest.mark.parametrize("path", ASK)


@pytest.fixture(scope="module")
def models() -> ScriptedModels:
    return ScriptedModels()


@pytest.fixture(scope="module")
def url(models: ScriptedModels) -> Iterator[str]:
    with serving(create_app(models, ServeOptions(ping_s=0.05))) as address:
        yield address


@pytest.fixture
def model(models: ScriptedModels) -> Scripted:
    models.scripted = Scripted()
    return models.scripted


def post(url: str, path: str, **fields: Any) -> httpx.Response:
    return httpx.post(url + path, json={**ASK[path], **fields}, timeout=60)


def stream(url: str, path: str, **fields: Any) -> list[dict[str, Any]]:
    reply = post(url, path, stream=True, **fields)
    assert reply.status_code == 200
    assert reply.headers["content-type"].startswith("text/event-stream")
    return events_of(reply.text)


def test_a_chat(url: str, model: Scripted) -> None:
    reply = stream(url, CHAT, stream_options={"include_usage": True})
    deltas = [chunk["choices"][0]["delta"] for chunk in reply if chunk["choices"]]
    assert deltas[0] == {"role": "assistant", "content": ""}
    assert "".join(delta.get("content", "") for delta in deltas) == model.says
    assert [chunk["choices"][0]["finish_reason"] for chunk in reply[:-1]] == [None] * (len(reply) - 2) + ["stop"]
    assert reply[-1]["choices"] == []
    assert reply[-1]["usage"] == {
        "prompt_tokens": 7,
        "completion_tokens": len(model.says),
        "total_tokens": 7 + len(model.says),
        "prompt_tokens_details": {"cached_tokens": 3},
        "completion_tokens_details": {"reasoning_tokens": 0},
    }
    assert len({chunk["id"] for chunk in reply}) == 1
    assert all("usage" not in chunk for chunk in stream(url, CHAT))


@every_api
def test_a_stream_ends_as_its_api_says(url: str, model: Scripted, path: str) -> None:
    text = post(url, path, stream=True).text
    assert text.rstrip().endswith("data: [DONE]") == (path in (CHAT, COMPLETIONS))


def test_a_response(url: str, model: Scripted) -> None:
    model.says = CALL
    reply = stream(url, RESPONSES, **TOOLS[RESPONSES])
    assert [event["sequence_number"] for event in reply] == list(range(len(reply)))
    kinds = [event["type"].removeprefix("response.") for event in reply]
    texts, arguments = kinds.count("output_text.delta"), kinds.count("function_call_arguments.delta")
    assert arguments > 1
    assert kinds == [
        *("created", "in_progress", "output_item.added", "content_part.added"),
        *(["output_text.delta"] * texts),
        *("output_text.done", "content_part.done", "output_item.done"),
        *("output_item.added", *["function_call_arguments.delta"] * arguments),
        *("function_call_arguments.done", "output_item.done"),
        "completed",
    ]
    whole = reply[-1]["response"]
    assert whole["output"][0]["content"][0]["text"] == "Wait.\n"
    assert (whole["output"][1]["name"], whole["output"][1]["arguments"]) == ("f", '{"x": 1}')
    assert reply[0]["response"]["output"] == []
    assert whole["usage"]["input_tokens_details"]["cached_tokens"] == 3


def test_a_message(url: str, model: Scripted) -> None:
    model.says = CALL
    reply = stream(url, MESSAGES, **TOOLS[MESSAGES])
    assert reply[0]["message"]["usage"] == {
        "input_tokens": 4,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 3,
        "output_tokens": 0,
    }
    rest = [(event["type"], event.get("index")) for event in reply[1:] if event["type"] != "ping"]
    begin, more, end = "content_block_start", "content_block_delta", "content_block_stop"
    texts, arguments = rest.count((more, 0)), rest.count((more, 1))
    assert arguments > 1
    assert rest == [
        *[(begin, 0), *[(more, 0)] * texts, (end, 0)],
        *[(begin, 1), *[(more, 1)] * arguments, (end, 1)],
        *[("message_delta", None), ("message_stop", None)],
    ]
    assert reply[-2]["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
    assert reply[-2]["usage"]["output_tokens"] == len(CALL)


def plain(value: Any) -> Any:
    """Without identifiers and times, which differ from answer to answer."""
    if isinstance(value, dict):
        left_out = {"id", "created", "created_at", "completed_at", "call_id", "item_id"}
        return {key: plain(item) for key, item in value.items() if key not in left_out}
    return [plain(item) for item in value] if isinstance(value, list) else value


def pieces_of_calls(path: str, events: list[dict[str, Any]]) -> list[str]:
    """The arguments in the events of a stream, piece by piece."""
    if path == CHAT:
        calls = [
            call for event in events for choice in event["choices"] for call in choice["delta"].get("tool_calls", ())
        ]
        return [call["function"]["arguments"] for call in calls if "id" not in call]
    if path == MESSAGES:
        deltas = [event["delta"] for event in events if event["type"] == "content_block_delta"]
        return [delta["partial_json"] for delta in deltas if "partial_json" in delta]
    return [event["delta"] for event in events if event["type"] == "response.function_call_arguments.delta"]


def texts_of(path: str, events: list[dict[str, Any]]) -> str:
    if path == CHAT:
        return "".join(choice["delta"].get("content", "") for event in events for choice in event["choices"])
    if path == MESSAGES:
        deltas = [event["delta"] for event in events if event["type"] == "content_block_delta"]
        return "".join(delta.get("text", "") for delta in deltas)
    return "".join(event["delta"] for event in events if event["type"] == "response.output_text.delta")


@pytest.mark.parametrize("path", TOOLS)
def test_calls_are_as_many_as_a_request_allows(url: str, model: Scripted, path: str) -> None:
    model.says = CALL * 2
    for n_calls, parallel in ((2, None), (2, True), (1, False)):
        fields: dict[str, Any] = {"parallel_tool_calls": parallel}
        if path == MESSAGES:
            choice = {"type": "auto", "disable_parallel_tool_use": None if parallel is None else not parallel}
            fields = {"tool_choice": choice}
        reply = post(url, path, **TOOLS[path], **fields).json()
        answer = {CHAT: "choices", RESPONSES: "output", MESSAGES: "content"}[path]
        assert json.dumps(reply[answer]).count('"name": "f"') == n_calls
        assert model.answers[-1].sent_tokens == len(CALL) * 2 if n_calls == 2 else len(CALL)


@pytest.mark.parametrize("path", TOOLS)
@pytest.mark.parametrize("form", OTHERS, ids=[form.name for form in OTHERS])
def test_arguments_stream_in_every_format(url: str, model: Scripted, path: str, form: CallFormat) -> None:
    model.says = written_calls(form, [("f", {"x": 1, "y": "Zürich"}), ("f", {})])
    model.template = " ".join(("tools tool_calls", *form.signs))
    pieces = pieces_of_calls(path, stream(url, path, **TOOLS[path]))
    assert "".join(pieces) == '{"x": 1, "y": "Zürich"}{}'
    assert len(pieces) > 3


@pytest.mark.parametrize("path", TOOLS)
def test_a_call_that_breaks_while_it_streams_stays_incomplete(url: str, model: Scripted, path: str) -> None:
    """And is text, all of it, where nothing was sent yet."""
    broken = '<tool_call>{"name": "f", "arguments": {"x": 1, "y": tru}}</tool_call>'
    model.says = f"{CALL}{broken}"
    events = stream(url, path, **TOOLS[path])
    assert "".join(pieces_of_calls(path, events)) == '{"x": 1}{"x": 1, "y": '
    assert texts_of(path, events) == "Wait.\n tru}}</tool_call>"
    whole = post(url, path, **TOOLS[path]).json()
    if path == CHAT:
        assert [event["choices"][0]["finish_reason"] for event in events][-1] == "stop"
        message = whole["choices"][0]["message"]
        assert (message["content"], len(message["tool_calls"])) == (f"Wait.\n{broken}", 1)
        assert whole["choices"][0]["finish_reason"] == "stop"
    elif path == MESSAGES:
        assert events[-2]["delta"]["stop_reason"] == "end_turn"
        assert [block["type"] for block in whole["content"]] == ["text", "tool_use", "text"]
    else:
        calls = [item for item in events[-1]["response"]["output"] if item["type"] == "function_call"]
        assert [item["status"] for item in calls] == ["completed", "incomplete"]
        assert [item["type"] for item in whole["output"]] == ["message", "function_call", "message"]


@pytest.mark.parametrize("path", TOOLS)
def test_a_call_that_is_cut_while_it_streams_says_so(url: str, model: Scripted, path: str) -> None:
    model.says = CALL
    limit = {"max_output_tokens" if path == RESPONSES else "max_tokens": CALL.index("1}") + 1}
    events = stream(url, path, **TOOLS[path], **limit)
    # A number is not known to be whole before something follows it.
    assert "".join(pieces_of_calls(path, events)) == '{"x": '
    last = {
        CHAT: lambda: events[-1]["choices"][0]["finish_reason"],
        MESSAGES: lambda: events[-2]["delta"]["stop_reason"],
    }
    assert last.get(path, lambda: events[-1]["response"]["status"])() in ("length", "max_tokens", "incomplete")


@pytest.mark.parametrize("path", TOOLS)
@pytest.mark.parametrize(
    ("says", "template"),
    [
        *((says, "") for says in ("Hello.", CALL, CALL.removeprefix("Wait.\n"), CALL + CALL, "")),
        *(
            (f"{written_calls(form, [('f', {'x': 1}), ('f', {'x': -2, 'y': '{'})])}", " ".join(("tools", *form.signs)))
            for form in OTHERS
        ),
    ],
    ids=["text", "text and call", "call", "calls", "nothing", *(form.name for form in OTHERS)],
)
def test_the_clients_make_of_a_stream_what_the_response_is(
    url: str, model: Scripted, path: str, says: str, template: str
) -> None:
    """The fold here is not ours: it is the one of the APIs' own clients."""
    anthropic = pytest.importorskip("anthropic")
    openai = pytest.importorskip("openai")
    model.says, model.template = says, template
    fields = {"model": model.name, **ASK[path], **TOOLS[path]}
    ours = post(url, path, **TOOLS[path]).json()
    if path == MESSAGES:
        with anthropic.Anthropic(base_url=url, api_key="none") as client, client.messages.stream(**fields) as reply:
            theirs = reply.get_final_message().model_dump(mode="json")
        keys: tuple[str, ...] = ("content", "stop_reason", "stop_sequence")
        assert [cut(block, ours["content"][n]) for n, block in enumerate(theirs["content"])] == plain(ours["content"])
        assert [theirs[key] for key in keys[1:]] == [ours[key] for key in keys[1:]]
        return
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none") as client:
        if path == CHAT:
            with client.chat.completions.stream(**fields) as reply:
                theirs = reply.get_final_completion().model_dump(mode="json")["choices"][0]
            ours = ours["choices"][0]
            assert theirs["finish_reason"] == ours["finish_reason"]
            assert (theirs["message"]["content"] or "") == (ours["message"]["content"] or "")
            calls = [
                (item["function"]["name"], json.loads(item["function"]["arguments"]))
                for item in theirs["message"]["tool_calls"] or ()
            ]
            assert calls == [
                (item["function"]["name"], json.loads(item["function"]["arguments"]))
                for item in ours["message"].get("tool_calls", ())
            ]
        else:
            with client.responses.stream(**fields) as reply:
                theirs = reply.get_final_response().model_dump(mode="json")
            assert [cut(item, ours["output"][n]) for n, item in enumerate(theirs["output"])] == plain(ours["output"])


def cut(theirs: Any, ours: Any) -> Any:
    """Return the keys that we sent of what a client made: clients add some of their own."""
    if isinstance(ours, dict):
        return plain({key: cut(theirs[key], our) for key, our in ours.items()})
    return [cut(a, b) for a, b in zip(theirs, ours, strict=True)] if isinstance(ours, list) else theirs


@every_api
def test_why_an_answer_ended(url: str, model: Scripted, path: str) -> None:
    limit = {RESPONSES: "max_output_tokens"}.get(path, "max_tokens")

    def reason(**fields: Any) -> Any:
        reply = post(url, path, **fields).json()
        if path == RESPONSES:
            return (reply["status"], reply["incomplete_details"])
        return (
            (reply["stop_reason"], reply["stop_sequence"]) if path == MESSAGES else reply["choices"][0]["finish_reason"]
        )

    usual, short = reason(), reason(**{limit: 3})
    model.stop_string = "."
    stopped = reason()
    if path == RESPONSES:
        assert usual == stopped == ("completed", None)
        assert short == ("incomplete", {"reason": "max_output_tokens"})
    elif path == MESSAGES:
        assert (usual, short, stopped) == (("end_turn", None), ("max_tokens", None), ("stop_sequence", "."))
    else:
        assert (usual, short, stopped) == ("stop", "length", "stop")


@every_api
def test_an_answer_that_repeats_itself_is_cut_and_says_why(url: str, model: Scripted, path: str) -> None:
    """The reason is one that the clients' types have; the true one is beside it."""
    assert "ended_by" not in post(url, path).text
    model.ending = "repetition"
    reply, events = post(url, path).json(), stream(url, path)
    if path == RESPONSES:
        pytest.importorskip("openai").types.responses.Response.model_validate(reply)
        assert (reply["status"], reply["ended_by"]) == ("incomplete", "repetition")
        assert events[-1]["response"]["ended_by"] == "repetition"
    elif path == MESSAGES:
        pytest.importorskip("anthropic").types.Message.model_validate(reply)
        assert (reply["stop_reason"], reply["ended_by"]) == ("max_tokens", "repetition")
        assert events[-2]["delta"]["ended_by"] == "repetition"
    else:
        types = pytest.importorskip("openai").types
        (types.chat.ChatCompletion if path == CHAT else types.Completion).model_validate(reply)
        for choice in (reply["choices"][0], events[-1]["choices"][0]):
            assert (choice["finish_reason"], choice["ended_by"]) == ("length", "repetition")


@every_api
def test_samplers_and_the_switch_for_repetition_reach_the_engine(url: str, model: Scripted, path: str) -> None:
    fields = {
        "typical_p": 0.9,
        "dry_multiplier": 0.8,
        "dry_base": 2.0,
        "dry_allowed_length": 3,
        "dry_penalty_last_n": 64,
        "dry_sequence_breakers": ["\n"],
        "xtc_probability": 0.5,
        "xtc_threshold": 0.2,
        "allow_repetition": True,
    }
    assert post(url, path, **fields).status_code == 200
    assert {name: model.requests[-1].sampling.get(name) for name in fields} == fields
    assert post(url, path, dry_sequence_breakers=5).status_code == 400
    assert post(url, path).status_code == 200
    assert not fields.keys() & model.requests[-1].sampling.keys()


@every_api
def test_several_answers_are_several_generations(url: str, model: Scripted, path: str) -> None:
    if path in (RESPONSES, MESSAGES):
        assert "n is not supported" in post(url, path, n=3).text  # these APIs have none
        assert len(model.requests) == 0
        return
    reply = post(url, path, n=3, seed=4294967294, logit_bias={"5": -100}).json()
    assert [choice["index"] for choice in reply["choices"]] == [0, 1, 2]
    assert [item.sampling["seed"] for item in model.requests] == [4294967294, 0, 1]
    assert model.requests[0].sampling["logit_bias"] == {5: -100.0}
    assert reply["usage"]["prompt_tokens"] == 7
    assert reply["usage"]["completion_tokens"] == 3 * len(model.says)
    if path == COMPLETIONS:
        reply = post(url, path, n=2, prompt=["a", "b", "c"]).json()
        assert [item.prompt for item in model.requests[3:]] == ["a", "a", "b", "b", "c", "c"]
        assert reply["usage"]["prompt_tokens"] == 21
        assert post(url, path, prompt=[[1, 2], [3]]).json()["choices"][1]["index"] == 1
        assert [list(item.prompt or ()) for item in model.requests[9:]] == [[1, 2], [3]]


def test_probabilities(url: str, model: Scripted) -> None:
    model.says = "é!"
    token = {"token": "é", "logprob": -0.5, "bytes": [195, 169]}
    other = {"token": "\ufffd", "logprob": -9999.0, "bytes": [255]}
    chat = post(url, CHAT, logprobs=True, top_logprobs=1).json()["choices"][0]["logprobs"]["content"]
    assert chat[0] == {**token, "top_logprobs": [other]}
    assert len(chat) == 2
    assert post(url, CHAT).json()["choices"][0]["logprobs"] is None
    text = post(url, COMPLETIONS, logprobs=1).json()["choices"][0]["logprobs"]
    assert text == {
        "tokens": ["é", "!"],
        "token_logprobs": [-0.5, -0.5],
        "top_logprobs": [{"\ufffd": -9999.0}] * 2,
        "text_offset": [0, 1],
    }
    request = {"include": ["message.output_text.logprobs"], "top_logprobs": 1}
    reply = post(url, RESPONSES, **request).json()["output"][0]["content"][0]["logprobs"]
    assert reply == chat


@every_api
@pytest.mark.parametrize(
    ("error", "status", "again"),
    [
        (ContextFull("needs 2000 tokens, has 1024"), 400, False),
        (SamplingError("top_p must be from 0 to 1, got 2"), 400, False),
        (ConstraintUnavailable("this grammar was not compiled in 20 s: the machine is busy"), 503, True),
        (TemplateError("roles must alternate"), 400, False),
        (Overloaded("64 requests wait"), 429, True),
        (EngineGone("it was killed by signal 9"), 503, True),
        (NotEnoughMemory("needs 8 GiB, has 4"), 503, False),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else "",
)
def test_errors_have_the_status_and_the_form_of_the_api(
    url: str, model: Scripted, path: str, error: EdgeError, status: int, again: bool
) -> None:
    model.refuses = error
    for streamed in (False, True):
        reply = post(url, path, stream=streamed)
        assert reply.status_code == status
        assert reply.json()["error"]["message"] == str(error)
        assert ("type" in reply.json()) == (path == MESSAGES)
        assert ("retry-after" in reply.headers) == again
        if isinstance(error, ContextFull) and path != MESSAGES:
            assert reply.json()["error"]["code"] == "context_length_exceeded"


@every_api
def test_a_stream_that_fails_ends_with_an_error(url: str, model: Scripted, path: str) -> None:
    model.fails = EngineGone("the engine was killed by signal 9")
    last = stream(url, path)[-1]
    if path == RESPONSES:
        assert (last["type"], last["message"], last["code"]) == ("error", str(model.fails), "engine_gone")
    else:
        assert last["error"]["message"] == str(model.fails)
        assert (last.get("type") == "error") == (path == MESSAGES)
    assert post(url, path).status_code == 503


@every_api
@pytest.mark.parametrize("streamed", [False, True])
def test_who_goes_ends_his_answer_alone(url: str, model: Scripted, path: str, streamed: bool) -> None:
    model.waits = True
    body = json.dumps({**ASK[path], "stream": streamed})
    stays, goes = (HTTPConnection(urlsplit(url).netloc, timeout=60) for _ in range(2))
    for number, connection in enumerate((stays, goes), 1):
        connection.request("POST", path, body)
        until(lambda n=number: len(model.answers) == n, "an answer to begin")  # type: ignore[misc]
    goes.close()
    until(model.answers[1].cancelled.is_set, "the answer to end")
    assert not model.answers[0].cancelled.is_set()
    stays.close()
    until(model.answers[0].cancelled.is_set, "the other answer to end")


@every_api
def test_there_are_signs_of_life_while_nothing_comes(url: str, model: Scripted, path: str) -> None:
    model.says, model.waits = "", True
    with httpx.stream("POST", url + path, json={**ASK[path], "stream": True}, timeout=60) as reply:
        assert reply.status_code == 200  # before anything is known of the answer
        expected = "event: ping" if path == MESSAGES else ": ping"
        assert any(line.startswith(expected) for line in reply.iter_lines())


@every_api
@pytest.mark.parametrize("fails", [False, True])
def test_there_are_signs_of_life_while_a_model_is_loading(
    url: str, model: Scripted, path: str, fails: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(generating, "STATUS_S", 0.0)
    model.loaded.clear()
    with httpx.stream("POST", url + path, json={**ASK[path], "stream": True}, timeout=60) as reply:
        assert reply.status_code == 200
        lines = reply.iter_lines()
        expected = "event: ping" if path == MESSAGES else ": ping"
        assert any(line.startswith(expected) for line in lines)
        assert model.requests == []
        model.refuses = NotEnoughMemory("needs 8 GiB, has 4") if fails else None
        model.loaded.set()
        last = [line for line in lines if line.startswith("data: {") and '"ping"' not in line][-1]
    assert ("needs 8 GiB, has 4" in last) == fails


def test_who_wants_no_stream_waits_until_the_model_is_loaded(
    url: str, model: Scripted, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(generating, "STATUS_S", 0.0)
    model.loaded.clear()
    with pytest.raises(httpx.ReadTimeout):  # not an error that it is not loaded yet
        httpx.post(url + CHAT, json=ASK[CHAT], timeout=httpx.Timeout(60, read=0.5))
    until(lambda: model.left == 1, "the request to end")


def test_who_goes_while_a_model_is_loading_is_not_answered(
    url: str, model: Scripted, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(generating, "STATUS_S", 0.0)
    model.loaded.clear()
    with httpx.stream("POST", url + CHAT, json={**ASK[CHAT], "stream": True}, timeout=60) as reply:
        next(reply.iter_raw())
    until(lambda: model.left == 1, "the request to end")
    model.loaded.set()
    post(url, CHAT)
    assert len(model.requests) == 1


def test_a_reader_that_takes_nothing_is_not_waited_for(
    url: str, model: Scripted, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(generating, "SEND_S", 0.2)
    model.says = "x" * 3_000_000  # more than all buffers on the way hold
    at = urlsplit(url)
    body = json.dumps({**ASK[CHAT], "stream": True}).encode()
    head = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
    with socket.create_connection((at.hostname, at.port), 60) as sock:
        sock.sendall(head.encode() + body)
        until(lambda: bool(model.answers), "an answer to begin")
        until(model.answers[0].cancelled.is_set, "the answer to end")
        assert model.answers[0].sent_tokens < len(model.says)


def test_who_is_gone_before_the_headers_ends_his_answer() -> None:
    models, body = ScriptedModels(), json.dumps({**ASK[CHAT], "stream": True}).encode()
    headers = [(b"host", b"localhost"), (b"content-length", str(len(body)).encode())]
    scope = {
        "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST", "scheme": "http",
        "path": CHAT, "raw_path": CHAT.encode(), "query_string": b"", "root_path": "", "headers": headers,
        "client": ("127.0.0.1", 1), "server": ("127.0.0.1", 80),
    }  # fmt: skip

    async def send(message: Any) -> None:
        raise OSError("the connection is gone")

    async def work() -> None:
        request = False

        async def receive() -> Any:
            nonlocal request
            if request:
                await asyncio.Event().wait()
            request = True
            return {"type": "http.request", "body": body, "more_body": False}

        with suppress(Exception):  # whatever the server makes of it
            await asyncio.wait_for(create_app(models, ServeOptions())(scope, receive, send), 60)

    asyncio.run(work())
    assert [answer.cancelled.is_set() for answer in models.scripted.answers] == [True]


def test_plans(url: str, models: ScriptedModels) -> None:
    plan = {"format": "edge-plan"}
    assert httpx.post(f"{url}/v1/plan", json={"plan": plan}).json() == {"status": "ok"}
    assert models.plans == [plan]
