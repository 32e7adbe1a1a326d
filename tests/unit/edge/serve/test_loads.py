"""Test loads of models: a load outlives its client, unless another client waits for another model."""

from __future__ import annotations

import asyncio
import random

import pytest

from edge.errors import EngineGone, NotEnoughMemory
from edge.serve.loads import Loads

WAIT_S = 60.0


async def settled() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


class Loading:
    """Loads that end when a test says so."""

    def __init__(self) -> None:
        self.loads: Loads[str] = Loads()
        self.running: dict[str, asyncio.Future[str]] = {}

    def ask(self, name: str) -> asyncio.Task[str]:
        async def load() -> str:
            own = self.running[name] = asyncio.get_running_loop().create_future()
            try:
                return await own
            finally:
                if self.running.get(name) is own:
                    del self.running[name]

        return asyncio.create_task(self.loads.loaded(name, load))


def test_a_load_whose_client_left_makes_way_for_one_that_is_waited_for() -> None:
    async def run() -> None:
        own = Loading()
        first, second = own.ask("a"), own.ask("b")
        await settled()
        assert set(own.running) == {"a", "b"}
        first.cancel()  # now only b is waited for
        await settled()
        assert set(own.running) == {"b"}
        assert not own.loads.is_running("a")
        second.cancel()  # now nothing is waited for, and the client may ask again
        await settled()
        assert set(own.running) == {"b"}
        again = own.ask("b")
        await settled()
        own.running["b"].set_result("B")
        assert await again == "B"
        await settled()
        assert not own.loads.is_running("b")
        assert not own.loads.are_awaited

    asyncio.run(asyncio.wait_for(run(), WAIT_S))


@pytest.mark.parametrize("seed", range(20))
def test_no_load_goes_on_for_nobody_while_a_client_waits_for_another(seed: int) -> None:
    rng = random.Random(seed)

    async def run() -> None:
        own = Loading()
        clients: list[tuple[str, asyncio.Task[str]]] = []
        for _ in range(80):
            action = rng.random()
            if action < 0.5:
                name = rng.choice("abc")
                clients.append((name, own.ask(name)))
            elif action < 0.8 and clients:
                clients.pop(rng.randrange(len(clients)))[1].cancel()
            elif own.running:
                name = rng.choice(sorted(own.running))
                if rng.random() < 0.5:
                    own.running[name].set_result(name.upper())
                else:
                    own.running[name].set_exception(NotEnoughMemory("no room"))
            await settled()
            for name, client in [pair for pair in clients if pair[1].done()]:
                assert isinstance(client.exception(), NotEnoughMemory) or client.result() == name.upper()
            clients = [pair for pair in clients if not pair[1].done()]
            awaited = {name for name, _ in clients}
            assert own.loads.are_awaited == bool(awaited)
            assert awaited <= set(own.running)
            assert {name for name in "abc" if own.loads.is_running(name)} == set(own.running)
            if awaited:
                assert set(own.running) == awaited
        await own.loads.close()
        for _, client in clients:
            with pytest.raises(EngineGone):
                await client
        assert not own.running
        assert not own.loads.are_awaited

    asyncio.run(asyncio.wait_for(run(), WAIT_S))
