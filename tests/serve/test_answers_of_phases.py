"""Test answers of several phases: thoughts, texts and calls in any order, in events and responses of each API."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterable, Sequence
from itertools import groupby, product
from typing import Any

import pytest

from edge.serve.apis.api import Api, Event
from edge.serve.apis.chat import CHAT
from edge.serve.apis.completions import COMPLETIONS
from edge.serve.apis.messages import MESSAGES
from edge.serve.apis.responses import RESPONSES
from edge.serve.deltas import Begin, Call, Delta, End, Text, Thought
from edge.serve.ollama.answers import CHAT as OLLAMA_CHAT
from edge.serve.served import Piece, TokenLogprob
from edge.serve.tools.parser import CallArguments, CallEnd

HI = [{"role": "user", "content": "Hi"}]
BODIES: dict[Api[Any], dict[str, Any]] = {
    CHAT: {"messages": HI, "logprobs": True},
    RESPONSES: {"input": "Hi", "include": ["message.output_text.logprobs"]},
    MESSAGES: {"messages": HI, "max_tokens": 99},
    OLLAMA_CHAT: {"messages": HI, "logprobs": True},
}
PHASES = [
    *product(("thought", "text", "call"), repeat=3),
    ("thought", "text", "call", "thought", "text", "call", "call", "text"),
]
Part = tuple[str, str]  # kind, and its text or the JSON of its arguments


def parts_of(phases: Sequence[str]) -> list[Part]:
    """The parts of an answer, each with a text of its own."""
    return [
        (kind, json.dumps({"n": place}) if kind == "call" else f"{kind}{place}") for place, kind in enumerate(phases)
    ]


def deltas_of(parts: Iterable[Part]) -> list[Delta]:
    """The deltas of an answer. Arguments come in two pieces, and each text has the token of its own name."""
    deltas: list[Delta] = [Begin(7, 3)]
    for place, (kind, text) in enumerate(parts):
        if kind == "thought":
            deltas.append(Thought(text))
        elif kind == "text":
            deltas.append(Text(text, (Piece(text, place, logprob=TokenLogprob(place, text.encode(), -0.5)),)))
        else:
            deltas += [Call(f"id{place}", "f"), CallArguments(text[:3]), CallArguments(text[3:]), CallEnd()]
    return [*deltas, End("stop", None, 5)]


def events_of(api: Api[Any], body: dict[str, Any], deltas: Iterable[tuple[int, Delta]]) -> list[Event]:
    async def stream() -> AsyncIterator[tuple[int, Delta]]:
        for delta in deltas:
            yield delta

    async def collected() -> list[Event]:
        return [event async for event in api.events(api.request.model_validate(body), "m", stream())]

    return asyncio.run(collected())


def response_of(api: Api[Any], phases: Sequence[str]) -> tuple[list[Event], Any]:
    """The events of an answer, and the response that they add up to."""
    deltas = [(0, delta) for delta in deltas_of(parts_of(phases))]
    events = events_of(api, BODIES[api], deltas)
    return events, api.fold(events_of(api, BODIES[api], deltas))  # a fold may change its events


def runs(phases: Sequence[str]) -> list[Part]:
    """The parts of an answer, with thoughts and texts joined to those before them."""
    joined: list[Part] = []
    for kind, same in groupby(parts_of(phases), lambda part: part[0]):
        texts = [text for _, text in same]
        joined += [(kind, text) for text in texts] if kind == "call" else [(kind, "".join(texts))]
    return joined


@pytest.mark.parametrize("phases", PHASES, ids="-".join)
def test_items_of_a_response_have_only_their_own_text_arguments_and_probabilities(phases: Sequence[str]) -> None:
    events, response = response_of(RESPONSES, phases)
    kinds = {"reasoning": "thought", "message": "text", "function_call": "call"}
    items = [
        (kinds[item["type"]], item["arguments"] if item["type"] == "function_call" else item["content"][0]["text"])
        for item in response["output"]
    ]
    assert items == runs(phases)
    for item in response["output"]:
        if item["type"] == "message":
            [part] = item["content"]
            assert "".join(token["token"] for token in part["logprobs"]) == part["text"]
    places = [(event["type"], event["output_index"]) for event in events if "output_item" in event["type"]]
    assert places == [
        (f"response.output_item.{end}", place) for place in range(len(items)) for end in ("added", "done")
    ]
    finished = [event for event in events if event["type"] == "response.output_text.done"]
    assert all("".join(token["token"] for token in event["logprobs"]) == event["text"] for event in finished)
    called = [event["arguments"] for event in events if event["type"] == "response.function_call_arguments.done"]
    assert called == [text for kind, text in runs(phases) if kind == "call"]


@pytest.mark.parametrize("phases", PHASES, ids="-".join)
def test_blocks_of_a_message_have_only_their_own_text_and_arguments(phases: Sequence[str]) -> None:
    events, response = response_of(MESSAGES, phases)
    blocks = [
        ("thought", block["thinking"]) if block["type"] == "thinking"
        else ("text", block["text"]) if block["type"] == "text"
        else ("call", json.dumps(block["input"]))
        for block in response["content"]
    ]  # fmt: skip
    assert blocks == runs(phases)
    places = [(event["type"], event["index"]) for event in events if "index" in event and "delta" not in event]
    assert places == [(f"content_block_{end}", place) for place in range(len(blocks)) for end in ("start", "stop")]


@pytest.mark.parametrize("api", [CHAT, OLLAMA_CHAT], ids=lambda api: api.path)
@pytest.mark.parametrize("phases", PHASES, ids="-".join)
def test_calls_of_a_chat_have_only_their_own_arguments(api: Api[Any], phases: Sequence[str]) -> None:
    _, response = response_of(api, phases)
    message = response["choices"][0]["message"] if api is CHAT else response["message"]
    arguments = [call["function"]["arguments"] for call in message.get("tool_calls", ())]
    own = {
        kind: [text for own_kind, text in parts_of(phases) if own_kind == kind] for kind in ("thought", "text", "call")
    }
    assert [item if isinstance(item, str) else json.dumps(item) for item in arguments] == own["call"]
    assert (message["content"] or "") == "".join(own["text"])
    thought = message.get("reasoning_content") if api is CHAT else message.get("thinking")
    assert (thought or "") == "".join(own["thought"])


def test_calls_of_several_answers_are_numbered_by_their_own_answer() -> None:
    texts = [["call", "call"], ["text", "call", "call"], ["call"]]
    answers = [deltas_of(parts_of(phases)) for phases in texts]
    mixed = [(index, answer[step]) for step in range(20) for index, answer in enumerate(answers) if step < len(answer)]
    response: Any = CHAT.fold(events_of(CHAT, {**BODIES[CHAT], "n": 3}, mixed))
    for choice, phases in zip(response["choices"], texts, strict=True):
        called = [call["function"]["arguments"] for call in choice["message"]["tool_calls"]]
        assert called == [text for kind, text in parts_of(phases) if kind == "call"]
    assert response["usage"]["prompt_tokens"] == 7
    assert response["usage"]["completion_tokens"] == 15


@pytest.mark.parametrize(("n_prompts", "n"), [(1, 1), (1, 3), (2, 1), (3, 2)])
def test_usage_counts_each_prompt_once_whatever_its_number_of_answers(n_prompts: int, n: int) -> None:
    deltas = [(index, delta) for index in range(n_prompts * n) for delta in deltas_of([("text", "a")])]
    response: Any = COMPLETIONS.fold(events_of(COMPLETIONS, {"prompt": ["Hi"] * n_prompts, "n": n}, deltas))
    usage = response["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (7 * n_prompts, 5 * n_prompts * n)
    assert usage["prompt_tokens_details"]["cached_tokens"] == 3 * n_prompts
