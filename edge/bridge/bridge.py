"""Serve pages to browsers until the end: `edge worker --browser` and `edge cluster invite NAME --browser`."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import uvicorn

from devices.discovery import announced_addresses
from devices.errors import DiscoveryError
from devices.names import join_address
from edge.bridge.app import create_app
from edge.bridge.page import Page
from edge.bridge.page_worker import WorkerPlace, free_port
from edge.browser.browsers import Browsers
from edge.net.channel import is_loopback
from edge.serve.http.connections import bounded_connections
from edge.serve.http.listeners import listeners

_STREAMS_END_S = 2


@dataclass(frozen=True)
class BridgeOptions:
    """Options of a bridge."""

    host: str  # address to listen on, for pages and for the links of other devices
    port: int  # 0: any free port
    folder: Path  # records of the browsers
    cache: Path  # folder for slices on their way to pages
    certificate: Path | None  # PEM file with the certificate and its key; None: no TLS, only on loopback


def page_address(options: BridgeOptions, port: int) -> str:
    """Return the address of the page."""
    scheme = "http" if options.certificate is None else "https"
    return f"{scheme}://{join_address(shown_host(options.host), port)}/"


def shown_host(host: str) -> str:
    """Return the address at which other devices reach this machine, or `host` if it has no network."""
    if is_loopback(host):
        return host
    try:
        return announced_addresses(host)[0]
    except (DiscoveryError, IndexError):
        return host


def serve(options: BridgeOptions, listening: Callable[[int], None]) -> None:
    """Serve pages until SIGINT or SIGTERM.

    listening: called with the port once pages are served.
    Raises OSError if the address is not available, or if the certificate cannot be read.
    """
    with ExitStack() as opened:
        sockets = [opened.enter_context(socket) for socket in listeners(options.host, options.port)]
        asyncio.run(_serve(options, sockets, listening))


async def _serve(options: BridgeOptions, sockets: Sequence[object], listening: Callable[[int], None]) -> None:
    browsers, pages = Browsers(options.folder), dict[str, Page]()

    def page_of(name: str) -> Page:
        if name not in pages:
            pages[name] = Page(name, _place(name), browsers)
        return pages[name]

    def _place(name: str) -> WorkerPlace:
        def port() -> int:
            if not browsers.port(name):
                browsers.remember_port(name, free_port(options.host))
            return browsers.port(name)

        secure = options.certificate is not None
        return WorkerPlace(options.host, port, browsers.credentials(name) if secure else None, options.cache / name)

    tls = None
    if options.certificate is not None:
        tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        tls.load_cert_chain(options.certificate)
    config = uvicorn.Config(
        create_app(browsers, page_of, secure=tls is not None),
        http=bounded_connections(),
        ssl_context_factory=None if tls is None else lambda _config, _default: tls,
        log_config=None,
        log_level="error",
        access_log=False,
        lifespan="off",
        server_header=False,
        ws="none",
        timeout_graceful_shutdown=_STREAMS_END_S,
    )
    server = _Server(config, pages)
    try:
        listening(sockets[0].getsockname()[1])  # type: ignore[attr-defined]
        await server.serve(sockets=list(sockets))  # type: ignore[arg-type]
    finally:
        for page in pages.values():
            await page.close()


class _Server(uvicorn.Server):
    """Server that closes the pages first, which ends the streams that the shutdown waits for."""

    def __init__(self, config: uvicorn.Config, pages: dict[str, Page]) -> None:
        super().__init__(config)
        self._pages = pages

    async def shutdown(self, sockets: list[object] | None = None) -> None:  # type: ignore[override]
        """Close the pages, then shut down."""
        for page in self._pages.values():
            await page.close()
        await super().shutdown(sockets)  # type: ignore[arg-type]
