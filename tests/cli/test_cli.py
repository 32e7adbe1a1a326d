"""Test the `edge` command itself: help, version, unknown commands, and unexpected errors."""

import argparse
import errno
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import pytest

import apps.cli
import apps.commands.chat
import apps.errors
import apps.options
import edge.llm.options
import edge.llm.sampler
import edge.models.shapes
from apps.errors import exit_code
from apps.options import Parser, set_common
from edge.errors import EdgeError, HubError, NoRoom
from quant.errors import ModelFileError, QuantError
from tests.support.helpers import EDGE, ROOT, assert_one_line_error, run_edge

HEAVY = {"numpy", "llama_cpp", "rich", "prompt_toolkit", "jinja2", "huggingface_hub"}
HEAVY |= {"matplotlib", "scipy", "onnx", "onnxruntime"}


def run_python(code: str, **env: str) -> "subprocess.CompletedProcess[str]":
    """Run code in a process of its own."""
    return subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=env, capture_output=True, text=True, timeout=60)


def test_help_lists_the_commands() -> None:
    done = run_edge("--help")
    assert done.returncode == 0
    for command in apps.cli.COMMANDS:
        assert f"\n    {command} " in done.stdout


@pytest.mark.parametrize("command", apps.cli.COMMANDS)
def test_every_command_has_help(command: str) -> None:
    done = run_edge(command, "--help")
    assert (done.returncode, done.stderr) == (0, "")


def imported_for(arguments: list[str]) -> list[str]:
    """The modules that help of a command imports."""
    code = f"""
import sys, apps.cli
try:
    apps.cli.main({arguments!r})
except SystemExit:
    print(*sys.modules, file=sys.stderr)
"""
    return run_python(code).stderr.split()


@pytest.mark.parametrize("arguments", [["--help"], ["chat", "--help"], ["bench", "--help"], ["model", "--help"]])
def test_help_imports_nothing_heavy(arguments: list[str]) -> None:
    assert HEAVY.isdisjoint(imported_for(arguments))


def test_a_command_imports_no_other() -> None:
    modules = imported_for(["plan", "--help"])
    assert [name for name in modules if name.startswith("apps.commands.")] == ["apps.commands.plan"]


def test_version() -> None:
    done = run_edge("--version")
    assert (done.returncode, done.stdout) == (0, f"edge {version('edge-runtime')}\n")


def test_an_unknown_command() -> None:
    assert_one_line_error(run_edge("dance"), 2, "dance", *apps.cli.COMMANDS)
    assert_one_line_error(run_edge("chta"), 2, "COMMAND: invalid choice: 'chta'; did you mean chat? (see edge --help)")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            ("chat", "--temprature", "0"),
            ("edge chat: ", "--temprature; did you mean --temperature?", "edge chat --help"),
        ),
        (("model", "info", "--contxt=9"), ("edge model info: ", "did you mean --context?", "edge model info --help")),
        (("model", "inof"), ("edge model: ", "did you mean info?", "edge model --help")),
        (("chat", "--kv-type", "q8"), ("edge chat: argument --kv-type: ", "did you mean q8_0?", "edge chat --help")),
        (("chat", "-m", "a.gguf"), ("edge chat: unknown argument -m; write MODEL without an option (see",)),
        (("bench", "a.gguf", "b.gguf"), ("edge bench: one argument too many: 'b.gguf';", "(see edge bench --help)")),
    ],
)
def test_a_mistyped_option_names_the_nearest(arguments: tuple[str, ...], said: tuple[str, ...]) -> None:
    assert_one_line_error(run_edge(*arguments), 2, *said)


