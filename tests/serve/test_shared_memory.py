"""Test that models of one server share its memory: both stay loaded if possible, and answer as each does alone."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace

import httpx
import pytest

from edge.api.config import EngineConfig
from edge.errors import EngineGone, NotAllowed, NotEnoughMemory
from edge.llm.options import EngineOptions
from edge.models import shapes, synth
from edge.serve.app import create_app
from edge.serve.client import EngineClient
from edge.serve.engine_child import EngineChild
from edge.serve.lifetimes import Lifetimes
from edge.serve.memory import ModelMemory
from edge.serve.options import ServeOptions
from edge.serve.router import Router
from edge.serve.served import Generation
from edge.weights.elastic import shares
from tests.serve.scripted import ScriptedModels
from tests.serve.serving import serving

MIB = 1 << 20
BOTH = 420 * MIB  # one model of 170 MB in memory whole, and another one paged
ONE = 220 * MIB
ASK = Generation(prompt=[5, 300, 17, 401, 88], max_tokens=8, sampling={"temperature": 0}, logprobs=0)


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> EngineConfig:
    """A model of 170 MB, which pages in a small budget."""
    path = tmp_path_factory.mktemp("model") / "model.gguf"
    shape = shapes.shape("llama", layers=5, embd=1024, ff=4096, heads=8, kv=4, vocab=1024)
    synth.synthesize(path, shape, "f16", pool_bytes=16 << 20)  # fresh values for each row take a second
    return EngineConfig(str(path), EngineOptions(threads=1, context=128, batch=32, memory=BOTH), prefix_cache=0)


def run(
    config: EngineConfig | Mapping[str, EngineConfig], memory: int | None, test: Callable[[Router], Awaitable[None]]
) -> list[str]:
    """Run a test with two models that share memory; return what was said."""
    said: list[str] = []
    configs = {"a": config, "b": config} if isinstance(config, EngineConfig) else config

    async def with_router() -> None:
        router = Router(configs, memory=memory, say=said.append, lifetimes=Lifetimes())
        try:
            await test(router)
        finally:
            await router.close()

    asyncio.run(with_router())
    return said


async def tokens(model: EngineClient) -> list[int | None]:
    return [piece.token_id async for piece in await model.generate(ASK)]


async def until(condition: Callable[[], bool]) -> None:
    """Wait for what processes do by themselves."""
    for _ in range(1200):
        if condition():
            return
        await asyncio.sleep(0.05)
    raise AssertionError("it did not come")


def test_two_models_share_the_memory_and_give_it_back_when_asked(config: EngineConfig) -> None:
    async def test(router: Router) -> None:
        first = await router.model("a")
        alone = await tokens(first)
        whole = router.memory.shares()["a"]
        assert whole.most <= whole.limit <= BOTH
        second = await router.model("b")
        assert await tokens(second) == alone
        both = router.memory.shares()
        assert [model.name for model in await router.loaded()] == ["a", "b"]
        assert both["a"].limit < whole.limit
        for share in both.values():
            assert share.least <= share.limit
        assert sum(share.limit for share in both.values()) <= BOTH
        assert await tokens(first) == alone
        router.keep("a", float("inf"))
        router.keep("b", float("inf"))
        await router.memory.ask(0)
        await until(lambda: all(share.resident <= share.least for share in router.memory.shares().values()))
        assert [await tokens(first), await tokens(second)] == [alone, alone]
        await router.memory.ask(None)
        router.keep("b", None)
        await router.memory.ask(both["a"].least)
        assert [model.name for model in await router.loaded()] == ["a"]
        assert await tokens(first) == alone

    said = run(config, BOTH, test)
    assert "b: unloaded because another program needs the memory" in said


def test_an_idle_model_leaves_where_both_have_no_room_and_one_in_use_stays(config: EngineConfig) -> None:
    async def test(router: Router) -> None:
        first = await router.model("a")
        alone = await tokens(first)
        second = await router.model("b")
        assert [model.name for model in await router.loaded()] == ["b"]
        assert await tokens(second) == alone
        router.keep("b", float("inf"))
        with pytest.raises(NotEnoughMemory, match=r"a needs at least .* of 220 MiB that are shared .* are available"):
            await router.model("a")
        assert await tokens(second) == alone

    said = run(config, ONE, test)
    assert "a: unloaded because b needs the memory" in said


def test_memory_moves_to_the_model_that_is_used(config: EngineConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shares, "SETTLED_S", 0.1)
    monkeypatch.setattr(shares, "_MEAN_S", 1.0)

    async def test(router: Router) -> None:
        first, second = await router.model("a"), await router.model("b")
        alone = await tokens(second)
        for busy, name, idle in ((first, "a", "b"), (second, "b", "a")):
            for _ in range(200):
                assert await tokens(busy) == alone
                now = router.memory.shares()
                beyond = {model: share.limit - share.least for model, share in now.items()}
                if moved := beyond[name] >= 2 * beyond[idle]:
                    break
            assert moved, now
            assert now[idle].limit >= now[idle].least
            assert sum(share.limit for share in now.values()) <= BOTH

    run(config, BOTH, test)


def test_a_model_whose_process_ended_asks_again(config: EngineConfig) -> None:
    async def test(router: Router) -> None:
        first, second = await router.model("a"), await router.model("b")
        alone = await tokens(first)
        child = first.replicas.processes[0]._child
        assert child is not None
        child.process.kill()
        await until(lambda: first.replicas.restarts == 1 and first.replicas.processes[0]._child not in (None, child))
        assert await tokens(first) == await tokens(second) == alone
        assert sum(share.limit for share in router.memory.shares().values()) <= BOTH
        assert len(router.memory._shares._members) == 2

    run(config, BOTH, test)


@pytest.mark.parametrize("how", ["killed", "refused"])
def test_a_model_that_is_not_loaded_leaves_no_share(
    config: EngineConfig, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever ends it: the other one has its memory back."""
    children: list[EngineChild] = []

    class Child(EngineChild):
        async def start(self, config: EngineConfig, *, resumes: bool = False, left_out: Sequence[str] = ()) -> None:
            children.append(self)
            await super().start(config, resumes=resumes, left_out=left_out)

    monkeypatch.setattr("edge.serve.process.EngineChild", Child)
    options = replace(config.options, context=1 << 17) if how == "refused" else config.options
    configs = {"a": config, "b": replace(config, options=options)}

    async def test(router: Router) -> None:
        first = await router.model("a")
        router.keep("a", float("inf"))
        alone, whole = await tokens(first), router.memory.shares()["a"].limit
        loading = asyncio.create_task(router.model("b"))
        if how == "killed":
            await until(lambda: "b" in router.memory.shares() or loading.done())
            children[-1].process.kill()
        with pytest.raises(EngineGone if how == "killed" else NotEnoughMemory):
            await loading
        await until(lambda: router.memory.shares()["a"].limit == whole)
        assert [member.name for member in router.memory._shares._members] == ["a"]
        assert await tokens(first) == alone

    run(configs, BOTH, test)


