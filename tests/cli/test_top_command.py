"""`edge top`, on servers that answer well, badly, or not at all."""

import json
from collections.abc import Iterator
from typing import Any

import pexpect
import pytest
from hypothesis import given
from hypothesis import strategies as st

from apps.commands.top import lines
from edge.serve.app import create_app
from edge.serve.options import ServeOptions
from tests.serve.scripted import ScriptedModels
from tests.serve.serving import serving
from tests.support import ROOT
from tests.support.helpers import EDGE, TIMEOUT_S, assert_one_line_error, edge_here, run_edge

MODEL = {
    "model": {"name": "demo", "sequences": 4},
    "slots": [{"is_processing": True}, {"is_processing": False}],
    "tokens_per_s": 12.5,
    "waiting": 3,
    "restarts": 1,
    "devices": [
        {"name": "this device", "layers": [0, 6], "memory_bytes": 3 << 20, "link": None},
        {"name": "pi", "layers": [6, 8], "memory_bytes": None, "link": "tcp"},
        {"name": "nas", "layers": None, "left_s": 90.0},
    ],
    "events": [{"time": 900.0 + n, "text": f"event {n}"} for n in range(9)],
}


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with serving(create_app(ScriptedModels(), ServeOptions())) as address:
        yield address


def test_a_look_has_models_devices_and_what_happened() -> None:
    text = list(lines({"models": [MODEL]}, 1000.0))
    assert text[:2] == ["demo", "  12.5 tokens/s, 1 of 4 slots in use, 3 waiting, 1 restart"]
    assert text[2] == "  this device  ████████████░░░░  layers 0-5  3.00 MiB"
    assert text[3] == "  pi           ░░░░░░░░░░░░████  layers 6-7  tcp"
    assert text[4].startswith("  nas          lost, or not used any more (")
    assert [line.rpartition(": ")[2] for line in text[5:]] == [f"event {n}" for n in range(4, 9)]


def test_a_model_whose_process_ended_says_why() -> None:
    assert list(lines({"models": [{"model": {"name": "m"}, "error": "it crashed"}]}, 0.0)) == ["m", "  it crashed"]
    assert list(lines({"models": []}, 0.0)) == ["No model is loaded. A request loads one."]


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=9), inner, max_size=3),
)
KEYS = st.sampled_from(
    ["slots", "devices", "events", "tokens_per_s", "waiting", "restarts", "error", "name", "layers", "left_s", "time",
     "text", "link", "memory_bytes", "sequences", "is_processing"]
)  # fmt: skip
NESTED = st.dictionaries(KEYS, ANYTHING | st.lists(st.dictionaries(KEYS, ANYTHING), max_size=3))


@given(NESTED, NESTED)
def test_any_status_is_shown_without_an_error(status: dict[str, Any], model: dict[str, Any]) -> None:
    assert all(line.isprintable() for line in lines({"models": [status | {"model": model}]}, 1000.0))


def test_one_look_at_a_server(address: str) -> None:
    done = edge_here("top", address, "--once")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[:2] == ["scripted", "  0 tokens/s, 0 of 8 slots in use, 0 waiting"]
    done = edge_here("top", address, "--json")
    assert json.loads(done.stdout)["models"][0]["model"]["name"] == "scripted"


def test_errors_are_one_line(address: str) -> None:
    assert_one_line_error(edge_here("top", "127.0.0.1:1", "--once"), 7, "cannot be reached")
    assert_one_line_error(edge_here("top", f"{address}/nowhere", "--once"), 7, "answers 404")
    assert_one_line_error(edge_here("top", "ftp://x", "--once"), 2, "is not an address of a server")
    assert_one_line_error(run_edge("top", address), 2, "--once or --json")


def test_the_view_is_redrawn_until_ctrl_c(address: str) -> None:
    words = [*EDGE[1:], "top", address, "--every", "0.2"]
    command = pexpect.spawn(EDGE[0], words, cwd=str(ROOT), encoding="utf-8", timeout=TIMEOUT_S, dimensions=(30, 100))
    for _ in range(2):
        command.expect("slots in use")
    command.sendintr()
    command.expect(pexpect.EOF)
    command.close()
    assert command.exitstatus == 0
