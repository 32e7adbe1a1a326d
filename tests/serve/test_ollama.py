"""Test Ollama's API with its official client, streamed and not."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from edge.models.demo import MODEL_PATH
from edge.serve.apis.fields import Fields
from edge.serve.apis.history import PastFunction
from edge.serve.app import create_app
from edge.serve.model_files import ModelFacts
from edge.serve.ollama import fields
from edge.serve.options import ServeOptions
from tests.serve.scripted import ScriptedModels
from tests.serve.serving import serving

if TYPE_CHECKING:
    from ollama import Client

NAME = MODEL_PATH.stem
HI: Any = [{"role": "user", "content": "What is 27 plus 38?"}]
GREEDY = {"temperature": 0, "num_predict": 40}
SCHEMA: Any = {
    "type": "object",
    "properties": {"city": {"enum": ["Oslo", "Rome"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
WEATHER: Any = {"type": "function", "function": {"name": "weather", "description": "Tell it.", "parameters": SCHEMA}}
HERMES = "{% if tools %}<tool_call>{% endif %} tool_calls"
THINKS = "{% if enable_thinking %}<think>{% endif %}</think>"


@pytest.fixture(scope="module")
def ollama(server: str) -> Iterator[Client]:
    from ollama import Client

    with Client(server, timeout=300) as client:
        yield client


@pytest.fixture
def models() -> ScriptedModels:
    return ScriptedModels()


@pytest.fixture
def scripted(models: ScriptedModels) -> Iterator[Client]:
    """A client of a model that says what a test wrote down."""
    from ollama import Client

    with serving(create_app(models, ServeOptions())) as address, Client(address, timeout=60) as client:
        yield client


def test_no_field_of_the_official_client_is_unknown() -> None:
    from ollama import _types as theirs

    pairs: list[tuple[type[Fields], Any]] = [
        (fields.OllamaChatRequest, theirs.ChatRequest),
        (fields.OllamaTextRequest, theirs.GenerateRequest),
        (fields.Options, theirs.Options),
        (fields.OllamaMessage, theirs.Message),
        (PastFunction, theirs.Message.ToolCall.Function),
        (fields.EmbedRequest, theirs.EmbedRequest),
        (fields.OldEmbedRequest, theirs.EmbeddingsRequest),
        (fields.NamedRequest, theirs.ShowRequest),
        (fields.NamedRequest, theirs.PullRequest),
    ]
    for ours, own in pairs:
        known = set(ours.model_fields) | set(ours.refused) | ours.ignored
        assert not set(own.model_fields) - known, ours


@pytest.mark.parametrize("model", [NAME, f"{NAME}:latest"])
def test_a_chat(ollama: Client, model: str) -> None:
    reply = ollama.chat(model, HI, options=GREEDY)
    assert "65" in (reply.message.content or "")
    assert (reply.message.role, reply.done, reply.done_reason) == ("assistant", True, "stop")
    assert reply.prompt_eval_count
    assert reply.eval_count
    assert reply.load_duration is not None
    assert reply.prompt_eval_duration
    assert reply.eval_duration
    assert reply.total_duration
    # Nanoseconds: the parts are no longer than the whole, which is no second of them.
    parts = reply.load_duration + reply.prompt_eval_duration + reply.eval_duration
    assert 1_000_000 < parts <= reply.total_duration
    lines = list(ollama.chat(model, HI, options=GREEDY, stream=True))
    assert "".join(line.message.content or "" for line in lines) == reply.message.content
    assert [line.done for line in lines] == [False] * (len(lines) - 1) + [True]
    assert lines[-1].eval_count == reply.eval_count


def test_durations_are_in_nanoseconds(scripted: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock that goes on by a second whenever it is read: arrived, loaded, first token, end."""
    ticks = itertools.count(0, 10**9)
    monkeypatch.setattr("edge.serve.ollama.answers._clock", lambda: next(ticks))
    monkeypatch.setattr("edge.serve.ollama.fields._clock", lambda: next(ticks))
    reply = scripted.generate("scripted", "Hi")
    assert reply.prompt_eval_count == 7
    durations = (reply.load_duration, reply.prompt_eval_duration, reply.eval_duration, reply.total_duration)
    assert durations == (10**9, 10**9, 10**9, 3 * 10**9)


