"""Test the syntax of core lists, and binding a process to cores."""

import os
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from devices.cores import check_cores, cores_text, parse_cores, pin_to_cores, usable_cores
from edge.errors import EdgeError
from edge.llm.options import EngineOptions
from edge.worker import load
from edge.worker.limits import ResourceLimits, WorkerOptions, compute_on

pinning = pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="this system does not let programs choose")


@pytest.mark.parametrize(
    ("text", "cores"), [("0", (0,)), ("0,2-3", (0, 2, 3)), ("3,1-2,1", (1, 2, 3)), (" 0 , 4-4 ", (0, 4))]
)
def test_cores_as_people_write_them(text: str, cores: tuple[int, ...]) -> None:
    assert parse_cores(text) == cores


@given(st.sets(st.integers(0, 4095), min_size=1))
def test_text_there_and_back(cores: set[int]) -> None:
    assert parse_cores(cores_text(cores)) == tuple(sorted(cores))


@pytest.mark.parametrize("text", ["", ",", "0,", "x", "-1", "1-", "3-1", "4096", "0-99999", "1 2", "0x1", "²"])
def test_what_is_no_list_of_cores(text: str) -> None:
    with pytest.raises(ValueError, match=r"needs cores such as 0,2-3, got '"):
        parse_cores(text)


@pinning
def test_cores_that_are_not_there() -> None:
    check_cores(usable_cores())
    for refuse in (check_cores, pin_to_cores):
        with pytest.raises(ValueError, match=r"core 4000-4001 is not available here; choose from [0-9,-]+$"):
            refuse([usable_cores()[0], 4000, 4001])
    with pytest.raises(EdgeError, match="core 4000 is not available here"):
        compute_on([4000])
    compute_on([])


@pinning
def test_threads_started_later_keep_to_the_same_cores() -> None:
    code = (
        "import os, threading; from devices.cores import pin_to_cores, usable_cores; first = usable_cores()[0];"
        " pin_to_cores([first]); t = threading.Thread(target=lambda: print(usable_cores() == (first,)));"
        " t.start(); t.join()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "True\n"


def test_a_system_that_does_not_let_programs_choose(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(ValueError, match="leave --affinity out"):
        check_cores([0])


@pytest.mark.parametrize(
    ("layers", "most", "used"),
    [
        (None, None, None),
        (None, 5, None),  # it is for the engine to choose, up to so many
        (3, 5, 3),
        (9, 5, 5),
        (9, 0, 0),
        (9, None, 9),
    ],
)
def test_no_more_layers_on_the_gpu_than_are_lent(layers: int | None, most: int | None, used: int | None) -> None:
    options = load.limit_options(EngineOptions(gpu_layers=layers), ResourceLimits(2, gpu_layers=most))
    assert (options.gpu_layers, options.most_gpu_layers) == (used, most)
    assert options.threads == 2


@pytest.mark.parametrize(
    ("options", "most", "used"),
    [
        (EngineOptions(), None, 7),
        (EngineOptions(gpu_layers=3), None, 7),  # as many as fit into what is lent
        (EngineOptions(memory=1 << 30), None, 7),  # the other weights are in memory and on disk
        (EngineOptions(gpu_layers=0), None, None),
        (EngineOptions(), 0, None),
    ],
)
def test_no_more_memory_of_the_gpu_than_is_lent(options: EngineOptions, most: int | None, used: int | None) -> None:
    limits = ResourceLimits(2, gpu_layers=most, gpu_memory=7)
    assert load.limit_options(options, limits).gpu_memory == used


def test_limits_on_a_command_line() -> None:
    for limits in (ResourceLimits(2), ResourceLimits(2, (0, 3), 0, 7, gives_back=1 << 30)):
        assert ResourceLimits.from_text(limits.to_text()) == limits


@pytest.mark.parametrize(("most", "least", "gives_back"), [(400, 100, 300), (400, None, 0), (None, None, 0)])
def test_what_is_above_the_least_memory_is_given_back(most: int | None, least: int | None, gives_back: int) -> None:
    options = WorkerOptions("w", "127.0.0.1", 2, most, None, None, (0, 3), 1, 7, least)
    assert options.limits == ResourceLimits(2, (0, 3), 1, 7, gives_back)
