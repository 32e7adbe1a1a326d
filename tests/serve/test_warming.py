"""Test prefix warming: the next prompt begins with the prefix that idle time computed, and no answer changes."""

import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import psutil
import pytest

from edge.api.config import EngineConfig
from edge.errors import Interrupted, SamplingError
from edge.llama.batch import Batch
from edge.llm.continuation import Request
from edge.llm.engine import Engine
from edge.llm.interface import TextEngine
from edge.llm.options import EngineOptions, PrefixOptions
from edge.llm.scheduler import Scheduler
from edge.models.demo import MODEL_PATH
from edge.serve.app import create_app
from edge.serve.engine.inputs import InputProcessor
from edge.serve.engine.loop import ServingLoop
from edge.serve.messages import generation_json
from edge.serve.options import ServeOptions
from edge.serve.router import Router
from edge.serve.served import Generation
from edge.serve.warming import allowance, warmer
from edge.serve.warming.allowance import HOUR_S, Allowance, spares_energy
from edge.serve.warming.prefix import Prefix
from edge.serve.warming.requests import WarmingRequests
from edge.serve.warming.stamps import moved, next_change, stamps_in
from edge.serve.warming.turns import PLACEHOLDERS, turn
from tests.serve.scripted import ScriptedModels
from tests.serve.serving import serving
from tests.serve.test_serving_loop import WAIT_S, Replies
from tests.support.deployments import EXACT, ONE_THREAD, deployed, own_folders, tensor
from tests.support.helpers import until
from tests.support.workers import worker

NOON = datetime(2026, 3, 7, 12, 5, 40).timestamp()  # a Saturday
SYSTEM = "It is 12:05 on Saturday, March 7, 2026. You help at home, where there are many lights, doors and windows."
QUESTIONS = ("What is 27 plus 38?", "And 3 plus 4?", "What is 9 plus 9?")


# --- stamps ---


@pytest.mark.parametrize(
    ("text", "later"),
    [
        ("It is 12:05.", "It is 00:01."),
        ("now: 12:05 PM", "now: 12:01 AM"),
        ("Today is 2026-03-07.", "Today is 2026-03-08."),
        ("Sat Mar 07 2026", "Sun Mar 08 2026"),
        ("Saturday, March 7, 2026 at 12:04", "Sunday, March 8, 2026 at 00:01"),
        ("2026-03-07T12:05 and again 12:05", "2026-03-08T00:01 and again 00:01"),
        ("Mode 512:057, 12:06, and 2026-03-06", "Mode 512:057, 12:06, and 2026-03-06"),
    ],
)
def test_a_text_is_written_as_it_will_be_at_another_moment(text: str, later: str) -> None:
    """Also where it was written a minute ago; numbers that only look like the time stay."""
    midnight = datetime(2026, 3, 8, 0, 1).timestamp()
    assert moved(text, stamps_in(text, NOON), midnight) == later


def test_a_stamp_changes_with_its_smallest_unit() -> None:
    assert next_change(stamps_in("at 12:05, 2026-03-07", NOON), NOON) == NOON + 20
    assert next_change(stamps_in("on 2026-03-07", NOON), NOON) == datetime(2026, 3, 8).timestamp()
    (second,) = stamps_in("at 12:05:37", NOON)
    assert (second.text, second.lasts_s) == ("12:05:37", 1)


# --- the allowance ---


def test_an_allowance_comes_back_over_an_hour() -> None:
    now = 0.0
    left = Allowance(60.0, lambda: now, lambda: True)
    left.spend(59.0)
    assert left.is_left
    left.spend(2.0)
    assert not left.is_left
    now += HOUR_S / 60 * 1.5
    assert left.is_left
    left.spend(0.6)
    assert not left.is_left
    now += 10 * HOUR_S
    left.spend(59.0)
    assert left.is_left
    left.spend(2.0)
    assert not left.is_left


