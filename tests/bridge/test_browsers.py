"""Test the records of browsers: a link works once and in time, and a key is one browser's."""

from contextlib import closing
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, rule

from devices.errors import TrustError
from devices.trust import credentials
from edge.browser.browsers import BridgeLock, Browsers
from tests.support.trust import Cluster
from transport.errors import Refused


def test_a_link_works_once(tmp_path: Path) -> None:
    browsers = Browsers(tmp_path)
    token = browsers.invite("phone", 60)
    name, key = browsers.join(token)
    assert name == "phone"
    assert browsers.name_of(key) == "phone"
    with pytest.raises(Refused, match="used already"):
        browsers.join(token)
    assert browsers.name_of(key) == "phone"


def test_a_link_works_until_it_expires(tmp_path: Path) -> None:
    browsers = Browsers(tmp_path)
    early, late = browsers.invite("early", 60, now=1000.0), browsers.invite("late", 60, now=1000.0)
    assert browsers.join(early, now=1059.999)[0] == "early"
    with pytest.raises(Refused, match="expired"):
        browsers.join(late, now=1060.0)


def test_a_browser_without_a_record_is_not_known(tmp_path: Path) -> None:
    browsers = Browsers(tmp_path / "missing")
    assert browsers.name_of("") is None
    assert browsers.names() == []
    with pytest.raises(Refused):
        browsers.join("")


@pytest.mark.parametrize("name", ["", "../up", "a/b", "a" * 200])
def test_a_name_that_is_no_name_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises((TrustError, ValueError)):
        Browsers(tmp_path / "b").invite(name, 60)
    assert list(tmp_path.rglob("*.json")) == []


def test_a_new_link_gives_a_browser_a_new_membership(tmp_path: Path) -> None:
    cluster, browsers = Cluster(tmp_path / "c", 1e9), Browsers(tmp_path / "b")
    holders = []
    for _ in range(2):
        browsers.invite("phone", 60, cluster.authority.invite("phone", 60))
        membership = credentials.load(browsers.credentials("phone"))
        assert membership is not None
        holders.append(membership.holder)
    assert [holder.name for holder in holders] == ["phone", "phone"]
    assert holders[0].serial != holders[1].serial


def test_a_damaged_record_is_replaced_by_a_new_link(tmp_path: Path) -> None:
    browsers = Browsers(tmp_path)
    _, key = browsers.join(browsers.invite("phone", 60))
    (tmp_path / "phone" / "browser.json").write_text("{")
    assert browsers.name_of(key) is None
    assert browsers.join(browsers.invite("phone", 60))[0] == "phone"


def test_a_browser_is_forgotten(tmp_path: Path) -> None:
    browsers = Browsers(tmp_path)
    _, key = browsers.join(browsers.invite("phone", 60))
    token = browsers.invite("tablet", 60)
    assert browsers.forget("phone")
    assert browsers.forget("tablet")
    assert not browsers.forget("phone")
    assert browsers.name_of(key) is None
    with pytest.raises(Refused):
        browsers.join(token)


def test_one_bridge_serves_and_others_learn_its_address(tmp_path: Path) -> None:
    with closing(BridgeLock(tmp_path)) as first:
        assert first.is_held
        with closing(BridgeLock(tmp_path)) as second:
            assert (second.is_held, second.address) == (False, "")
            first.publish("https://192.0.2.1:7443/")
            assert second.address == "https://192.0.2.1:7443/"
    with closing(BridgeLock(tmp_path)) as third:
        assert (third.is_held, third.address) == (True, "")


class Records(RuleBasedStateMachine):
    """Any order of invitations and joins leaves exactly the newest link or key of each name usable."""

    tokens = Bundle("tokens")

    @initialize(folder=st.builds(object))
    def begin(self, folder: object) -> None:
        import tempfile

        self._folder = tempfile.TemporaryDirectory()
        self._browsers = Browsers(Path(self._folder.name))
        self._open: dict[str, str] = {}  # by name: the token that works
        self._keys: dict[str, str] = {}  # by name: the key that works
        self._ports: dict[str, int] = {}

    @rule(target=tokens, name=st.sampled_from(["a", "b", "c"]))
    def invite(self, name: str) -> str:
        token = self._open[name] = self._browsers.invite(name, 60)
        self._keys.pop(name, None)
        return token

    @rule(token=tokens)
    def join(self, token: str) -> None:
        name = next((name for name, usable in self._open.items() if usable == token), None)
        if name is None:
            with pytest.raises(Refused):
                self._browsers.join(token)
            return
        joined, self._keys[name] = self._browsers.join(token)
        assert joined == name
        del self._open[name]

    @rule(name=st.sampled_from(["a", "b", "c"]), port=st.integers(1, 65535))
    def remember(self, name: str, port: int) -> None:
        self._browsers.remember_port(name, port)
        self._ports[name] = port

    @rule()
    def look(self) -> None:
        assert {self._browsers.name_of(key): key for key in self._keys.values()} == self._keys
        for name in ("a", "b", "c"):
            assert self._browsers.port(name) == self._ports.get(name, 0)

    def teardown(self) -> None:
        self._folder.cleanup()


TestRecords = Records.TestCase
TestRecords.settings = settings(max_examples=15, stateful_step_count=12, deadline=None)
