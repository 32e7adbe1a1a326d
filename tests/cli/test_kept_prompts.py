"""Test that `edge chat` reuses saved prompts, continues conversations, and reports it."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.helpers import assert_one_line_error, chat_json, run_chat

GREEDY = ("--temperature", "0", "--max-tokens", "24")
TEXT = "Ada has a boat that is red. Ben has a kite that is blue. The river begins in the hills. " * 3


@pytest.fixture(autouse=True)
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CACHE", "STATE"):
        monkeypatch.setenv(f"XDG_{name}_HOME", str(tmp_path / name.lower()))


@pytest.fixture
def notes(tmp_path: Path) -> Path:
    path = tmp_path / "notes.txt"
    path.write_text(TEXT)
    return path


def usage(*args: str | Path) -> Any:
    return chat_json("-p", "What is 27 plus 38?", *GREEDY, *args)["usage"]


def test_a_text_is_computed_once(notes: Path) -> None:
    first = usage("--file", notes)
    again = usage("--file", notes)
    other = chat_json("-p", "Who has a kite?", *GREEDY, "--file", notes)["usage"]
    assert first["restored_tokens"] == 0
    assert first["prompt_tokens"] > 60
    assert again["restored_tokens"] == again["cached_tokens"] == (again["prompt_tokens"] - 1) // 16 * 16
    assert 32 <= other["restored_tokens"] < again["prompt_tokens"]
    assert usage()["prompt_tokens"] < 30


@pytest.mark.parametrize("off", [("--prefix-cache", "0"), ("--seed", "1")])
def test_nothing_is_kept_or_used_where_it_is_turned_off(notes: Path, tmp_path: Path, off: tuple[str, str]) -> None:
    usage("--file", notes, *off)
    assert not (tmp_path / "cache" / "edge" / "prefixes").exists()
    usage("--file", notes)
    assert usage("--file", notes, *off)["restored_tokens"] == 0
    assert usage("--file", notes)["restored_tokens"] > 0


def test_no_more_is_kept_than_was_said(notes: Path, tmp_path: Path) -> None:
    usage("--file", notes, "--prefix-cache", "300KiB")
    saved = sum(file.stat().st_size for file in (tmp_path / "cache" / "edge" / "prefixes").iterdir())
    assert 200 << 10 < saved <= 300 << 10


def test_a_conversation_goes_on(tmp_path: Path) -> None:
    first = run_chat("--resume", "trip", "-p", "My name is Ada.", *GREEDY)
    assert "conversation trip: a new one" in first.stderr
    second = run_chat("--resume", "trip", "-p", "What is my name?", *GREEDY)
    assert "conversation trip: 2 messages" in second.stderr
    assert "Ada" in second.stdout
    saved = tmp_path / "state" / "edge" / "conversations" / "trip.json"
    assert [m["role"] for m in json.loads(saved.read_text())["messages"]] == ["user", "assistant"] * 2
    assert saved.stat().st_mode & 0o077 == 0
    assert saved.parent.stat().st_mode & 0o077 == 0


def test_a_conversation_keeps_its_text(notes: Path) -> None:
    first = usage("--resume", "trip", "--file", notes)
    assert usage("--resume", "trip")["prompt_tokens"] > first["prompt_tokens"]


@pytest.mark.parametrize("name", ["../trip", "", ".hidden", "a/b", "x" * 81])
def test_a_name_that_cannot_be_one_is_refused(name: str) -> None:
    assert_one_line_error(run_chat("--resume", name, "-p", "hi"), 3, "cannot be called")


def test_a_conversation_that_is_damaged_stays(tmp_path: Path) -> None:
    path = tmp_path / "state" / "edge" / "conversations" / "trip.json"
    path.parent.mkdir(parents=True)
    path.write_text("{")
    assert_one_line_error(run_chat("--resume", "trip", "-p", "hi"), 3, "not a saved chat")
    assert path.read_text() == "{"


def test_a_text_that_is_missing_or_no_text_is_refused(tmp_path: Path) -> None:
    assert_one_line_error(run_chat("--file", tmp_path / "none", "-p", "hi"), 3, "none")
    (tmp_path / "image").write_bytes(b"\xff\xd8")
    assert_one_line_error(run_chat("--file", tmp_path / "image", "-p", "hi"), 2, "not a text file")


def test_a_key_that_others_can_read_is_refused(notes: Path, tmp_path: Path) -> None:
    usage("--file", notes)
    (tmp_path / "state" / "edge" / "prefix.key").chmod(0o644)
    assert_one_line_error(run_chat("--file", notes, "-p", "hi"), 3, "prefix.key", "delete it")
