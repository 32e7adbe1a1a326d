"""Test the members of a server's cluster, as their files change."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from devices.paths import authority_folder, config_folder
from devices.trust.roster import MEMBERS_FILE
from edge.browser.browsers import Browsers
from edge.cluster.roster import has_answered
from edge.serve.devices import members as module
from edge.serve.devices.members import Members
from tests.support.clock import Clock
from tests.support.deployments import own_folders


def test_members_follow_their_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own_folders(monkeypatch, tmp_path)
    clock = Clock()
    clock.now = time.time()
    clock.install(monkeypatch, module)  # type: ignore[arg-type]
    members = Members()

    def names() -> list[str]:
        return [member.name for member in members.known()]

    assert names() == []
    assert "no cluster yet" in members.problem
    module.create_cluster()
    assert (names(), members.problem) == ([], "")  # the owner is no member of the list
    module.invite("pi", 600)
    [pi] = members.known()
    assert (pi.name, pi.state, pi.address, pi.is_browser) == ("pi", "invited", "", False)
    has_answered("10.0.0.1:7070", "pi")
    clock.now += module._AGAIN_S - 1
    assert members.known()[0].address == ""
    clock.now += 1
    assert members.known()[0].address == "10.0.0.1:7070"
    browsers = Browsers(config_folder() / "browsers")
    browsers.invite("nas", 1200)
    module.invite("nas", 1200)
    assert [(member.name, member.is_browser) for member in members.known()] == [("pi", False), ("nas", True)]
    module.revoke("nas")
    assert (names(), browsers.names()) == (["pi"], [])
    module.invite("board", 1200)
    clock.now += 900
    assert names() == ["board"]  # the other invitation has expired
    file = authority_folder() / MEMBERS_FILE
    text = file.read_bytes()
    file.write_text("{")
    assert names() == []
    file.write_bytes(text)
    assert names() == ["board"]
    file.unlink()
    assert names() == []
    file.mkdir()
    assert names() == []
