"""Test loading and unloading of models: idle models are unloaded, by options and by requests; if a model needs memory,
the least recently used one is unloaded.
"""

from __future__ import annotations

import asyncio
import gc
import math
import threading
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from devices import probe
from edge.api.config import EngineConfig
from edge.errors import EdgeError, HubError, NotAllowed, UnknownModel
from edge.llm.options import EngineOptions
from edge.models.demo import MODEL_PATH
from edge.serve.lifetimes import Lifetimes
from edge.serve.router import Router, _needs_room
from edge.serve.served import Generation

CONFIG = EngineConfig(str(MODEL_PATH), EngineOptions(threads=1, sequences=2), prefix_cache=0)
ASK = Generation(prompt="One kilobyte", max_tokens=400, sampling={"temperature": 0, "allow_repetition": True})


class Clock:
    """A clock that a test sets."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def run(
    test: Callable[[Router, Clock], Awaitable[None]],
    names: tuple[str, ...] = ("a", "b"),
    idle_unload_s: float = math.inf,
    pinned: tuple[str, ...] = (),
    **options: Any,
) -> None:
    async def with_router() -> None:
        clock = Clock()
        lifetimes = Lifetimes(idle_unload_s, pinned, clock)
        router = Router(dict.fromkeys(names, CONFIG), lifetimes=lifetimes, **options)
        try:
            await test(router, clock)
        finally:
            await router.close()

    asyncio.run(with_router())


async def loaded(router: Router) -> list[str]:
    return [model.name for model in await router.loaded()]


def test_a_model_is_unloaded_once_it_was_idle_for_long_enough() -> None:
    async def test(router: Router, clock: Clock) -> None:
        first = await router.model("a")
        child = first.replicas.processes[0]._child
        assert child is not None
        clock.now += 40
        await router.model("b")
        clock.now += 30
        assert (router.expires_s("a"), router.expires_s("b")) == (-10, 30)
        await router.unload_idle()
        assert await loaded(router) == ["b"]
        assert child.process.returncode is not None  # its memory is free
        clock.now += 29
        await router.unload_idle()
        assert await loaded(router) == ["b"]
        await router.model("a")  # comes back by itself

    run(test, idle_unload_s=60)


def test_a_model_that_answers_or_stays_is_not_unloaded() -> None:
    async def test(router: Router, clock: Clock) -> None:
        model = await router.model("a")
        await router.model("b")
        answer = await model.generate(ASK)
        clock.now += 1e6
        await router.unload_idle()
        assert await loaded(router) == ["a", "b"]
        assert router.expires_s("b") == math.inf
        assert not await router.unload("a")
        assert not await router.unload("b")
        answer.cancel()
        async for _piece in answer:
            pass
        clock.now += 61  # counted from when it was last seen to answer
        await router.unload_idle()
        assert await loaded(router) == ["b"]

    run(test, idle_unload_s=60, pinned=("b",))


def test_texts_that_are_embedded_keep_a_model() -> None:
    async def test(router: Router, clock: Clock) -> None:
        model = await router.model("a")
        embedding = asyncio.ensure_future(model.embed(["a text"] * 50))
        await asyncio.sleep(0)  # it is sent
        assert model.replicas.busy
        assert not await router.unload("a")
        assert len((await embedding)[0]) == 50
        assert await router.unload("a")

    run(test)


async def abandoned(router: Router, name: str) -> asyncio.Task[Any]:
    """Return the load of a model whose client gave up."""
    client = asyncio.ensure_future(router.model(name))
    await asyncio.sleep(0)  # it has begun
    load = router._loads._tasks[name]
    client.cancel()
    await asyncio.gather(client, return_exceptions=True)
    return load


def test_who_comes_after_a_client_gave_up_does_not_wait_for_its_model() -> None:
    async def test(router: Router, clock: Clock) -> None:
        load = await abandoned(router, "a")
        await router.model("b")
        assert load.cancelled()
        assert await loaded(router) == ["b"]

    run(test)


def test_a_load_that_is_done_is_forgotten() -> None:
    """Also the error of a load whose client gave up: nobody is left to see it."""
    unseen: list[Any] = []

    async def test(router: Router, clock: Clock) -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: unseen.append(context))
        await router.model("a")
        assert not router._loads._tasks
        router.configs["b"] = replace(CONFIG, path="there is no such file")
        async with router._loading:
            load = await abandoned(router, "b")
        await asyncio.wait([load])
        await asyncio.sleep(0)
        assert not router._loads._tasks
        del load
        gc.collect()

    run(test)
    assert not unseen


def test_requests_say_for_how_long_a_model_stays() -> None:
    async def test(router: Router, clock: Clock) -> None:
        for name in ("a", "b"):
            await router.model(name)
        router.keep("a", 300)
        router.keep("b", 0)
        assert (router.expires_s("a"), router.expires_s("b")) == (300, 1)
        clock.now += 2
        await router.unload_idle()
        assert await loaded(router) == ["a"]
        router.keep("a", math.inf)
        assert not await router.unload("a")
        router.keep("a", None)  # as the options say
        assert router.expires_s("a") == 58
        with pytest.raises(UnknownModel):
            router.keep("c", 1)

    run(test, idle_unload_s=60)


def test_what_needs_room_takes_it_from_the_one_unused_for_longest(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not from one that stays, nor from one that answers."""

    class Memory:
        def __init__(self) -> None:
            self.available = 1 << 40

        def __call__(self) -> Memory:
            return self

    memory = Memory()
    monkeypatch.setattr("psutil.virtual_memory", memory)

    async def test(router: Router, clock: Clock) -> None:
        for name in ("pinned", "kept", "busy", "old", "new"):
            await router.model(name)
            clock.now += 1
        router.keep("kept", math.inf)
        answer = await (await router.model("busy")).generate(ASK)
        memory.available = 0
        await router.model("needed")
        assert await loaded(router) == ["pinned", "kept", "busy", "needed"]
        memory.available = MODEL_PATH.stat().st_size * 2
        await router.model("old")  # there is room
        assert await loaded(router) == ["pinned", "kept", "busy", "needed", "old"]
        answer.cancel()

    run(test, ("pinned", "kept", "busy", "old", "new", "needed"), pinned=("pinned",))


