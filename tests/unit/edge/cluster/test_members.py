"""Tests of the addresses of devices by their names."""

from pathlib import Path

import pytest

from devices import discovery
from devices.errors import DiscoveryError
from devices.paths import config_folder
from edge.browser.browsers import Browser, Browsers
from edge.cluster import members, roster


def test_a_browser_of_this_machine_is_known_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for kind in ("CONFIG", "STATE", "DATA"):
        monkeypatch.setenv(f"XDG_{kind}_HOME", str(tmp_path))
    browsers = Browsers(config_folder() / members.BROWSERS_FOLDER)
    assert members.address_of("phone") == "phone:7070"
    browsers.invite("phone", 60)
    assert members.address_of("phone") == "phone:7070"  # its worker has no port yet
    browsers._save(Browser("phone", port=41234))
    assert members.address_of("phone") == "127.0.0.1:41234"
    monkeypatch.setattr(roster, "joined_members", lambda: ["phone"])
    assert [entry.address for entry in roster._missing([])] == ["127.0.0.1:41234"]  # of `edge devices`
    assert members.address_of("phone:41235") == "phone:41235"
    assert members.address_of("tablet") == "tablet:7070"
    monkeypatch.setattr(members, "is_owned", lambda folder: True)
    monkeypatch.setattr(discovery, "announced_addresses", lambda host: ["192.168.1.5", "10.0.0.1"])
    assert members.address_of("phone") == "192.168.1.5:41234"

    def refuse(host: str) -> list[str]:
        raise DiscoveryError("no network")

    monkeypatch.setattr(discovery, "announced_addresses", refuse)
    assert members.address_of("phone") == "127.0.0.1:41234"
