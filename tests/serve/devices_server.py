"""A real server whose devices a test invites, and short names for its requests."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from edge.api.config import EngineConfig
from edge.models.demo import MODEL_PATH
from edge.serve.app import create_app
from edge.serve.options import ServeOptions
from edge.serve.router import Router
from tests.serve.conftest import OPTIONS
from tests.serve.serving import serving
from tests.support.helpers import until
from tests.support.workers import Worker, worker

NAME = MODEL_PATH.stem


class Server:
    """A server, and short names for its requests."""

    def __init__(self, url: str) -> None:
        self.url = url

    def cluster(self) -> dict[str, Any]:
        value: dict[str, Any] = httpx.get(f"{self.url}/v1/cluster", timeout=30).json()
        return value

    def device(self, name: str) -> dict[str, Any]:
        return next((device for device in self.cluster()["devices"] if device["name"] == name), {})

    def post(self, path: str, **values: Any) -> dict[str, Any]:
        response = httpx.post(f"{self.url}{path}", json=values, timeout=60)
        assert response.status_code == 200, response.text
        value: dict[str, Any] = response.json()
        return value

    def delete(self, path: str) -> None:
        response = httpx.delete(f"{self.url}{path}", timeout=60)
        assert response.status_code == 200, response.text

    def model(self) -> dict[str, Any]:
        model: dict[str, Any] = self.cluster()["models"][0]
        return model

    def names(self) -> list[str]:
        """Names of the devices of the running plan."""
        return [device["name"] for device in self.model()["devices"] if device["rank"] is not None]


class Stream:
    """An answer of many tokens that a thread reads."""

    def __init__(self, server: Server, *, again: bool = False) -> None:
        """again: ask again when an answer has ended, because a context is full after about 1,000 tokens."""
        self._again = again
        self.pieces: list[str] = []
        self.finish: str | None = None
        self._stops = False
        self._request = {
            "model": NAME, "messages": [{"role": "user", "content": "Count."}], "temperature": 0, "stream": True,
            "lark": "start: /[a-z ]{20000,}/",
        }  # fmt: skip
        self._server = server
        self._thread = threading.Thread(target=self._read)
        self._thread.start()
        until(lambda: len(self.pieces) > 3, "the first tokens")

    def _read(self) -> None:
        self._read_one()
        while self._again and not self._stops:
            self._read_one()

    def _read_one(self) -> None:
        with httpx.stream("POST", f"{self._server.url}/v1/chat/completions", json=self._request, timeout=60) as lines:
            for line in lines.iter_lines():
                if self._stops:
                    return
                if line.startswith("data: {"):
                    choice = json.loads(line.removeprefix("data: "))["choices"][0]
                    self.pieces.append(choice["delta"].get("content") or "")
                    self.finish = choice["finish_reason"] or self.finish

    def stop(self) -> None:
        self._stops = True
        self._thread.join(60)


def joining(folder: Path, token: str) -> AbstractContextManager[Worker]:
    """A worker that shows a certificate, which one that listens only to this machine does not."""
    return worker(folder, "--threads", "1", "--no-announce", "--join", token, listen="0.0.0.0:0")


def here(device: Worker) -> str:
    return f"127.0.0.1:{device.port}"


@contextmanager
def serving_devices(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    """A server with the bundled model. folder: its own folders, and those of workers."""
    for name in ("CACHE", "CONFIG", "STATE"):
        monkeypatch.setenv(f"XDG_{name}_HOME", str(folder / "own" / name))
    router = Router({NAME: EngineConfig(str(MODEL_PATH), OPTIONS, 0)})
    app = create_app(router, ServeOptions())

    async def close() -> None:
        await app.state.devices.close()
        await router.close()

    with serving(app, at_end=close) as url:
        yield Server(url)