def test_a_text(ollama: Client) -> None:
    whole = ollama.generate(NAME, "What is 27 plus 38?", options=GREEDY)
    assert "65" in whole.response
    assert whole.response == ollama.chat(NAME, HI, options=GREEDY).message.content  # by the template
    lines = list(ollama.generate(NAME, "What is 27 plus 38?", options=GREEDY, stream=True))
    assert "".join(line.response or "" for line in lines) == whole.response
    raw = ollama.generate(NAME, "What is 27 plus 38?", raw=True, options=GREEDY)
    assert raw.prompt_eval_count
    assert whole.prompt_eval_count
    assert raw.prompt_eval_count < whole.prompt_eval_count


def test_a_system_prompt(ollama: Client) -> None:
    with_system = ollama.generate(NAME, "Hi", system="Be brief. " * 9, options=GREEDY)
    assert (with_system.prompt_eval_count or 0) > 9 + (
        ollama.generate(NAME, "Hi", options=GREEDY).prompt_eval_count or 0
    )


def test_options_change_the_answer(scripted: Client, models: ScriptedModels) -> None:
    penalties = {"repeat_penalty": 1.5, "presence_penalty": 0.5, "frequency_penalty": 0.25}
    filters = {"temperature": 0.5, "top_k": 7, "top_p": 0.25, "min_p": 0.125, "typical_p": 0.5}
    options: dict[str, Any] = {**filters, **penalties, "seed": 9, "stop": ["x"], "num_predict": 5.0}
    reply = scripted.chat("scripted", HI, options=options)
    del options["num_predict"]
    assert models.scripted.requests[-1].sampling == options
    assert (reply.message.content, reply.done_reason) == ("Hello", "length")
    scripted.chat("scripted", HI, options={"seed": -1, "num_predict": -1})
    assert models.scripted.requests[-1].sampling == {"temperature": 0.8, "top_k": 40, "top_p": 0.9, "min_p": 0.0}
    assert models.scripted.requests[-1].max_tokens is None


def test_null_is_as_nothing(models: ScriptedModels) -> None:
    models.scripted.template = HERMES
    call = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": None}}]}
    with serving(create_app(models, ServeOptions())) as url:
        body: Any = {"messages": [*HI, call, *HI], "options": None, "stream": False}
        assert httpx.post(f"{url}/api/chat", json=body).status_code == 200
        [request] = models.scripted.requests
        assert request.sampling == {"temperature": 0.8, "top_k": 40, "top_p": 0.9, "min_p": 0.0}
        assert (request.messages or ())[1]["tool_calls"][0]["function"]["arguments"] == {}
        for path, body in (("/api/chat", {"messages": None}), ("/api/generate", {"prompt": None})):
            assert httpx.post(url + path, json={**body, "stream": False}).json()["done_reason"] == "load"
    assert len(models.scripted.requests) == 1


def test_a_context_that_the_server_lacks_is_told(server: str) -> None:
    request = {"model": NAME, "messages": HI, "stream": False, "options": {**GREEDY, "num_ctx": 1024}}
    assert "num_ctx" not in httpx.post(f"{server}/api/chat", json=request).json()
    request["options"] = {**GREEDY, "num_ctx": 4096}
    assert httpx.post(f"{server}/api/chat", json=request).json()["num_ctx"] == 1024


def test_answers_in_json(ollama: Client) -> None:
    for stream in (False, True):
        request: Any = {"format": SCHEMA, "options": {"num_predict": 200, "seed": 1}, "stream": stream}
        reply = ollama.chat(NAME, HI, **request)
        text = "".join(line.message.content or "" for line in reply) if stream else reply.message.content
        value = json.loads(text)
        assert value["city"] in ("Oslo", "Rome")
        assert 1 <= value["days"] <= 9
    text = ollama.generate(NAME, "Hi", format="json", options={"num_predict": 60, "seed": 1}).response
    assert text.lstrip().startswith("{")


@pytest.mark.parametrize("stream", [False, True])
def test_calls_come_whole_with_their_arguments_as_an_object(
    scripted: Any, models: ScriptedModels, stream: bool
) -> None:
    model = models.scripted
    model.template = HERMES
    model.says = 'Well.<tool_call>{"name": "weather", "arguments": {"city": "Oslo", "days": 2}}</tool_call>' * 2
    reply: Any = scripted.chat("scripted", HI, tools=[WEATHER], stream=stream)
    lines = list(reply) if stream else [reply]
    called = [call for line in lines for call in line.message.tool_calls or ()]
    assert [(call.function.name, call.function.arguments) for call in called] == [
        ("weather", {"city": "Oslo", "days": 2})
    ] * 2
    assert "".join(line.message.content or "" for line in lines) == "Well.Well."
    assert lines[-1].done_reason == "stop"


