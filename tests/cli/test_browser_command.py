"""Test links for browsers: they are printed, they work while a command serves, and they end with the device."""

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from tests.support import ROOT
from tests.support.helpers import run_edge, until

_LIMIT_S = 120  # only against a hang


@pytest.fixture
def env(tmp_path: Path) -> dict[str, str]:
    folders = {f"XDG_{name}_HOME": str(tmp_path / name.lower()) for name in ("CACHE", "CONFIG", "STATE")}
    return {**os.environ, **folders, "TMPDIR": str(tmp_path)}


@contextmanager
def serving(*words: str, env: dict[str, str]) -> Iterator["subprocess.Popen[str]"]:
    command = [sys.executable, "-m", "apps.cli", *words]
    with subprocess.Popen(
        command, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            yield process
        finally:
            process.terminate()
            process.communicate(timeout=_LIMIT_S)


def joins(link: str) -> int:
    """The status of joining with a link."""
    url, _, token = link.partition("#")
    return httpx.post(f"{url}api/join", json={"token": token}, verify=False).status_code  # own authority


def test_without_a_cluster_the_page_is_on_this_machine(env: dict[str, str]) -> None:
    with serving("worker", "--browser", "--listen", "127.0.0.1:0", env=env) as process:
        assert process.stdout is not None
        link = process.stdout.readline().strip()
        assert link.startswith("http://127.0.0.1:")
        assert joins(link) == 200
        assert joins(link) == 403
        process.send_signal(signal.SIGTERM)
        assert process.wait(_LIMIT_S) == 128 + signal.SIGTERM  # as `edge serve`
    done = run_edge("worker", "--browser", "--listen", "0.0.0.0:0", env=env, only_env=True)
    assert done.returncode == 2
    assert "edge cluster init" in done.stderr


def test_a_cluster_invites_and_revokes_browsers(env: dict[str, str]) -> None:
    """A second invitation uses the page that is served already."""
    needs_cluster = run_edge("cluster", "invite", "phone", "--browser", env=env, only_env=True)
    assert needs_cluster.returncode == 3
    assert run_edge("cluster", "init", env=env, only_env=True).returncode == 0
    with socket.create_server(("0.0.0.0", 0)) as server:
        port = server.getsockname()[1]
    with serving(
        "cluster", "invite", "phone", "--browser", "--listen", f"0.0.0.0:{port}", "--json", env=env
    ) as process:
        assert process.stdout is not None
        text = ""
        while not text.endswith("}\n"):
            text += process.stdout.readline()
        phone = json.loads(text)
        assert phone.keys() == {"name", "link", "expires"}
        assert phone["link"].startswith("https://")
        done = run_edge("cluster", "invite", "tablet", "--browser", env=env, only_env=True)
        tablet = done.stdout.strip()
        assert done.returncode == 0, done.stderr
        assert tablet.partition("#")[0] == phone["link"].partition("#")[0]
        assert joins(tablet) == 200
        assert run_edge("cluster", "revoke", "phone", env=env, only_env=True).returncode == 0
        until(lambda: joins(phone["link"]) == 403, "the link of a revoked browser is refused")
