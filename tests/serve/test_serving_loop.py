"""Test the engine thread of an engine process, in this process: its reports about failed requests, and its cleanup."""

import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from edge.api.config import EngineConfig
from edge.errors import EngineError, SamplingError
from edge.llm.engine import Engine
from edge.llm.options import EngineOptions, PrefixOptions
from edge.llm.scheduler import Scheduler
from edge.models.demo import MODEL_PATH
from edge.prefixes import store
from edge.serve.engine.loop import ServingLoop
from edge.serve.engine.status import Statistics
from edge.serve.messages import error_json, error_of, generation_json
from edge.serve.served import Generation
from edge.speculate.factory import speculation, with_room
from partition.errors import PlanError

CONFIG = EngineConfig(str(MODEL_PATH))
WAIT_S = 60.0


class Replies:
    """Record of what the loop tells the server."""

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []
        self.empty = 0  # times that it told nothing
        self._changed = threading.Condition()

    def send(self, *messages: dict[str, Any]) -> None:
        with self._changed:
            self.messages += messages
            self.empty += not messages
            self._changed.notify_all()

    def replies_to(self, number: int, *keys: str) -> list[dict[str, Any]]:
        """The messages of a request, once there is one with each of these keys; a piece only if it is the last."""
        with self._changed:
            assert self._changed.wait_for(lambda: all(self._has(number, key) for key in keys), WAIT_S), self.messages
            return [message for message in self.messages if message.get("id") == number]

    def _has(self, number: int, key: str) -> bool:
        mine = [message for message in self.messages if message.get("id") == number and key in message]
        return any(key != "piece" or message["piece"]["finish_reason"] for message in mine)


@pytest.fixture
def replies() -> Replies:
    return Replies()


@pytest.fixture
def loop(replies: Replies) -> Iterator[ServingLoop]:
    with Engine(MODEL_PATH, EngineOptions(threads=1, context=512, sequences=2)) as engine:
        yield ServingLoop(CONFIG, engine, None, replies.send)
        engine.resume()


def begin(loop: ServingLoop, number: int, **generation: Any) -> None:
    loop.expect(number)
    loop.generate(number, **generation_json(Generation(sampling={"temperature": 0}, **generation), []))


def run(loop: ServingLoop) -> threading.Thread:
    thread = threading.Thread(target=loop.run)
    thread.start()
    return thread


def test_that_a_request_was_accepted_is_told_before_anything_of_it(loop: ServingLoop, replies: Replies) -> None:
    thread = run(loop)
    begin(loop, 7, prompt="Hello", max_tokens=3)
    messages = replies.replies_to(7, "piece")
    loop.end()
    thread.join(WAIT_S)
    assert [next(key for key in ("result", "begun", "piece") if key in m) for m in messages] == [
        "result", "begun", "piece", "piece", "piece",
    ]  # fmt: skip


def test_other_requests_go_on_between_two_texts_to_embed(loop: ServingLoop, monkeypatch: pytest.MonkeyPatch) -> None:
    jobs: list[object] = []
    put = loop._jobs.put
    monkeypatch.setattr(loop._jobs, "put", lambda job: put(jobs.append(job) or job))
    thread = run(loop)
    assert len(loop.ask("embed", {"texts": ["one", "two", "three"]})["embeddings"]) == 3
    assert len(jobs) == 3
    loop.end()
    thread.join(WAIT_S)


def test_passes_and_tokens_are_counted(replies: Replies) -> None:
    """Also over an error. A part of a prompt is a pass, of which there is nothing to tell."""
    with Engine(MODEL_PATH, EngineOptions(threads=1, context=512, batch=32, sequences=2)) as engine:
        loop = ServingLoop(CONFIG, engine, None, replies.send)
        thread = run(loop)
        begin(loop, 1, prompt=[5] * 70, max_tokens=4)
        replies.replies_to(1, "piece")
        counters = [loop.ask("status", {})["counters"]]
        empty = replies.empty
        loop._jobs.result(lambda: loop._fail(EngineError("once")))
        begin(loop, 2, prompt=[7] * 20, max_tokens=2)
        replies.replies_to(2, "piece")
        counters.append(loop.ask("status", {})["counters"])
        loop.end()
        thread.join(WAIT_S)
        engine.resume()
    none = {"preemptions": 0, "background_preemptions": 0}
    assert counters == [
        {"prompt_tokens": 70, "cached_tokens": 0, "generated_tokens": 4, "steps": 3 + 3, **none},
        {"prompt_tokens": 90, "cached_tokens": 0, "generated_tokens": 6, "steps": 6 + 2, **none},
    ]
    assert empty == 0


def test_what_came_of_drafts_is_told(replies: Replies) -> None:
    """Counts cover the requests so far, and those after an error; there are none where nothing drafts."""
    options = with_room(EngineOptions(threads=1, context=512, sequences=2), "ngram")
    with Engine(MODEL_PATH, options) as engine:
        assert ServingLoop(CONFIG, engine, None, replies.send).status()["speculation"] is None
        drafter = speculation("ngram", engine, lambda opened: opened)
        loop = ServingLoop(CONFIG, engine, None, replies.send, drafter)
        assert loop.status()["speculation"] == {
            "draft": "ngram", "draft_worker": None, "draft_worker_lost": False,
            "drafted": 0, "accepted": 0, "passes": 0, "rows_per_pass": None, "gain": None,
        }  # fmt: skip
        thread = run(loop)
        begin(loop, 1, prompt="Hello", max_tokens=5)
        replies.replies_to(1, "piece")
        result = loop.status()["speculation"]
        loop.end()
        thread.join(WAIT_S)
        engine.resume()
    assert result["passes"] > 0
    assert result["rows_per_pass"] >= 1