def test_a_call_that_breaks_is_text(scripted: Client, models: ScriptedModels) -> None:
    model = models.scripted
    model.template, model.says = HERMES, '<tool_call>{"name": "weather", "arguments": {"city": "Os'
    lines = list(scripted.chat("scripted", HI, tools=[WEATHER], stream=True))
    assert not [line for line in lines if line.message.tool_calls]
    assert "".join(line.message.content or "" for line in lines) == model.says


def test_results_of_calls_find_their_calls(scripted: Client, models: ScriptedModels) -> None:
    """Clients of Ollama name functions, and know no ids, which templates ask for."""
    models.scripted.template = HERMES
    two: Any = [{"function": {"name": name, "arguments": {}}} for name in ("first", "second")]
    results: Any = [{"role": "tool", "content": name, "tool_name": name} for name in ("second", "first")]
    scripted.chat("scripted", [*HI, {"role": "assistant", "tool_calls": two}, *results], tools=[WEATHER])
    _, called, second, first = models.scripted.requests[-1].messages or ()
    ids = [call["id"] for call in called["tool_calls"]]
    assert len(set(ids)) == 2
    assert [first["tool_call_id"], second["tool_call_id"]] == ids
    assert (first["name"], second["content"]) == ("first", "second")


@pytest.mark.parametrize("stream", [False, True])
def test_thoughts_come_apart(scripted: Any, models: ScriptedModels, stream: bool) -> None:
    model = models.scripted
    model.template, model.thinks, model.says = THINKS, "Hmm.", "Yes."
    reply: Any = scripted.chat("scripted", HI, think=True, stream=stream)
    lines = list(reply) if stream else [reply]
    assert "".join(line.message.thinking or "" for line in lines) == "Hmm."
    assert "".join(line.message.content or "" for line in lines) == "Yes."
    text = scripted.generate("scripted", "Hi", think="low")
    assert (text.thinking, text.response) == ("Hmm.", "Yes.")
    assert [request.think for request in model.requests] == [-1, 1024]
    scripted.chat("scripted", HI, think=False)
    scripted.chat("scripted", HI)
    assert [request.think for request in model.requests[2:]] == [0, None]


def test_model_that_cannot_think_answers(ollama: Client) -> None:
    for think in (True, False, "high"):
        assert "65" in (ollama.chat(NAME, HI, think=think, options=GREEDY).message.content or "")


def test_embeddings(ollama: Client) -> None:
    both = ollama.embed(NAME, ["one text", "another"])
    assert len(both.embeddings) == 2
    assert sum(value * value for value in both.embeddings[0]) == pytest.approx(1, abs=1e-5)
    assert ollama.embed(NAME, "one text").embeddings[0] == pytest.approx(both.embeddings[0], abs=1e-5)
    assert ollama.embeddings(NAME, "one text").embedding == pytest.approx(both.embeddings[0], abs=1e-5)
    assert both.prompt_eval_count
    assert not ollama.embed(NAME, []).embeddings


