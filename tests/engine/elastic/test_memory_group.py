"""An answer goes on while a memory group's limit is lowered and raised: the bundled model, at its scale."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tests.engine.elastic.conftest import Elastic
from tests.support import ROOT
from tests.support.helpers import until
from tests.support.paging import MIB

LIMIT = 400 * MIB

# A line comes for each command: "next" decodes a token, "check" computes all of them with the files of their sizes.
_CHILD = """
import json, sys
from dataclasses import asdict
from devices.probe import own_rss
from edge.weights.elastic import governor
from edge.llm.engine import Engine
from edge.llm.options import EngineOptions
governor.GROW_AFTER_S = 0.5
path, static = sys.argv[1], sys.argv[2:]
options = EngineOptions(threads=1, context=1024, memory=1 << 30, flash_attention="off")
from dataclasses import replace
with Engine(path, replace(options, least_memory=200 << 20)) as engine:
    weights, tokens, parts = engine.paging, [], []
    choices = [weights.sizes._within(k, 1 << 30) for k in range(3)]
    whole = [(choice.n_bytes - (1 << 23)) * 128 // 127 for choice in choices]  # without a share of a large budget
    prompt = engine.model.tokenize("What is 27 plus 38?", add_special=True, parse_special=True)
    last = engine.decode(prompt, 0).argmax()
    print(json.dumps({"whole": whole}), flush=True)
    for line in sys.stdin:
        if line == "check\\n":
            break
        position = len(prompt) + len(tokens)
        before = engine.states.read(0, range(position))
        first = int(last)
        last = engine.decode([first], position).argmax()
        number = weights.pass_size  # between two passes the choice may change
        if not parts or parts[-1][0] != number:
            parts.append((number, position, before, first, []))
        parts[-1][4].append(int(last))
        tokens.append(first)
        room = weights._room.for_process(weights.planned_bytes)
        print(json.dumps({"number": number, "rss": own_rss(), "room": room}), flush=True)
    equal = []
    for number, position, before, token, chosen in parts:
        with Engine(static[number], options) as other:
            other.states.write(0, before)
            answer = []
            for i in range(len(chosen)):
                token = int(other.decode([token], position + i).argmax())
                answer.append(token)
            equal.append(answer == chosen)
    print(json.dumps({"numbers": [part[0] for part in parts], "equal": equal}), flush=True)
"""


@pytest.fixture
def group() -> Iterator[Path]:
    folder = Path("/sys/fs/cgroup/memory", f"edge-elastic-{os.getpid()}")
    if not (folder.parent / "memory.limit_in_bytes").exists():
        pytest.skip("this machine has no memory groups of version 1")
    try:
        folder.mkdir()
        (folder / "memory.limit_in_bytes").write_text(str(LIMIT))
    except OSError as error:
        pytest.skip(f"no memory group can be made here: {error.strerror}")
    yield folder
    with suppress(OSError):
        (folder / "memory.force_empty").write_text("0")
    folder.rmdir()


def limit(group: Path, n_bytes: int) -> bool:
    """Ask for a limit, and set it if what is held allows that."""
    (group / "memory.soft_limit_in_bytes").write_text(str(n_bytes))
    with suppress(OSError):  # more is held
        (group / "memory.limit_in_bytes").write_text(str(n_bytes))
    return int((group / "memory.limit_in_bytes").read_text()) // MIB == n_bytes // MIB


def test_a_limit_that_is_lowered_and_raised_changes_bits_and_ends_nothing(bundled: Elastic, group: Path) -> None:
    child = subprocess.Popen(
        [sys.executable, "-c", _CHILD, *map(str, (bundled.path, *bundled.static))],
        cwd=ROOT,
        text=True,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        preexec_fn=lambda: (group / "cgroup.procs").write_text(str(os.getpid())) and None,
    )
    assert child.stdin is not None
    assert child.stdout is not None

    def said(command: str = "") -> dict[str, Any]:
        child.stdin.write(command)  # type: ignore[union-attr]
        child.stdin.flush()  # type: ignore[union-attr]
        return dict(json.loads(child.stdout.readline()))  # type: ignore[union-attr]

    try:
        whole = said()["whole"]
        first = [said("next\n") for _ in range(4)][-1]  # what the first tokens allocate is there
        assert first["number"] == 0
        low = LIMIT - (first["room"] - (whole[2] + whole[1]) // 2)  # room for the smallest size, not for the middle one
        until(lambda: limit(group, low), "a limit that holds")
        until(lambda: said("next\n")["number"] == 2, "fewer bits")
        small = said("next\n")
        assert small["rss"] < first["rss"] - (whole[0] - whole[2]) // 2
        assert limit(group, LIMIT)
        until(lambda: said("next\n")["number"] == 0, "more bits")
        said("next\n")
        ended = said("check\n")
        assert child.wait(60) == 0
    finally:
        child.kill()
        child.wait()
        child.stdin.close()
        child.stdout.close()
    assert ended["numbers"][0] == ended["numbers"][-1] == 0
    assert 2 in ended["numbers"]
    assert all(ended["equal"])
    assert "oom_kill 0" in (group / "memory.oom_control").read_text()
