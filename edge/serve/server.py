"""The HTTP server, from loading the first model to ending the last stream."""

from __future__ import annotations

import asyncio
import signal
import socket
import threading
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from types import FrameType, MappingProxyType
from typing import TYPE_CHECKING

import uvicorn
from starlette.applications import Starlette

from edge.api.config import EngineConfig
from edge.errors import EdgeError
from edge.models.wheels import Progress
from edge.net.channel import check_own
from edge.serve.app import create_app
from edge.serve.drain import Drain
from edge.serve.http.connections import bounded_connections
from edge.serve.http.listeners import BOTH, listeners
from edge.serve.lifetimes import Lifetimes
from edge.serve.oip.config import NetworkConfig
from edge.serve.oip.networks import Networks
from edge.serve.options import ServeOptions, check, tls_context
from edge.serve.plan_devices import devices_of
from edge.serve.router import Router
from edge.weights.elastic.signals import follow_memory_signals
from partition.model.file import ModelFile

if TYPE_CHECKING:
    from edge.serve.oip.grpc_server import GrpcServer

_STREAMS_END_S = 5  # seconds for streams to report the end of the server to their clients
_LOOK_S = 1.0  # interval of checks for idle models


def serve(
    configs: Mapping[str, EngineConfig],
    options: ServeOptions,
    *,
    queue: int,
    say: Callable[[str], None],
    listening: Callable[[str], None],
    fetch: Callable[[str, Progress], EngineConfig] | None = None,
    any_name: bool = True,
    networks: Mapping[str, NetworkConfig] = MappingProxyType({}),
) -> None:
    """Serve models until SIGINT or SIGTERM. After SIGTERM, running answers have `options.drain_s` seconds to end.

    SIGUSR1 reduces the models' memory to the minimum, SIGUSR2 restores it.

    configs: configurations by name; the first model is the default and is loaded at the start.
    queue: maximum waiting requests for each model.
    say: called with lines for users.
    listening: called with each URL once the server answers.
    fetch, any_name: see Router.
    networks: configurations of ONNX networks by name, which are loaded at the start.

    Raises TrustError as `check` does, OSError if the address is not available, and the errors of loading the first
    model.
    """
    if options.host not in BOTH:
        check_own(options.host)
    check(options)
    if options.grpc is not None:
        check_own(options.grpc[0])
        check(replace(options, host=options.grpc[0]))
    with ExitStack() as opened:
        sockets = [opened.enter_context(listener) for listener in listeners(options.host, options.port)]
        port = sockets[0].getsockname()[1]
        asyncio.run(
            _serve(
                configs,
                replace(options, port=port, devices=devices_of(configs)),
                queue,
                say,
                listening,
                sockets,
                fetch,
                any_name,
                networks,
            )
        )