def test_an_adapter_makes_no_embeddings(
    scripted: Client, models: ScriptedModels, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ollama import ResponseError

    class Adapters:
        names = ("ada",)

    monkeypatch.setattr(models, "adapters", lambda name: Adapters())
    with pytest.raises(ResponseError, match="is an adapter"):
        scripted.embed("ada", "one text")
    with pytest.raises(ResponseError, match="is an adapter"):
        scripted.embeddings("ada", "one text")


def test_numbers_that_json_lacks_are_left_out_of_a_models_description(
    models: ScriptedModels, scripted: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    odd = {"a": float("inf"), "b": float("-inf"), "c": float("nan"), "d": 1.5, "e": 2, "f": True, "g": "inf"}
    monkeypatch.setattr(models, "file", lambda name: ModelFacts(1_700_000_000, 10, parameters=7, metadata=odd))
    shown = scripted.show("scripted").modelinfo
    assert shown == {"d": 1.5, "e": 2, "f": True, "g": "inf", "general.parameter_count": 7}
    assert [model.model for model in scripted.list().models] == ["scripted:latest"]


def test_only_model_is_shown_under_any_name(ollama: Client) -> None:
    assert ollama.show("gone").modelinfo == ollama.show(NAME).modelinfo
    assert ollama.chat("gone", HI, options={"num_predict": 1}).model == NAME


def test_which_models_there_are(ollama: Client) -> None:
    [listed] = ollama.list().models
    assert listed.model == f"{NAME}:latest"
    assert listed.size == MODEL_PATH.stat().st_size
    assert listed.details
    assert (listed.details.family, listed.details.quantization_level) == ("llama", "Q8_0")
    shown = ollama.show(listed.model)
    assert shown.modelinfo
    assert shown.modelinfo["llama.context_length"] == 1024
    assert shown.capabilities == ["completion"]
    assert shown.template
    assert "role" in shown.template
    ollama.generate(NAME)  # loads it
    [loaded] = ollama.ps().models
    assert (loaded.model, loaded.context_length) == (listed.model, 4096)
    assert loaded.expires_at
    assert loaded.expires_at.year == 9999


def test_what_is_not_done_is_refused_in_words(ollama: Client, server: str) -> None:
    from ollama import ResponseError

    refused = [
        (400, "--mmproj", lambda: ollama.generate(NAME, "Hi", images=[b"picture"])),
        (400, "--mmproj", lambda: ollama.chat(NAME, [{**HI[0], "images": [b"picture"]}])),
        (400, "template", lambda: ollama.generate(NAME, "Hi", template="{{ .Prompt }}")),
        (400, "context", lambda: ollama.generate(NAME, "Hi", context=[1, 2])),
        (400, "keep_alive", lambda: ollama.generate(NAME, "Hi", keep_alive="soon")),
        (403, "--allow-pull", lambda: ollama.pull("gone", stream=False)),
        (403, "models are files", lambda: ollama.create("new", from_=NAME, stream=False)),
        (403, "models are files", lambda: ollama.copy(NAME, "new")),
        (403, "publishes", lambda: ollama.push(NAME, stream=False)),
        (403, "models are files", lambda: ollama.delete(NAME)),
    ]
    for status, words, ask in refused:
        with pytest.raises(ResponseError, match=words) as error:
            ask()
        assert error.value.status_code == status
    with pytest.raises(ResponseError, match="--allow-pull"):
        list(ollama.pull("gone", stream=True))
    assert httpx.post(f"{server}/api/chat", content="{").json()["error"].startswith("Invalid JSON")
    assert set(httpx.get(f"{server}/api/nothing").json()) == {"error"}


@pytest.mark.parametrize("stream", [False, True])
def test_models_are_fetched(scripted: Any, models: ScriptedModels, stream: bool) -> None:
    models.fetched = []
    for name in ("hf.co/owner/name:Q4_K_M", "known:latest"):
        lines = scripted.pull(name, stream=stream)
        assert [line.status for line in lines][-1] == "success" if stream else lines.status == "success"
    assert models.fetched == ["owner/name:Q4_K_M", "known"]


def test_a_stream_that_fails_ends_with_its_error(scripted: Client, models: ScriptedModels) -> None:
    from ollama import ResponseError

    from edge.errors import EngineGone

    models.scripted.fails = EngineGone("it ended")
    with pytest.raises(ResponseError, match="it ended"):
        list(scripted.chat("scripted", HI, stream=True))


def test_it_is_there(server: str) -> None:
    for method in ("GET", "HEAD"):
        assert httpx.request(method, f"{server}/").status_code == 200
    assert "text/html" in httpx.get(f"{server}/", headers={"Accept": "text/html,*/*"}).headers["content-type"]
    assert httpx.get(f"{server}/").text == "Ollama is running"
    version = httpx.get(f"{server}/api/version").json()["version"]
    assert tuple(map(int, version.split("."))) > (0, 6, 4)


@pytest.mark.parametrize(
    ("keep_alive", "expected"),
    [("5m", 300.0), ("1h30m", 5400.0), (7, 7.0), (0, 0.0), ("0", 0.0), (-1, float("inf")), ("-1m", float("inf"))],
)
def test_for_how_long_a_model_stays(
    scripted: Client, models: ScriptedModels, keep_alive: str | float, expected: float
) -> None:
    asks: list[Callable[..., Any]] = [
        lambda **more: scripted.chat("scripted", HI, **more),
        lambda **more: scripted.chat("scripted", [], **more),  # loads or unloads the model
        lambda **more: scripted.generate("scripted", "Hi", **more),
        lambda **more: scripted.generate("scripted", "", **more),
        lambda **more: scripted.embed("scripted", "", **more),
        lambda **more: scripted.embed("scripted", [], **more),
        lambda **more: scripted.embeddings("scripted", "", **more),
    ]
    for ask in asks:
        ask(keep_alive=keep_alive)
        assert models.kept_s == expected
        ask()
        assert models.kept_s is None