def test_what_is_refused_or_cancelled_leaves_nothing_behind(loop: ServingLoop, replies: Replies) -> None:
    with pytest.raises(SamplingError):
        begin(loop, 1, prompt="Hello", max_tokens=0)
    begin(loop, 2, prompt="Hello")
    loop.cancel(2)  # before the engine thread has seen it
    loop.cancel(3)  # never there
    thread = run(loop)
    assert replies.replies_to(2, "piece")[-1]["piece"]["finish_reason"] == "cancelled"
    begin(loop, 4, prompt="Hello", max_tokens=2)
    replies.replies_to(4, "piece")
    loop.cancel(4)  # has ended
    begin(loop, 5, prompt="Hello", max_tokens=2)
    replies.replies_to(5, "piece")
    loop.end()
    thread.join(WAIT_S)
    assert (loop._arrivals._cancelled, loop._requests) == ({}, {})


def test_an_error_of_one_step_ends_the_requests_and_the_next_are_answered(
    loop: ServingLoop, replies: Replies, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = Scheduler.step

    def failing(scheduler: Scheduler) -> Any:
        monkeypatch.setattr(Scheduler, "step", step)
        raise EngineError("no room")

    monkeypatch.setattr(Scheduler, "step", failing)
    begin(loop, 1, prompt="Hello", max_tokens=2)
    thread = run(loop)
    assert replies.replies_to(1, "error")[-1]["error"] == {"kind": "EngineError", "message": "no room"}
    begin(loop, 2, prompt="Hello", max_tokens=2)
    replies.replies_to(2, "piece")
    loop.end()
    thread.join(WAIT_S)


def test_a_request_that_was_prepared_before_an_error_is_told_from_those_after_it(
    loop: ServingLoop, replies: Replies
) -> None:
    begin(loop, 1, prompt="Hello", max_tokens=5)
    loop._fail(EngineError("no room"))  # before the engine thread has seen the request
    begin(loop, 2, prompt="Good day", max_tokens=2)
    thread = run(loop)
    try:
        tokens = {number: len([m for m in replies.replies_to(number, "piece") if "piece" in m]) for number in (2, 1)}
    finally:
        loop.end()
        thread.join(WAIT_S)
    assert tokens == {1: 5, 2: 2}


def test_a_stop_string_is_told_where_the_request_has_it(
    loop: ServingLoop, replies: Replies, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That of a template is not known to the client."""
    monkeypatch.setattr(loop._inputs.template, "stops", (" plus",))
    thread = run(loop)
    question = [{"role": "user", "content": "What is 3 plus 2?"}]
    try:
        for number, stop in ((1, []), (2, ["3", "x"])):
            loop.expect(number)
            sampling = {"temperature": 0, "stop": stop}
            loop.generate(number, **generation_json(Generation(messages=question, sampling=sampling), []))
        ends = [replies.replies_to(number, "piece")[-1]["piece"] for number in (1, 2)]
    finally:
        loop.end()
        thread.join(WAIT_S)
    assert [(end["finish_reason"], end["stop_string"]) for end in ends] == [("stop", None), ("stop", "3")]


def test_where_the_engine_is_lost_the_process_ends_and_nobody_hears_an_error(
    loop: ServingLoop, replies: Replies, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next process is asked for what was under way."""

    def failing(scheduler: Scheduler) -> Any:
        raise EngineError("pi is lost")

    monkeypatch.setattr(Scheduler, "step", failing)
    monkeypatch.setattr(Engine, "failed", property(lambda engine: EngineError("pi is lost")))
    begin(loop, 1, prompt="Hello", max_tokens=2)
    with pytest.raises(EngineError, match="pi is lost"):
        loop.run()
    assert not any("error" in message for message in replies.messages)


def test_why_prompts_are_not_kept_is_said_once(
    replies: Replies, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store.shutil, "disk_usage", lambda folder: SimpleNamespace(total=1 << 40, used=1 << 40, free=0))  # type: ignore[attr-defined]
    saved = PrefixOptions(folder=tmp_path / "kept", key_folder=tmp_path)
    with Engine(MODEL_PATH, EngineOptions(threads=1, context=512, sequences=2, prefixes=saved)) as engine:
        loop = ServingLoop(CONFIG, engine, None, replies.send)
        thread = run(loop)
        begin(loop, 1, prompt="One kilobyte has 1024 bytes, and a megabyte has as many kilobytes. " * 8, max_tokens=2)
        replies.replies_to(1, "piece")
        engine.states.finish()  # until it was tried
        for number in (2, 3):
            begin(loop, number, prompt="Hello", max_tokens=3)
            replies.replies_to(number, "piece")
        loop.end()
        thread.join(WAIT_S)
    [said] = [message["say"] for message in replies.messages if "say" in message]
    assert f"a prompt is not stored in {saved.folder}" in said


def test_tokens_per_second_are_those_of_the_last_five_seconds() -> None:
    now = [100.0]
    statistics = Statistics(lambda: now[0])
    for at in (100.0, 102.0, 104.0, 104.0, 106.0):
        now[0] = at
        statistics.add_token()
    assert statistics.to_json()["tokens_per_s"] == 4 / 5
    now[0] = 120.0
    assert statistics.to_json()["tokens_per_s"] == 0
    assert statistics.counters["generated_tokens"] == 5


def test_errors_cross_with_their_classes() -> None:
    for error in (SamplingError("a"), PlanError("b"), EngineError("c")):
        crossed = error_of(error_json(error))
        assert (type(crossed), str(crossed)) == (type(error), str(error))
    crossed = error_of(error_json(KeyError("x")))
    assert (type(crossed), str(crossed)) == (EngineError, "KeyError: 'x'")
