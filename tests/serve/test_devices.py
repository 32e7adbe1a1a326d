"""Test the devices of a server: a real server invites, uses, pauses, loses and removes real workers on loopback."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import httpx
import pytest

from edge.api.config import EngineConfig
from edge.models.demo import MODEL_PATH
from edge.models.local_slices import OwnSlices
from edge.planning.arrange import shared
from edge.serve.app import create_app
from edge.serve.options import ServeOptions
from edge.serve.router import Router
from partition.model.file import ModelFile
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

    def __init__(self, server: Server) -> None:
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


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    for name in ("CACHE", "CONFIG", "STATE"):
        monkeypatch.setenv(f"XDG_{name}_HOME", str(tmp_path / "own" / name))
    router = Router({NAME: EngineConfig(str(MODEL_PATH), OPTIONS, 0)})
    app = create_app(router, ServeOptions())

    async def close() -> None:
        await app.state.devices.close()
        await router.close()

    with serving(app, at_end=close) as url:
        yield Server(url)


def test_a_device_is_invited_used_paused_lost_and_removed(server: Server, tmp_path: Path) -> None:
    file = ModelFile.open(MODEL_PATH)
    assert [device["name"] for device in server.cluster()["devices"]] == ["this device"]
    token = server.post("/v1/cluster/invitations", name="pi", init=True)
    assert token["command"] == f"edge worker --join {token['token']}"
    assert server.device("pi")["state"] == "joining"
    assert "edge worker --join" in server.device("pi")["text"]
    second = server.post("/v1/cluster/invitations", name="nas")["token"]
    with joining(tmp_path / "pi", token["token"]) as pi, joining(tmp_path / "nas", second) as nas:
        for name, device in (("pi", pi), ("nas", nas)):
            server.post(f"/v1/cluster/devices/{name}", address=here(device))
        until(lambda: [server.device(name)["state"] for name in ("pi", "nas")] == ["ready"] * 2, "both to join")
        pi_now = server.device("pi")
        assert (pi_now["member"], pi_now["secure"], pi_now["kind"]) == (True, True, "worker")
        assert 0 < pi_now["memory"]["memory"]["free"] <= pi_now["memory"]["memory"]["total"]
        assert 0 < pi_now["memory"]["disk"]["free"] <= pi_now["memory"]["disk"]["total"]
        link = next(link for link in server.cluster()["links"] if link["to"] == "pi")
        assert (link["from"], link["bytes_per_s"]) == ("this device", None)
        assert 0 < link["latency_s"] < 10

        digest = OwnSlices().model_digest(file.path)
        plan = shared({"local": 2.0, here(pi): 1.0, here(nas): 1.0}, "pipeline", file, digest)
        server.post("/v1/plan", plan=plan.to_json())
        assert server.names() == ["this device", "pi", "nas"]
        [part] = server.device("nas")["models"]
        assert (part["model"], part["layers"][1], part["n_layers"]) == (NAME, 8, 8)
        links = {(link["from"], link["to"]): link for link in server.cluster()["links"]}
        assert all(link["bytes_per_s"] for ends, link in links.items() if ends != ("this device", "nas")), links

        stream = Stream(server)
        until(lambda: server.device("pi")["busy"] > 0, "its work to be seen")
        assert server.device("pi")["state"] == "computing"
        server.post("/v1/cluster/devices/pi", paused=True)
        until(lambda: server.names() == ["this device", "nas"], "a plan without it")
        assert server.device("pi")["state"] == "paused"
        assert any("pi is left out: going on with" in event["text"] for event in server.model()["events"])
        server.post("/v1/cluster/devices/pi", paused=False)
        until(lambda: server.names() == ["this device", "pi", "nas"], "a plan with it")
        assert stream.finish is None
        nas.kill()
        until(lambda: server.device("nas")["state"] == "lost", "its loss")
        until(lambda: "going on with" in server.device("nas")["text"], "what happened to the answer")
        until(lambda: "nas" not in server.names(), "a plan without it")
        until(lambda: "1 answer goes on from the tokens" in server.device("nas")["text"], "what became of the answer")
        n_pieces = len(stream.pieces)
        until(lambda: len(stream.pieces) > n_pieces, "further tokens")
        assert stream.finish is None
        stream.stop()

        server.delete("/v1/cluster/devices/nas?revoke=true")
        cluster = server.cluster()
        assert "nas" not in [device["name"] for device in cluster["devices"]]
        assert cluster["removed"] == ["nas"]
        response = httpx.post(f"{server.url}/v1/plan", json={"plan": plan.to_json()})
        assert response.status_code == 403
        assert "paused or removed" in response.json()["error"]["message"]