async def _serve(
    configs: Mapping[str, EngineConfig],
    options: ServeOptions,
    queue: int,
    say: Callable[[str], None],
    listening: Callable[[str], None],
    sockets: Sequence[socket.socket],
    fetch: Callable[[str, Progress], EngineConfig] | None,
    any_name: bool,
    network_configs: Mapping[str, NetworkConfig],
) -> None:
    configs = _usable(configs, say) if len(configs) > 1 else configs
    lifetimes = Lifetimes(options.idle_unload_s, options.pinned)
    router = Router(
        configs, queue=queue, say=say, lifetimes=lifetimes, fetch=fetch, any_name=any_name, memory=options.memory
    )
    networks = Networks(network_configs, queue=queue, say=say, drain=router.drain) if network_configs else None
    loop = asyncio.get_running_loop()

    async def give_back(n_bytes: int | None) -> None:
        try:
            await router.memory.ask(n_bytes)
        except EdgeError as error:
            say(str(error))

    if threading.current_thread() is threading.main_thread():
        follow_memory_signals(lambda n_bytes: asyncio.run_coroutine_threadsafe(give_back(n_bytes), loop))
    app = create_app(router, options, networks)
    n_models = len(configs) + len(network_configs)

    grpc_server: GrpcServer | None = None
    grpc_url = ""
    if networks is not None and options.grpc is not None:
        from edge.serve.oip.grpc_server import GrpcServer

        grpc_server = GrpcServer(networks, options)
        grpc_url = f"grpc://{grpc_server.bind(*options.grpc)}"

    async def close() -> None:
        await app.state.devices.close()
        await router.close()
        if networks is not None:
            await networks.close()
        if grpc_server is not None:
            await grpc_server.close()

    server = _Server(uvicorn_config(app, options), router.drain, close, options.drain_s)
    tasks: list[asyncio.Task[None]] = []
    try:
        if networks is not None:
            await networks.start(needs_all=n_models == 1)
        await app.state.devices.start()
        try:
            if configs:
                await router.model(None)
        except (EdgeError, OSError) as error:
            if n_models == 1:
                raise
            say(f"{next(iter(configs))}: {error}")  # the other models answer
        for name in options.pinned:
            try:
                await router.model(name)
            except (EdgeError, OSError) as error:  # the other models answer
                say(f"{name}: {error}")
        tasks = [asyncio.create_task(_unload_idle(router))]
        host = f"[{options.host}]" if ":" in options.host else options.host
        scheme = "http" if options.tls_cert is None else "https"
        listening(f"{scheme}://{host}:{options.port}")
        if grpc_server is not None:
            await grpc_server.start()
            listening(grpc_url)
        await server.serve(sockets=list(sockets))
    finally:
        for task in tasks:
            task.cancel()
        await close()


def _usable(configs: Mapping[str, EngineConfig], say: Callable[[str], None]) -> Mapping[str, EngineConfig]:
    """Return the models without those at the beginning whose files are unusable, which are reported.

    Raises the error of the last model if no file is usable.
    """
    names = list(configs)
    for i, name in enumerate(names):
        try:
            ModelFile.open(configs[name].path)
            return {name: configs[name] for name in names[i:]}
        except (EdgeError, OSError) as error:
            if name == names[-1]:
                raise
            say(f"{name}: {error}")
    return configs


async def _unload_idle(router: Router) -> None:
    """Unload idle models periodically."""
    while True:
        await asyncio.sleep(_LOOK_S)
        await router.unload_idle()


def uvicorn_config(app: Starlette, options: ServeOptions) -> uvicorn.Config:
    """Return the configuration of the HTTP server. Raises TrustError as `tls_context` does."""
    tls = tls_context(options)
    return uvicorn.Config(
        app,
        http=bounded_connections(),
        ssl_context_factory=None if tls is None else lambda _config, _default: tls,
        log_config=None,  # its log lines go to our log
        log_level="error",
        access_log=False,
        lifespan="off",
        server_header=False,
        ws="none",
        timeout_graceful_shutdown=_STREAMS_END_S,
    )


class _Server(uvicorn.Server):
    """Server that lets running answers end after SIGTERM.

    It closes the engines before it shuts down, which ends the streams that the shutdown waits for.
    """

    def __init__(
        self, config: uvicorn.Config, drain: Drain, close_engines: Callable[[], Awaitable[None]], drain_s: float
    ) -> None:
        super().__init__(config)
        self._drain, self._close_engines, self._drain_s = drain, close_engines, drain_s

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Drain at the first SIGTERM. End at any other signal."""
        if sig != signal.SIGTERM or self._drain.begun:
            super().handle_exit(sig, frame)
            return
        self._captured_signals.append(sig)  # decides the exit code
        self._drain.begin()

    async def on_tick(self, counter: int) -> bool:
        """Return True if the server should end. Called every 0.1 s."""
        self.should_exit |= self._drain.is_over(self._drain_s)
        return await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Close the engines, then shut down."""
        await self._close_engines()
        await super().shutdown(sockets)
