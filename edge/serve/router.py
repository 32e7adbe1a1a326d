"""Router: finds the models of a server by name, loads them on request, and unloads idle ones."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from devices.probe import available_memory
from edge.api.config import EngineConfig
from edge.models.wheels import Progress
from edge.serve.adapters import ServedAdapters
from edge.serve.caller import CALLER, check_administrator
from edge.serve.client import EngineClient
from edge.serve.drain import Drain
from edge.serve.events import Events
from edge.serve.fetches import Fetches
from edge.serve.lifetimes import LEAST_S, Lifetimes
from edge.serve.loads import Loads
from edge.serve.memory import ModelMemory
from edge.serve.model_files import ModelFacts, model_file
from edge.serve.model_names import ServedNames
from edge.serve.plan_devices import checked_plan, needs_no_plan
from edge.serve.replicas import Replicas
from edge.serve.workers import ModelWorkers

_BESIDE_WEIGHTS = 1.2  # memory that a model needs, as a multiple of the size of its files


class Router:
    """Implements `edge.serve.served.ServedModels`, which documents the methods. Use it in one event loop."""

    def __init__(
        self,
        configs: Mapping[str, EngineConfig],
        *,
        queue: int = 256,
        say: Callable[[str], None] = lambda line: None,
        lifetimes: Lifetimes | None = None,
        fetch: Callable[[str, Progress], EngineConfig] | None = None,
        any_name: bool = True,
        memory: int | None = None,
    ) -> None:
        """configs: configuration of each model by name, the default model first.
        queue: maximum waiting requests for each model.
        say: called with lines for users.
        lifetimes: idle times of models; None: models stay until another model needs their memory.
        fetch: fetches a model by its name and returns its configuration; None: fetching is not allowed.
        any_name: any name in a request stands for the model of a server that has only one.
        memory: memory budget of all models in bytes; None: each has its configured memory.

        Raises EngineError for adapters with invalid names.
        """
        self.configs = dict(configs)
        self._served = ServedNames(self.configs, any_name=any_name)
        self._queue, self._say = queue, say
        self._models: dict[str, EngineClient] = {}
        self._lifetimes = lifetimes or Lifetimes()
        several = len(configs) > 1 or not any_name
        self.memory = ModelMemory(memory, self._unload_longest_idle, several=several)
        # Held while a model is loaded, because each load must see the memory that is free.
        self._loading = asyncio.Lock()
        self._loads = Loads[EngineClient]()
        # Switches to other plans; references that protect the tasks from garbage collection.
        self._moves: set[asyncio.Task[None]] = set()
        self.fetches = Fetches(fetch)
        self.workers = ModelWorkers(self.configs, self._models)
        models, lifetimes = self._models, self._lifetimes
        self.drain = Drain(
            lambda: self._loads.are_awaited or any(_is_used(model, lifetimes) for model in models.values())
        )

    @property
    def names(self) -> Sequence[str]:
        """Names of the models, the default model first."""
        return list(self.configs)

    def resolve(self, name: str | None) -> str:
        return self._served.resolve(name)

    def adapters(self, name: str | None) -> ServedAdapters:
        return self._served.adapters[self._served.model(name)]

    async def model(self, name: str | None) -> EngineClient:
        self.drain.check_open()
        name = self._served.model(name)
        caller = CALLER.get()
        caller.hold(self._lifetimes.holders, name)
        self._lifetimes.add_user(name, caller.owner)
        model = self._running(name)
        if model is not None:  # returned without waiting for other models that are being loaded
            return model

        async def load() -> EngineClient:
            async with self._loading:
                model = self._running(name)
                if model is None:
                    if name in self._models:
                        await self._unload(name)
                    config = self.configs[name]
                    while _needs_room(config, self._served.adapters[name], self.memory):
                        if not await self._unload_longest_idle(name):
                            break
                    events = Events(name, self._say)
                    replicas = Replicas(name, config, partial(self.memory.process, name, events.say), events)
                    replicas.leave_out(self.workers.left_out)
                    model = EngineClient(replicas, self._queue)
                    try:
                        await replicas.start()
                    except BaseException:
                        await replicas.close()
                        raise
                    self._models[name] = model
                    self._lifetimes.use(name)
                return model

        return await self._loads.loaded(name, load)

    async def loaded(self) -> Sequence[EngineClient]:
        return [model for model in self._models.values() if model.replicas.failed is None]

    def file(self, name: str) -> ModelFacts:
        config = self.configs[self._served.model(name)]
        return model_file(config.path, config.mmproj)

    async def running(self, name: str) -> Mapping[str, Any]:
        model = self._models.get(name)
        return model.replicas.about if model is not None and model.replicas.failed is None else {}

    def health(self) -> Sequence[Mapping[str, Any]]:
        return [model.replicas.health for model in self._models.values()]

    def state(self, name: str) -> str:
        if self._loads.is_running(name):
            return "loading"
        model = self._models.get(name)
        if model is None:
            return "unloaded"
        return "loaded" if model.replicas.failed is None else "failed"

    async def use_plan(self, name: str | None, plan: Mapping[str, Any], devices: Collection[str] = ()) -> None:
        """Switch a model to another plan, see ServedModels.

        A switch that has begun continues if its client disconnects.
        """
        name = self._served.model(name)
        self.workers.check(plan)
        config, checked = self.configs[name], checked_plan(plan, devices)
        own_plan = None if needs_no_plan(checked, config) else dict(plan)
        config = replace(config, plan=own_plan, plan_name="the plan", workers=(), joining=False)
        move = asyncio.create_task(self._use(name, config))
        self._moves.add(move)
        move.add_done_callback(self._moves.discard)
        await asyncio.shield(move)

    async def _use(self, name: str, config: EngineConfig) -> None:
        """Run a model with another configuration, whether it is loaded or not. Other models are not affected."""
        before = self.configs[name]
        self.configs[name] = config
        try:
            model = await self.model(name)
            await model.replicas.use(self.memory.config(config))  # has an effect only if the model was already loaded
        except BaseException:
            loaded = self._models.get(name)
            self.configs[name] = before if loaded is None else loaded.replicas.config
            raise

    # --- idle models ---

    def keep(self, name: str | None, idle_s: float | None) -> None:
        caller = CALLER.get()
        self._lifetimes.keep(self._served.model(name), idle_s, None if caller.is_administrator else caller.owner)

    def expires_s(self, name: str) -> float:
        return self._lifetimes.left_s(name)

    async def unload(self, name: str | None) -> bool:
        name = self._served.model(name)
        async with self._loading:
            # At LEAST_S no other key wants the model to stay.
            may = CALLER.get().is_administrator or self.expires_s(name) <= LEAST_S
            if can := may and name in self._idle():
                await self._unload(name)
            return can

    async def unload_idle(self) -> None:
        """Unload the models whose idle time is over."""
        async with self._loading:
            for name, model in list(self._models.items()):
                if _is_used(model, self._lifetimes):
                    self._lifetimes.use(name)
                elif self.expires_s(name) <= 0:
                    self._say(f"{name}: unloaded because it is idle")
                    await self._unload(name)

    def _idle(self) -> list[str]:
        """Return the loaded models that no client uses and that may be unloaded."""
        return [
            name
            for name, model in self._models.items()
            if not self._lifetimes.stays(name) and not _is_used(model, self._lifetimes)
        ]

    async def fetch(self, name: str, progress: Progress) -> None:
        """Fetch a model, see ServedModels. A fetch that has begun continues if its client disconnects."""
        if name in self.configs:
            return
        check_administrator("have models fetched")

        def use(config: EngineConfig) -> None:
            self.configs[name] = config
            self._served.adapters[name] = ServedAdapters()

        await self.fetches.have(name, progress, use)

    async def close(self) -> None:
        """End all engine processes."""
        await self.fetches.close()
        await self._loads.close()
        for name in list(self._models):
            await self._unload(name, "the server is ending")
        await asyncio.gather(*self._moves, return_exceptions=True)

    def _running(self, name: str) -> EngineClient | None:
        """Return a loaded model, and mark it as used."""
        model = self._models.get(name)
        if model is None or model.replicas.failed is not None:
            return None
        self._lifetimes.use(name)
        return model

    async def _unload_longest_idle(self, needs: str) -> bool:
        """Unload the model that was unused for the longest time, except `needs`. Return False if there is none."""
        idle = [name for name in self._idle() if name != needs]
        if idle:
            longest = max(idle, key=self._lifetimes.idle_s)
            self._say(f"{longest}: unloaded because {needs or 'another program'} needs the memory")
            await self._unload(longest)
        return bool(idle)

    async def _unload(self, name: str, why: str = "the model was just unloaded; ask again to load it") -> None:
        """Unload a model, unless that has begun. why: message for requests that had found it loaded."""
        if (model := self._models.pop(name, None)) is not None:
            self._lifetimes.forget_users(name)
            await model.replicas.close(why)


def _is_used(model: EngineClient, lifetimes: Lifetimes) -> bool:
    """Return True if a request uses the model: it waits for an answer, or is about to start one."""
    return model.replicas.busy or lifetimes.holders[model.name] > 0


def _needs_room(config: EngineConfig, adapters: ServedAdapters, memory: ModelMemory) -> bool:
    """Return True if other models may have to be unloaded before a model is loaded.

    With a shared memory budget, the process of the model claims memory itself. Raises OSError if a file is missing.
    """
    files = [Path(path) for path in (config.path, config.mmproj) if path is not None]
    n_bytes = sum(path.stat().st_size for path in files) + adapters.file_bytes
    fits = n_bytes * _BESIDE_WEIGHTS <= available_memory()
    return memory.n_bytes is None and (config.options.memory is not None or not fits)
