"""A page in node, which computes for a stand-in of the bridge."""

import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.support.page_bridge import PageBridge, node_page


@pytest.fixture(scope="session")
def node() -> str:
    """Return the program node. Skip the test without it; fail in CI."""
    program = shutil.which("node")
    version = (
        subprocess.run([program, "--version"], capture_output=True, text=True, check=True).stdout if program else ""
    )
    if program and int(version.lstrip("v").split(".")[0]) >= 18:
        return program
    if os.environ.get("CI", "").lower() == "true":
        pytest.fail(f"tests of the browser's page need node 18 or newer, found: {version.strip() or 'none'}")
    pytest.skip("needs node 18 or newer")


Open = Callable[..., PageBridge]


@pytest.fixture(scope="module")
def open_page(node: str) -> Iterator[Open]:
    """Return a function that starts a page in node and returns its bridge."""
    with ExitStack() as closing:

        def start(store: Path, *options: str, threads: int = 2, single: bool = False) -> PageBridge:
            bridge = PageBridge()
            closing.callback(bridge.close)
            closing.enter_context(node_page(node, bridge.url, store, *options, threads=threads, single=single))
            bridge.hello = bridge.event("hello")
            return bridge

        yield start
