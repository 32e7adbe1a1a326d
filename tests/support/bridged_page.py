"""A page in node that has joined a real bridge, and engines of ONNX stages at it."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from edge.browser.onnx_engine import PageOnnxEngine
from tests.support.bridge_process import LIMIT_S, Bridge, running_bridge
from tests.support.helpers import until
from tests.support.page_bridge import node_page

MEMORY = 1 << 30
_JOIN_S = 180.0  # only against a hang: a page measures, and computes a small model


@contextmanager
def bridged_page(node: str, folder: Path, *options: str, threads: int = 2, lost_s: float = LIMIT_S) -> Iterator[Bridge]:
    """Yield a bridge with a page named "phone" that computes, and whose worker runs. options: of node_page.mjs."""
    with running_bridge(folder / "bridge", lost_s, check=True) as bridge:
        token = bridge.browsers.invite("phone", 600)
        with node_page(node, bridge.url, folder / "store", *options, threads=threads, token=token):
            until(lambda: bridge.is_ready("phone"), "the page is ready", _JOIN_S)
            until(lambda: _listens(bridge.port("phone")), "the page has a worker", _JOIN_S)
            yield bridge


def at_page(bridge: Bridge, path: Path, threads: int = 1, provider: str | None = None) -> PageOnnxEngine:
    """Return an engine at the page. It takes the place of `edge.onnx.stage.open_here`."""
    return PageOnnxEngine(path, threads, provider, bridge.folder("phone"), MEMORY)


def _listens(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port)).close()
    except OSError:
        return False
    return True
