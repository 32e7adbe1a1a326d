"""The harness of benchmarks: who goes first, what is counted, and which way a ratio goes, with known values."""

import json
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.harness import LeftOut, Section, alternate, bench, bests, compared, medians, parser_of, table

FOUND = {
    "ours": [
        {"decode_s": 2.0, "tokens_per_s": 30.0},
        {"decode_s": 1.0, "tokens_per_s": 60.0},
        {"decode_s": 4.0, "tokens_per_s": 20.0},
    ],
    "bare": [
        {"decode_s": 1.0, "tokens_per_s": 60.0},
        {"decode_s": 2.0, "tokens_per_s": 30.0},
        {"decode_s": 1.0, "tokens_per_s": 40.0},
    ],
}


def test_sides_take_turns_in_going_first_and_the_warm_up_is_not_counted() -> None:
    order: list[str] = []

    def side(name: str) -> dict[str, float]:
        order.append(name)
        return {"s": float(len(order))}

    result = alternate({name: lambda name=name: side(name) for name in "abc"}, 2)  # type: ignore[misc]
    assert order == list("abc" + "bca" + "cab")
    assert result == {"a": [{"s": 6.0}, {"s": 8.0}], "b": [{"s": 4.0}, {"s": 9.0}], "c": [{"s": 5.0}, {"s": 7.0}]}
    order.clear()
    assert [len(rounds) for rounds in alternate({"a": lambda: side("a")}, 2, warm_up=False).values()] == [2]
    assert alternate({}, 2) == {}


def test_what_a_side_says_beside_its_figures_is_kept_and_not_shown(capsys: pytest.CaptureFixture[str]) -> None:
    measured: dict[str, Any] = {"s": 2.0, "loaded": {"batch": 32}}
    assert alternate({"a": lambda: measured}, 1, warm_up=False) == {"a": [measured]}
    assert capsys.readouterr().err == "round 0, a: s 2\n"


def test_the_best_time_is_the_least_and_the_best_rate_the_largest() -> None:
    assert medians(FOUND)["ours"] == {"decode_s": 2.0, "tokens_per_s": 30.0}
    assert bests(FOUND)["ours"] == {"decode_s": 1.0, "tokens_per_s": 60.0}


def test_a_ratio_says_how_many_times_as_fast_a_side_is() -> None:
    time, rate = compared(FOUND, "ours", "bare", {"decode_s": ">= 0.98"})
    assert (time["ratio"], time["least"], time["most"], time["asked"]) == (0.5, 0.25, 2.0, ">= 0.98")
    assert (rate["ratio"], rate["least"], rate["most"], rate["asked"]) == (0.75, 0.5, 2.0, "")


def test_lines_of_a_table_may_be_short() -> None:
    assert table(["", "a", "b"], [["x", "1"]]) == "|  | a | b |\n| --- | ---: | ---: |\n| x | 1 |  |"


def ran(sections: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *args: str) -> Any:
    monkeypatch.setattr(sys, "argv", ["bench.py", *args])
    for name in ("CONFIG", "CACHE", "STATE"):
        monkeypatch.setenv(f"XDG_{name}_HOME", "")  # bench changes them
    bench(parser_of("A question.", sections), sections)
    return json.loads(capsys.readouterr().out)


def measured(folder: Path, args: Namespace) -> dict[str, Any]:
    return {"folder": folder.name, "there": folder.is_dir(), "tiny": args.tiny}


def left_out(folder: Path, args: Namespace) -> dict[str, Any]:
    raise LeftOut("it needs root")


def test_sections_run_in_folders_of_their_own_and_say_what_the_host_took(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sections = {name: Section(measured, str) for name in ("one", "two")}
    result = ran(sections, monkeypatch, capsys, "--only", "two", "--json")
    assert "one" not in result
    assert (result["two"]["folder"], result["two"]["there"], result["two"]["tiny"]) == ("two", True, False)
    assert {"took_s", "steal_s"} < result["two"].keys()
    assert {"machine", "versions", "command"} < result.keys()


def test_a_section_that_cannot_run_ends_the_benchmark_unless_it_is_tiny(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sections = {"one": Section(left_out, str), "two": Section(measured, str)}
    result = ran(sections, monkeypatch, capsys, "--tiny", "--json")
    assert result["left_out"] == {"one": "it needs root"}
    assert result["two"]["tiny"] is True
    with pytest.raises(SystemExit, match="one: it needs root; choose other sections with --only"):
        ran(sections, monkeypatch, capsys, "--json")