def test_nothing_is_left_while_the_device_spares_no_energy() -> None:
    now, spares = 0.0, False
    left = Allowance(60.0, lambda: now, lambda: spares)
    assert not left.is_left
    spares = True
    assert not left.is_left  # it looks every few seconds
    now += 5.0
    assert left.is_left


@pytest.mark.parametrize(
    ("online", "level", "spares"),
    [("1", "normal", True), ("0", "normal", False), ("1", "hot", False), ("1", None, True)],
)
def test_energy_is_spared_on_battery_and_in_heat(
    online: str, level: str | None, spares: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By what the system says of its power supplies."""
    files = {
        "BAT0": {"present": "1", "energy_now": "500", "energy_full": "1000", "power_now": "100", "status": "Unknown"},
        "AC0": {"online": online},
    }
    for folder, values in files.items():
        (tmp_path / folder).mkdir()
        for name, value in values.items():
            (tmp_path / folder / name).write_text(value)
    platform = pytest.importorskip("psutil._pslinux")
    monkeypatch.setattr(platform, "POWER_SUPPLY_PATH", str(tmp_path))
    monkeypatch.setattr(allowance, "thermal_level", lambda: level)
    assert psutil.sensors_battery() is not None
    assert spares_energy() is spares


# --- what is computed, and that no token changes ---


def loop_of(engine: TextEngine, seconds: float, replies: Replies) -> ServingLoop:
    return ServingLoop(EngineConfig(str(engine.path), prefix_warming=seconds), engine, None, replies.send)


@contextmanager
def looping(engine: TextEngine, seconds: float, replies: Replies) -> Iterator[ServingLoop]:
    loop = loop_of(engine, seconds, replies)
    thread = threading.Thread(target=loop.run)
    thread.start()
    try:
        yield loop
    finally:
        loop.end()
        thread.join(WAIT_S)
        engine.resume()


def answer(loop: ServingLoop, replies: Replies, number: int, messages: list[dict[str, Any]], most: int = 12) -> str:
    loop.expect(number)
    generation = Generation(messages=messages, max_tokens=most, sampling={"temperature": 0}, namespace="n")
    loop.generate(number, **generation_json(generation, []))
    return "".join(message["piece"]["text"] for message in replies.replies_to(number, "piece") if "piece" in message)


def tell(loop: ServingLoop, messages: list[dict[str, Any]], text: str, at: float = NOON) -> None:
    message, following = turn(text, ())
    values = {"messages": [*messages, message], "following": following, "at": at, "namespace": "n"}
    loop.ask("turn", {**values, "tools": (), "variables": {}, "think": None, "adapters": None})


def until_idle(loop: ServingLoop, tokens: int) -> dict[str, Any]:
    """The counters, once as many tokens were computed."""

    def counters() -> dict[str, Any]:
        return dict(loop.ask("status", {})["warming"])

    until(lambda: counters()["computed_tokens"] >= tokens, f"{tokens} tokens that were computed")
    return counters()


def conversation(engine: TextEngine, seconds: float) -> tuple[list[str], list[int], dict[str, Any]]:
    """The answers of a conversation whose client sends another text back than was generated, as clients do that leave
    thoughts out; and how many tokens of each prompt were cached."""
    replies = Replies()
    texts: list[str] = []
    with looping(engine, seconds, replies) as loop:
        messages: list[dict[str, Any]] = [{"role": "system", "content": "You help at home, where there are lights."}]
        for number, question in enumerate(QUESTIONS):
            messages.append({"role": "user", "content": question})
            texts.append(answer(loop, replies, number, messages))
            answer_text = texts[-1] + " So the answer is the sum of the two numbers that you gave to me."
            if seconds:
                before = loop.ask("status", {})["warming"]["computed_tokens"]
                tell(loop, messages, answer_text)
                until_idle(loop, before + 1)
            messages.append({"role": "assistant", "content": answer_text})
        counters = loop.ask("status", {})["warming"]
    cached = [
        max(m["cached_tokens"] for m in replies.replies_to(n, "piece") if "piece" in m) for n in range(len(QUESTIONS))
    ]
    return texts, cached, counters


def test_what_nobody_asked_for_leaves_first_where_the_cache_is_full() -> None:
    """Another background request came before the prefix."""
    options = EngineOptions(threads=1, context=128, batch=32, sequences=2)
    with (
        Engine(MODEL_PATH, options) as engine,
        closing(InputProcessor(EngineConfig(str(MODEL_PATH)), engine)) as inputs,
        Scheduler(engine, keep=True) as scheduler,
    ):
        requests = WarmingRequests(inputs, lambda: scheduler, lambda job: None, Allowance(HOUR_S))
        requests._begin(Prefix([*range(10, 90)], "n", None))
        [ahead] = scheduler.queues.waiting
        earlier = scheduler.prepare(Request([*range(110, 190)], 8, ends=False, background=True), number=1)
        scheduler.enqueue(earlier)
        while scheduler.busy and not scheduler.queues.preemptions["background"]:
            scheduler.step()
        assert ahead in scheduler.queues.waiting
        assert earlier in scheduler.queues.running


@pytest.mark.parametrize("on_disk", [False, True], ids=["in the cache", "on disk"])
def test_a_turn_is_the_beginning_of_the_next_prompt(on_disk: bool, tmp_path: Path) -> None:
    """Its answer, as the client sends it back, need not be computed; and the answers are the same."""
    prefixes = PrefixOptions(folder=tmp_path / "kept", key_folder=tmp_path / "own") if on_disk else None
    options = replace(EXACT, context=512, batch=64, sequences=2, prefixes=prefixes)
    with Engine(MODEL_PATH, options) as engine:
        texts, cached, counters = conversation(engine, 3600.0)
    with Engine(MODEL_PATH, replace(options, prefixes=None)) as engine:
        expected, cached_alone, none = conversation(engine, 0.0)
    assert texts == expected
    assert none == {"computed_tokens": 0, "used_tokens": 0, "seconds": 0.0}
    gains = [warm - alone for warm, alone in zip(cached, cached_alone, strict=True)]
    assert gains[0] == 0
    assert min(gains[1:]) >= 15  # what the client had added
    assert counters["used_tokens"] >= sum(gains)
    assert counters["seconds"] > 0


def test_ranks_compute_what_one_device_computes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own_folders(monkeypatch, tmp_path / "own")
    options = replace(EXACT, context=512, batch=64, sequences=2)
    with Engine(MODEL_PATH, options) as engine:
        expected = conversation(engine, 3600.0)[:2]
    with worker(tmp_path / "one", *ONE_THREAD) as other, deployed(other, MODEL_PATH, tensor(1, 1), options) as two:
        assert conversation(two.engine, 3600.0)[:2] == expected


@pytest.fixture
def engine() -> Iterator[Engine]:
    with Engine(MODEL_PATH, EngineOptions(threads=1, context=512, sequences=2)) as engine:
        yield engine


def test_a_prompt_is_computed_before_its_time_changes(engine: Engine) -> None:
    """Nearly all of the next prompt is there a minute later, though the time stands at its beginning; and after some
    minutes without the client nothing more is computed."""
    now, replies = NOON, Replies()
    with looping(engine, 3600.0, replies) as loop:
        its_warmer = loop._warming.warmer
        its_warmer._clock = lambda: now
        messages: list[dict[str, Any]] = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": "Hello"}]
        text = answer(loop, replies, 1, messages)
        tell(loop, messages, text)
        now = datetime(2026, 3, 7, 12, 5, 59).timestamp()
        its_warmer._wake.set()
        until_idle(loop, 20)
        later = SYSTEM.replace("12:05", "12:06")
        history = [{"role": "system", "content": later}, messages[1], {"role": "assistant", "content": text}]
        answer(loop, replies, 2, [*history, {"role": "user", "content": "And now?"}])
        (end,) = [m for m in replies.replies_to(2, "piece") if m.get("piece", {}).get("finish_reason")]
        assert end["cached_tokens"] > 25
        assert loop.ask("status", {})["warming"]["used_tokens"] > 20
        changes = 0
        while (wait := its_warmer.poll()) is not None and changes < 100:
            now, changes = now + wait, changes + 1
    assert changes <= warmer.MOST_CHANGES + 1


@pytest.mark.parametrize("is_refused", [False, True], ids=["answered", "refused"])
def test_who_comes_waits_for_no_step_in_the_background(
    is_refused: bool, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The step under way is given up, and none begins while the request is prepared. Both get their tokens."""
    compute, given_up, replies = engine.decode_rows, list[bool](), Replies()
    messages = [{"role": "user", "content": "Hello"}]

    def decode_rows(rows: Batch, n: int) -> None:
        if not given_up:
            loop.expect(2)
        try:
            compute(rows, n)
        except Interrupted:
            given_up.append(True)
            raise
        given_up.append(False)

    with looping(engine, 3600.0, replies) as loop:
        alone = answer(loop, replies, 1, messages)
        monkeypatch.setattr(engine, "decode_rows", decode_rows)
        text = "It is five past twelve at home, where there are lights. " * 4
        prefix = {"prompts": None, "text": text, "tools": (), "namespace": "other", "adapters": None}
        loop.ask("announce", prefix)
        until(lambda: bool(given_up), "a step in the background")
        for _ in range(3):
            loop._jobs.result(lambda: None)
        assert given_up == [True]
        if is_refused:
            generation = Generation(messages=messages, sampling={"temperature": -1}, namespace="n")
            with pytest.raises(SamplingError):
                loop.generate(2, **generation_json(generation, []))
        else:
            assert answer(loop, replies, 2, messages) == alone
        until(lambda: loop.ask("announced", {"namespace": "other"})[0]["state"] == "ready", "the prefix")
        assert loop.ask("status", {})["warming"]["computed_tokens"] == len(loop._inputs.tokens_before(text))
    assert given_up.count(True) == 1


def test_a_time_in_seconds_ends_what_is_computed(engine: Engine) -> None:
    """Nobody knows the second of the next prompt: what stands behind it is not computed in vain."""
    with looping(engine, 3600.0, Replies()) as loop:
        its_warmer = loop._warming.warmer
        system = SYSTEM.replace("12:05", "12:05:31")
        tell(loop, [{"role": "system", "content": system}, {"role": "user", "content": "Hello"}], "Hi!")
        until_idle(loop, 1)
        (prefix,) = its_warmer._warmed
        text = b"".join(engine.model.piece(token, special=True) for token in prefix.tokens).decode()
        assert text.removeprefix("<|bos|><|system|>") in "It is 12:05"
        assert its_warmer.poll() is None


def test_a_later_turn_of_a_conversation_takes_the_place_of_an_earlier_one(engine: Engine) -> None:
    loop = loop_of(engine, 1.0, Replies())
    its_warmer = loop._warming.warmer
    its_warmer._allowance.spend(1.0)  # nothing is computed yet
    chat: list[dict[str, Any]] = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hello"}]
    tell(loop, chat, "Hi!")
    tell(loop, [{"role": "user", "content": "Another one"}], "Yes?")
    tell(loop, [*chat, {"role": "assistant", "content": "Hi!"}, {"role": "user", "content": "And?"}], "And what?")
    assert [len(prefix.tokens) for prefix in its_warmer._queue] == sorted(
        (len(p.tokens) for p in its_warmer._queue), reverse=True
    )
    assert len(its_warmer._queue) == 2
    for number in range(20):
        tell(loop, [{"role": "user", "content": f"Number {number}"}], "Yes?")
    assert len(its_warmer._queue) == warmer.MOST_QUEUED
    loop._inputs.close()


def test_what_is_left_of_the_allowance_ends_a_prefix(engine: Engine) -> None:
    """In the middle of it; what was computed is not lost, and the rest waits."""
    with looping(engine, 3600.0, Replies()) as loop:
        its_warmer, now = loop._warming.warmer, 0.0
        its_warmer._allowance = Allowance(0.001, lambda: now, lambda: True)
        prompt = " ".join(f"word {n}" for n in range(100))
        announced = {"prompts": None, "text": prompt, "tools": (), "namespace": "n", "adapters": None}
        n_tokens = loop.ask("announce", announced)["tokens"]
        until(lambda: its_warmer.counters["seconds"] > 0 and its_warmer._computing is None, "the end of the allowance")
        assert [p["state"] for p in loop.ask("announced", {"namespace": "n"})] == ["queued"]
        assert its_warmer.counters["computed_tokens"] == 0
        its_warmer._allowance = Allowance(3600.0, lambda: now, lambda: True)
        its_warmer._wake.set()
        counters = until_idle(loop, 1)
        assert counters["computed_tokens"] == n_tokens
        assert [p["state"] for p in loop.ask("announced", {"namespace": "n"})] == ["ready"]


def test_prefixes_keep_to_the_memory_and_the_disk_they_may_take(tmp_path: Path) -> None:
    """Many of them, of several namespaces: the KV cache and the files are never more than their bounds."""
    most, folder = 256 << 10, tmp_path / "kept"
    options = replace(EXACT, context=512, batch=64, sequences=2, prefixes=PrefixOptions(most, folder, tmp_path / "own"))
    seen: dict[Path, int] = {}
    with Engine(MODEL_PATH, options) as engine, looping(engine, 3600.0, Replies()) as loop:
        for name in "abcdef":
            text = f"{name} is in the house, and the lights are on. " * 8
            loop.ask("announce", {"prompts": None, "text": text, "tools": (), "namespace": name, "adapters": None})
            until(lambda: loop.ask("announced", {"namespace": name})[0]["state"] == "ready", name)  # noqa: B023
            until(lambda: not loop._jobs.result(lambda: engine.states.is_writing), "what is written")
            sizes = {file: file.stat().st_size for file in folder.rglob("*") if file.is_file()}
            seen |= sizes
            assert sum(sizes.values()) <= most
            assert loop._scheduler.slots.n_cached <= engine.context
    assert sum(seen.values()) > 1.5 * most  # so some had to go


@pytest.mark.parametrize("spares", [True, False])
def test_a_device_on_battery_computes_nothing_ahead(
    spares: bool, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Allowance, "_has_energy", property(lambda _: spares))
    with looping(engine, 3600.0, Replies()) as loop:
        loop.ask("announce", {"prompts": None, "text": "It is", "tools": (), "namespace": "n", "adapters": None})
        if spares:
            until_idle(loop, 1)
        assert loop._warming.warmer.poll() == (None if spares else pytest.approx(warmer._LOOK_S))
        [prefix] = loop.ask("announced", {"namespace": "n"})
        assert prefix["state"] == ("ready" if spares else "queued")


def test_the_same_text_is_a_prefix_for_each_namespace_and_adapter_scale(engine: Engine) -> None:
    loop = loop_of(engine, 1.0, Replies())
    kinds = [(namespace, adapters) for namespace in ("n", "m") for adapters in (None, [0.5], [1.0])]

    def announce() -> list[str]:
        """Return the identifier of the prefix of each kind."""
        each = [{"namespace": namespace, "adapters": adapters} for namespace, adapters in kinds]
        return [loop.ask("announce", {"prompts": None, "text": "The sea", "tools": (), **kind})["id"] for kind in each]

    ids = announce()
    assert len(set(ids)) == len(kinds)
    assert announce() == ids
    assert [prefix["id"] for prefix in loop.ask("announced", {"namespace": "m"})] == ids[3:]
    loop._inputs.close()


def test_what_the_engine_drops_can_be_announced_again(engine: Engine) -> None:
    """As after a step that failed."""
    loop = loop_of(engine, 1.0, Replies())
    its_warmer = loop._warming.warmer
    announced = {"prompts": None, "text": "What the sea is like.", "tools": (), "namespace": "n", "adapters": None}
    first = loop.ask("announce", announced)["id"]
    its_warmer.poll()
    assert its_warmer._computing is not None
    its_warmer.ended(its_warmer._computing, None)
    again = loop.ask("announce", announced)
    assert (again["id"] != first, again["state"]) == (True, "queued")
    assert its_warmer.poll() is None
    assert its_warmer._computing is not None
    loop._inputs.close()


@pytest.mark.parametrize("deleted", [True, False])
def test_prefix_deleted_while_it_is_computed_is_not_queued_again(engine: Engine, deleted: bool) -> None:
    loop = loop_of(engine, 1.0, Replies())
    its_warmer = loop._warming.warmer
    announced = {"prompts": None, "text": "What the sea is like.", "tools": (), "namespace": "n", "adapters": None}
    prefix_id = loop.ask("announce", announced)["id"]
    its_warmer.poll()
    prefix = its_warmer._computing
    assert prefix is not None
    assert not loop.ask("forget", {"prefix_id": prefix_id, "namespace": "other"})
    if deleted:
        assert loop.ask("forget", {"prefix_id": prefix_id, "namespace": "n"})
    # The engine thread reports that the prefix ended before it was complete, as it does after a cancel.
    its_warmer.ended(prefix, SimpleNamespace(answer=[], cached_tokens=0))  # type: ignore[arg-type]
    assert its_warmer._queue == ([] if deleted else [prefix])
    assert its_warmer._computing is None
    its_warmer.poll()
    assert its_warmer._computing is (None if deleted else prefix)
    loop._inputs.close()


# --- over HTTP ---


@contextmanager
def server(seconds: float = 3600.0, keys: tuple[str, ...] = ()) -> Iterator[str]:
    options = EngineOptions(threads=1, sequences=9)
    router = Router({"demo": EngineConfig(str(MODEL_PATH), options, prefix_cache=0, prefix_warming=seconds)})
    with serving(create_app(router, ServeOptions(api_keys=keys)), at_end=router.close) as address:
        yield address


def post(url: str, path: str, key: str = "", **body: Any) -> httpx.Response:
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    return httpx.post(url + path, json=body, headers=headers, timeout=WAIT_S)


def ready(url: str, key: str = "") -> list[dict[str, Any]]:
    """Return what was announced, once all of it is ready."""
    headers = {"Authorization": f"Bearer {key}"} if key else {}

    def announced() -> list[dict[str, Any]]:
        data: list[dict[str, Any]] = httpx.get(f"{url}/v1/prefixes", headers=headers, timeout=WAIT_S).json()["data"]
        return data

    until(lambda: all(prefix["state"] == "ready" for prefix in announced()), "prefixes that are ready")
    return announced()


def test_a_prompt_begins_with_what_was_announced() -> None:
    """A text, messages before a question, and a document whose text goes on; each key has its own."""
    text = "You are a pirate who knows the seven seas, and who likes to talk about each of them."
    with server(keys=("sk-a", "sk-b")) as url:
        announced = [
            post(url, "/v1/prefixes", "sk-a", prompt=text),
            post(url, "/v1/prefixes", "sk-a", messages=[{"role": "system", "content": text}]),
            post(url, "/v1/prefixes", "sk-a", messages=[{"role": "user", "content": text}]),
        ]
        tokens = [response.json()["tokens"] for response in announced]
        assert post(url, "/v1/prefixes", "sk-a", prompt=text).json()["id"] == announced[0].json()["id"]
        assert [prefix["tokens"] for prefix in ready(url, "sk-a")] == tokens
        assert ready(url, "sk-b") == []
        requests: list[tuple[str, dict[str, Any]]] = [
            ("/v1/completions", {"prompt": f"{text} Which"}),
            (
                "/v1/chat/completions",
                {"messages": [{"role": "system", "content": text}, {"role": "user", "content": "?"}]},
            ),
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": f"{text} Which?"}]}),
        ]
        for (path, body), n_tokens in zip(requests, tokens, strict=True):
            for key, cached in (("sk-b", {0, 1}), ("sk-a", {n_tokens})):
                usage = post(url, path, key, max_tokens=1, **body).json()["usage"]
                assert usage["prompt_tokens_details"]["cached_tokens"] in cached
        identifier = announced[0].json()["id"]
        for key, status in (("sk-b", 404), ("sk-a", 200), ("sk-a", 404)):
            headers = {"Authorization": f"Bearer {key}"}
            assert httpx.delete(f"{url}/v1/prefixes/{identifier}", headers=headers).status_code == status
        assert len(ready(url, "sk-a")) == 2
        metrics = httpx.get(f"{url}/metrics", headers={"Authorization": "Bearer sk-a"}).text
    values = {
        line.split("{")[0]: float(line.split()[-1]) for line in metrics.splitlines() if "edge_warming" in line[:13]
    }
    # Beginnings that others share, such as the first token, were there before.
    assert sum(tokens) - len(tokens) <= values["edge_warming_used_tokens_total"] <= sum(tokens)
    assert values["edge_warming_computed_tokens_total"] >= values["edge_warming_used_tokens_total"]


def test_what_cannot_be_announced_is_refused_with_the_reason() -> None:
    picture = {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw0KGgo="}}
    with server() as url:
        bad = [
            ({}, 400, "either messages or a prompt"),
            ({"prompt": "a", "messages": [{"role": "user", "content": "a"}]}, 400, "either messages or a prompt"),
            ({"messages": []}, 400, "messages"),
            ({"messages": [{"role": "user", "content": [picture]}]}, 400, "not computed ahead"),
            ({"prompt": "word " * 50_000}, 400, "tokens"),
        ]
        for body, status, reason in bad:
            response = post(url, "/v1/prefixes", **body)
            assert (response.status_code, reason in response.text) == (status, True), response.text
        for number in range(warmer.MOST_ANNOUNCED):
            assert post(url, "/v1/prefixes", prompt=f"The number {number} is here.").status_code == 200
        response = post(url, "/v1/prefixes", prompt="One more than there may be.")
        assert (response.status_code, "delete one" in response.text) == (429, True), response.text
    with server(0.0) as url:
        response = post(url, "/v1/prefixes", prompt="Nobody computes this.")
        assert "--prefix-warming on" in response.text
        assert response.status_code == 400
        assert httpx.get(f"{url}/v1/prefixes").json() == {"object": "list", "data": []}


def test_a_chat_is_told_when_it_is_complete() -> None:
    """Its answer as the client will send it back, and two ways to go on that share nothing."""
    models = ScriptedModels()
    chat = [{"role": "user", "content": "Hello"}]
    with serving(create_app(models, ServeOptions())) as url:
        post(url, "/v1/chat/completions", messages=chat, stream=True)
        post(url, "/v1/chat/completions", messages=chat, n=2)
        post(url, "/v1/completions", prompt="Hello")
    (noted,) = models.scripted.turns
    assert noted["messages"] == [*chat, {"role": "assistant", "content": "Hello there."}]
    assert noted["following"] == [[{"role": "user", "content": text}] for text in PLACEHOLDERS]


def test_results_follow_an_answer_that_calls() -> None:
    calls = [{"id": f"call_{n}", "name": "look", "arguments": f'{{"n": {n}}}'} for n in (1, 2)]
    message, following = turn("", calls)
    assert [call["function"] for call in message["tool_calls"]] == [
        {"name": "look", "arguments": {"n": n}} for n in (1, 2)
    ]
    assert [[result["tool_call_id"] for result in results] for results in following] == [["call_1", "call_2"]] * 2
    with pytest.raises(ValueError, match="Expecting"):
        turn("", [{**calls[0], "arguments": "{"}])