def test_one_that_cannot_be_loaded_leaves_the_others(tmp_path: Path) -> None:
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"GGUF")

    async def test(router: Router, clock: Clock) -> None:
        model = await router.model("good")
        for _ in range(2):
            with pytest.raises(EdgeError):
                await router.model("broken")
        assert await loaded(router) == ["good"]
        assert await model.tokenize("still there")

    async def with_router() -> None:
        router = Router({"good": CONFIG, "broken": EngineConfig(str(broken))})
        try:
            await test(router, Clock())
        finally:
            await router.close()

    asyncio.run(with_router())


@pytest.mark.parametrize("version", [1, 2])
def test_room_for_a_model_is_that_of_the_control_group(
    version: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ("limit_in_bytes", "usage_in_bytes") if version == 1 else ("max", "current")
    group, own = tmp_path / ("memory/box" if version == 1 else "box"), tmp_path / "own"
    group.mkdir(parents=True)
    own.write_text("4:memory:/box\n" if version == 1 else "0::/box\n")
    (group / "memory.stat").write_text("total_inactive_file 0\ninactive_file 0\n")
    (group / f"memory.{names[1]}").write_text("1000\n")
    monkeypatch.setattr(probe, "_CGROUPS", tmp_path)
    monkeypatch.setattr(probe, "_OWN_GROUPS", own)
    router = Router({"a": CONFIG})
    need = math.ceil(1.2 * MODEL_PATH.stat().st_size)
    for limit, is_short in ((1000 + need, False), (999 + need, True)):
        (group / f"memory.{names[0]}").write_text(f"{limit}\n")
        assert _needs_room(CONFIG, router.adapters("a"), router.memory) is is_short


def test_models_are_fetched_where_that_is_allowed() -> None:
    fetched: list[str] = []

    def fetch(name: str, progress: Callable[[int, int], None]) -> EngineConfig:
        if name == "gone":
            raise HubError("there is none")
        progress(1, 2)
        fetched.append(name)
        return CONFIG

    async def test(router: Router, clock: Clock) -> None:
        seen: list[tuple[int, int]] = []
        await asyncio.gather(*(router.fetch("owner/name:file", lambda *done: seen.append(done)) for _ in range(2)))
        assert (fetched, seen) == (["owner/name:file"], [(1, 2)])  # once
        assert list(router.names) == ["a", "b", "owner/name:file"]
        assert (await router.model("owner/name:file")).name == "owner/name:file"
        with pytest.raises(HubError):
            await router.fetch("gone", lambda *done: None)

    run(test, fetch=fetch)

    async def refuses(router: Router, clock: Clock) -> None:
        await router.fetch("a", lambda *done: None)  # is here
        with pytest.raises(NotAllowed, match="--allow-pull"):
            await router.fetch("c", lambda *done: None)

    run(refuses)


def test_a_fetch_ends_with_the_server() -> None:
    begun = threading.Event()

    def fetch(name: str, progress: Callable[[int, int], None]) -> EngineConfig:
        while True:  # a file of any size
            progress(1, 2)
            begun.set()

    async def test(router: Router, clock: Clock) -> None:
        fetching = asyncio.ensure_future(router.fetch("large", lambda *done: None))
        await asyncio.to_thread(begun.wait)
        await router.close()
        with pytest.raises(NotAllowed, match="the server is ending"):
            await fetching

    run(test, fetch=fetch)
