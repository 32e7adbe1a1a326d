"""Test the devices of a server: a real server invites, uses, pauses, loses and removes real workers on loopback."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from devices.paths import config_folder
from edge.browser.browsers import Browsers
from edge.models.demo import MODEL_PATH
from edge.models.local_slices import OwnSlices
from edge.planning.arrange import shared
from partition.model.file import ModelFile
from tests.serve.devices_server import NAME, Server, Stream, here, joining, serving_devices
from tests.support.helpers import until
from tests.support.workers import worker


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    with serving_devices(tmp_path, monkeypatch) as served:
        yield served


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


def test_a_page_that_opens_the_link_becomes_a_device_without_a_cluster(server: Server, tmp_path: Path) -> None:
    link = server.post("/v1/cluster/invitations", name="phone", browser=True)["link"]
    invited = server.device("phone")
    assert (invited["state"], invited["kind"], invited["since"] < 60) == ("joining", "browser", True)
    assert "its link is opened there" in invited["text"]
    assert httpx.get(link).status_code == 200
    browsers = Browsers(config_folder() / "browsers")
    browsers.join(link.partition("#")[2])  # as the page does
    with worker(tmp_path / "phone", "--name", "phone", "--no-announce") as page:  # as the bridge starts it
        browsers.remember_port("phone", page.port)
        until(lambda: server.device("phone")["state"] == "ready", "the page to join")
    until(lambda: server.device("phone")["state"] == "lost", "its loss")
    assert "open its page" in server.device("phone")["text"]
    server.delete("/v1/cluster/devices/phone?revoke=true")
    assert server.device("phone") == {}
    assert browsers.names() == []
