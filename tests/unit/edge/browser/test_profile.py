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
    assert profile.agent.isprintable()
    assert 0 < len(profile.agent) <= 200


@pytest.mark.parametrize(("agent", "reported", "expected"), [
    ("Chrome on Android", 8 * GIB, MAX_MEMORY),
    ("Chrome on Android", MAX_MEMORY, MAX_MEMORY),
    ("Chrome on Android", 2 * GIB, 2 * GIB),
    ("Safari on iPhone", 8 * GIB, 1500 << 20),
    ("Safari on iPhone", 1 * GIB, 1 * GIB),
    ("Firefox on Linux", None, 1 * GIB),
])  # fmt: skip
def test_a_page_gets_what_it_may_use(agent: str, reported: int | None, expected: int) -> None:
    assert PageProfile.from_hello({"agent": agent, "memory_bytes": reported}).memory_bytes == expected


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
