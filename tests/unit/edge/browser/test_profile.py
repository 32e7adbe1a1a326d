"""Test the profile that a page reports about its device."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge.browser.profile import MAX_MEMORY, MAX_THREADS, PageProfile
from edge.errors import EngineError

GIB = 1 << 30
ANYTHING = st.recursive(st.none() | st.booleans() | st.integers() | st.floats() | st.text(), st.lists, max_leaves=3)
FIELDS = ("agent", "threads", "memory_bytes", "battery", "charging", "isolated")


@given(hello=st.fixed_dictionaries({}, optional=dict.fromkeys(FIELDS, ANYTHING)))
def test_whatever_a_page_reports_is_within_limits(hello: dict[str, Any]) -> None:
    profile = PageProfile.from_hello(hello)
    assert 1 <= profile.threads <= MAX_THREADS
    assert 64 << 20 <= profile.memory_bytes <= MAX_MEMORY
    assert profile.battery_percent is None or 0 <= profile.battery_percent <= 100
    for name in (profile.browser, profile.system):
        assert name.isprintable()
        assert 0 < len(name) < 40


@pytest.mark.parametrize(("agent", "reported", "expected"), [
    ("Chrome on Android", 8 * GIB, MAX_MEMORY),
    ("Chrome on Android", MAX_MEMORY, MAX_MEMORY),
    ("Chrome on Android", 2 * GIB, 2 * GIB),
    ("iPhone Version/18", 8 * GIB, 1500 << 20),
    ("iPhone Version/18", 1 * GIB, 1 * GIB),
    ("Firefox on Linux", None, 1 * GIB),
])  # fmt: skip
def test_a_page_gets_what_it_may_use(agent: str, reported: int | None, expected: int) -> None:
    assert PageProfile.from_hello({"agent": agent, "memory_bytes": reported}).memory_bytes == expected


@pytest.mark.parametrize(("agent", "expected"), [
    ("Mozilla/5.0 (X11; Linux x86_64) AppleWebKit/537.36 (KHTML, like Gecko) HeadlessChrome/156.0.0.0 Safari/537.36",
     ("Chrome 156", "Linux")),
    ("Mozilla/5.0 (Linux; Android 10; K) AppleWebKit/537.36 (KHTML, like Gecko) Chrome/140.0.0.0 Mobile Safari/537.36",
     ("Chrome 140", "Android")),
    ("Mozilla/5.0 (Linux; Android 10; K) AppleWebKit/537.36 (KHTML, like Gecko) SamsungBrowser/28.0 Chrome/130.0.0.0"
     " Mobile Safari/537.36", ("Samsung Internet 28", "Android")),
    ("Mozilla/5.0 (iPhone; CPU iPhone OS 18_5 like Mac OS X) AppleWebKit/605.1.15 (KHTML, like Gecko) Version/18.5"
     " Mobile/15E148 Safari/604.1", ("Safari 18", "iPhone")),
    ("Mozilla/5.0 (Macintosh; Intel Mac OS X 10_15_7) AppleWebKit/605.1.15 (KHTML, like Gecko) Version/18.5"
     " Safari/605.1.15", ("Safari 18", "macOS")),
    ("Mozilla/5.0 (Windows NT 10.0; Win64; x64) AppleWebKit/537.36 (KHTML, like Gecko) Chrome/140.0.0.0 Safari/537.36"
     " Edg/140.0.0.0", ("Edge 140", "Windows")),
    ("Mozilla/5.0 (Android 15; Mobile; rv:142.0) Gecko/142.0 Firefox/142.0", ("Firefox 142", "Android")),
    ("node v20.20.2", ("a browser", "an unknown system")),
    (None, ("a browser", "an unknown system")),
])  # fmt: skip
def test_browsers_are_named(agent: str | None, expected: tuple[str, str]) -> None:
    profile = PageProfile.from_hello({"agent": agent})
    assert (profile.browser, profile.system) == expected


@pytest.mark.parametrize(("isolated", "threads"), [(True, 4), (False, 1), (None, 1), (1, 1)])
def test_threads_need_an_isolated_page(isolated: object, threads: int) -> None:
    assert PageProfile.from_hello({"threads": 4, "isolated": isolated}).threads == threads


def test_a_profile_is_stored(tmp_path: Path) -> None:
    profile = PageProfile.from_hello({"agent": "a", "threads": 3, "isolated": True, "battery": 0.5, "charging": False})
    profile.save(tmp_path)
    assert PageProfile.load(tmp_path) == profile


@pytest.mark.parametrize("content", [None, b"", b"[]", b'{"agent": "a"}', b'{"other": 1}'])
def test_a_missing_or_damaged_profile_means_that_the_page_is_closed(tmp_path: Path, content: bytes | None) -> None:
    if content is not None:
        (tmp_path / "profile.json").write_bytes(content)
    with pytest.raises(EngineError, match="page is closed"):
        PageProfile.load(tmp_path)
