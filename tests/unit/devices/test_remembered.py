"""Test saved figures: the latest ones are valid for a day."""

from pathlib import Path

import pytest

from devices import remembered
from devices.remembered import MAX_AGE_S, Remembered


def test_what_was_put_last_is_forgotten_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remembered, "_MOST", 3)
    saved = Remembered("figures", tmp_path)
    for key in ("a", "b", "c", "a", "d"):  # a anew
        saved.put(key, key)
    assert [key for key in "abcd" if saved.get(key)] == ["a", "c", "d"]


def test_what_is_a_day_old_or_from_the_future_is_not_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = [1000.0]
    monkeypatch.setattr(remembered.time, "time", lambda: now_s[0])  # type: ignore[attr-defined]
    saved = Remembered("figures", tmp_path)
    saved.put("a", 7)
    now_s[0] += MAX_AGE_S
    assert saved.get("a") == (7, MAX_AGE_S)
    now_s[0] += 1
    assert saved.get("a") is None
    now_s[0] = 999.0
    assert saved.get("a") is None