def test_a_model_that_exists_nowhere_shows_no_fetching(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("apps.show.progress.progress", lambda *_: pytest.fail("shows that it fetches"))
    with pytest.raises(ModelFileError, match="no such file: xyz"):
        apps.options.model_path("xyz")


def test_no_command_prints_five_commands_to_begin_with() -> None:
    done = run_edge()
    assert (done.returncode, done.stderr) == (0, "")
    commands = re.findall(r"^  edge (\w+)", done.stdout, re.MULTILINE)
    assert len(commands) == 5
    assert set(commands) <= set(apps.cli.COMMANDS)


def parsers(parser: Parser) -> Iterator[Parser]:
    """Yield a parser and the parsers of its commands and actions."""
    yield parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for own in action.choices.values():
                yield from parsers(own)


def options_in(text: str) -> set[str]:
    return set(re.findall(r"^ +(?:-\w(?: \w+)?, )?(--[a-z][a-z-]+)", text, re.MULTILINE))


def test_help_is_short_and_help_all_lists_every_option(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    for parser in parsers(apps.cli.build_parser()):
        names = {name for action in parser._actions for name in action.option_strings}
        assert parser.common <= names, parser.prog
        short = parser.format_help()
        assert len(short.splitlines()) <= 40 or parser.prog == "edge", parser.prog  # edge lists all commands
        set_common(parser, "")
        every = parser.format_help()
        shown = [action for action in parser._actions if action.option_strings and action.help != argparse.SUPPRESS]
        visible = {action.option_strings[-1].replace("--no-", "--") for action in shown}
        assert len(options_in(short)) <= 22, parser.prog
        assert {name.replace("--no-", "--") for name in options_in(every)} == visible, parser.prog
        assert options_in(short) <= options_in(every)
        hint = re.search(rf"{parser.prog}\s+--help-all\s+lists\s+\d+\s+more\s+options", short)
        assert bool(hint) == (options_in(short) != options_in(every))


def test_help_all_is_an_option_of_every_command() -> None:
    short, every, action = (
        run_edge(*words.split()) for words in ("chat --help", "chat --help-all", "lab up --help-all")
    )
    assert (short.returncode, every.returncode, action.returncode) == (0, 0, 0)
    assert "--xtc-threshold" not in short.stdout
    assert "edge chat --help-all lists" in short.stdout
    assert "--xtc-threshold" in every.stdout
    assert "--json" in action.stdout


def test_limits_named_for_a_quick_help_are_those_of_the_engine() -> None:
    assert apps.options.MAX_SEED == edge.llm.sampler.MAX_SEED


FAILING = """
import sys, apps.commands.chat, apps.cli
def run(args): raise RuntimeError("two\\nlines")
apps.commands.chat.run = run
sys.exit(apps.cli.main(["chat"]))
"""


def test_an_unexpected_exception_is_one_line_and_exit_code_1() -> None:
    assert_one_line_error(run_python(FAILING), 1, "RuntimeError: two lines", "EDGE_DEBUG=1")


def test_what_to_do_about_a_file_is_said(tmp_path: Path) -> None:
    missing, below = tmp_path / "missing", tmp_path / "file" / "below"
    (tmp_path / "file").touch()
    for path, said in (
        (missing, f"{missing}: No such file or directory; check its name"),
        (tmp_path, f"{tmp_path}: Is a directory; name a file in this folder"),
        (below, f"{below}: Not a directory; check its name: a part of the path is a file and not a folder"),
    ):
        assert_one_line_error(run_edge("chat", "-p", "hi", "--chat-template", path), 3, said)


def test_edge_debug_shows_where_it_happened() -> None:
    done = run_python(FAILING, EDGE_DEBUG="1")
    assert done.returncode == 1
    assert "Traceback" in done.stderr
    assert "in run" in done.stderr


def test_every_error_of_the_project_has_an_exit_code() -> None:
    def below(kind: type) -> list[type]:
        return [kind, *(c for child in kind.__subclasses__() for c in below(child))]

    for kind in set(below(EdgeError)) - {EdgeError, QuantError}:
        assert any(c.__name__ in apps.errors.EXIT_CODES for c in kind.__mro__), kind


def test_a_full_disk_has_one_exit_code_whichever_part_met_it() -> None:
    full, gone = (OSError(number, "of the system") for number in (errno.ENOSPC, errno.ENOENT))
    hub, unreachable = HubError("the disk is full"), HubError("no network")
    hub.__cause__, unreachable.__cause__ = full, gone
    assert [apps.errors.exit_code(error) for error in (full, OSError(errno.EDQUOT, ""), NoRoom(""), hub)] == [4] * 4
    assert [apps.errors.exit_code(error) for error in (gone, unreachable)] == [3, 6]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="Linux has a disk that is always full")
def test_an_output_that_has_no_room_is_said_in_words() -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [*EDGE, "model", "info"], cwd=ROOT, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60, check=False
        )
    assert (done.returncode, done.stderr) == (
        4,
        "edge model: standard output: No space left on device; remove files there, or name another disk\n",
    )


@pytest.mark.parametrize("command", apps.cli.COMMANDS)
def test_every_option_is_documented(command: str) -> None:
    options = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", run_edge(command, "--help-all").stdout)) - {"--help"}
    folder = ROOT / "docs" / "cli"
    page = (folder / f"{command}.md").read_text()
    linked = set(re.findall(r"\]\(([\w-]+\.md)", page)) | {"options.md"}
    text = page + "".join((folder / name).read_text() for name in sorted(linked))
    assert not {option for option in options if f"`{option}" not in text and f" {option}" not in text}


def test_an_error_that_is_its_own_cause_has_an_exit_code() -> None:
    error = HubError("no room for a.gguf")
    error.__cause__ = error
    assert exit_code(error) == 6
    error.__cause__ = OSError(errno.ENOSPC, "No space left on device")
    error.__cause__.__cause__ = error
    assert exit_code(error) == 4