def test_memory_is_asked_for_over_http_and_told_with_figures() -> None:
    models = ScriptedModels()
    with serving(create_app(models, ServeOptions())) as url:
        figures = {"limit": 2048, "resident": 1024, "least": 512, "most": 4096, "use": 0.5}
        name = models.scripted.name
        expected = {"memory_bytes": 2048, "target_bytes": None, "models": {name: figures}}
        assert httpx.get(f"{url}/v1/memory").json() == expected
        for size, n_bytes in (("1KiB", 1024), (0, 0), (None, None)):
            answer = httpx.post(f"{url}/v1/memory", json={"memory": size}).json()
            assert answer == {**expected, "target_bytes": n_bytes}
            assert models.memory.target == n_bytes
        for wrong, words in (("much", "memory needs a size such as 2GiB"), (-1, "bytes from 0 on"), (True, "memory")):
            reply = httpx.post(f"{url}/v1/memory", json={"memory": wrong})
            assert reply.status_code == 400
            assert words in reply.json()["error"]["message"]
        assert httpx.get(f"{url}/v1/cluster").json()["models"][0]["memory"] == figures
        text = httpx.get(f"{url}/metrics").text
        for metric, value in (("share_bytes", 2048), ("resident_bytes", 1024), ("use_ratio", 0.5)):
            assert f'edge_memory_{metric}{{model="{name}"}} {float(value)}\n' in text


def test_who_asks_last_is_followed() -> None:
    unloaded: list[str] = []

    async def unload_one(needs: str) -> bool:
        unloaded.append(needs)
        await memory.ask(None)
        return True

    memory = ModelMemory(1000, unload_one, several=True)
    member = memory._shares.join("a", lambda *limit: None)
    memory._shares.claim(member, 500, 900, "a")
    asyncio.run(asyncio.wait_for(memory.ask(0), 30))
    assert (unloaded, memory.target) == ([""], None)


def test_without_a_budget_nothing_is_shared(config: EngineConfig) -> None:
    async def test(router: Router) -> None:
        assert router.memory.shares() == {}
        with pytest.raises(NotAllowed, match="start it with --memory"):
            await router.memory.ask(0)

    run(config, None, test)


@pytest.mark.parametrize("target", [0, 99, 100, 101, 299, 300, 301, 599, 600, 601, None])
def test_only_as_many_models_leave_as_the_memory_asks_for(target: int | None) -> None:
    least = {"first": 300, "second": 200, "third": 100}  # in the order in which they would leave

    async def unload_one(name: str) -> bool:
        assert name == ""
        return bool(least) and bool(least.pop(next(iter(least))))

    async def run() -> None:
        memory = ModelMemory(1000, unload_one, several=True)
        members = {name: shares.Share(least=n) for name, n in least.items()}
        memory.shares = lambda: {name: members[name] for name in least}  # type: ignore[method-assign]
        await memory.ask(target)

    asyncio.run(run())
    n_left = next((n for n in (3, 2, 1) if target is None or sum((100, 200, 300)[:n]) <= target), 0)
    assert list(least) == ["first", "second", "third"][3 - n_left :]
