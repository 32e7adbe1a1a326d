"""Test bad input to `edge chat`: one line with the reason, a documented exit code, nothing on standard output."""

import ctypes
import os
import pty
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pexpect
import pytest

from devices.probe import available_memory
from edge.models.demo import MODEL_PATH
from tests.support import tiny_gguf
from tests.support.helpers import EDGE, ENDLESS, ROOT, TIMEOUT_S, assert_one_line_error, edge_here, run_chat, run_edge

USAGE, INPUT, ROOM, ENGINE = 2, 3, 4, 5  # exit codes


def no_gguf(folder: Path) -> Path:
    path = folder / "model.gguf"
    path.write_text("This is a shopping list.")
    return path


def cut_in_header(folder: Path) -> Path:
    path = folder / "model.gguf"
    path.write_bytes(MODEL_PATH.read_bytes()[:1000])
    return path


def cut_in_weights(folder: Path) -> Path:
    path = folder / "model.gguf"
    path.write_bytes(MODEL_PATH.read_bytes()[:-1000])
    return path


def empty(folder: Path) -> Path:
    path = folder / "model.gguf"
    path.touch()
    return path


def missing(folder: Path) -> Path:
    return folder / "model.gguf"


def directory(folder: Path) -> Path:
    return folder


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (no_gguf, "not a GGUF file"),
        (cut_in_header, "model.gguf"),
        (cut_in_weights, "incomplete"),
        (empty, "empty"),
        (missing, "no such file"),
        (directory, "folder"),
    ],
)
def test_a_file_that_is_no_model(tmp_path: Path, make: Callable[[Path], Path], words: str) -> None:
    assert_one_line_error(run_chat(make(tmp_path), "-p", "hi"), INPUT, words)


def test_an_architecture_llama_cpp_does_not_know(tmp_path: Path) -> None:
    path = tiny_gguf.model("starship").write(tmp_path / "model.gguf")
    assert_one_line_error(run_chat(path, "-p", "hi"), ENGINE, "starship")


def may_not_read_everything() -> None:
    """For a child: take the capabilities from root that let it read any file."""
    libc = ctypes.CDLL(None)
    drop_from_bounding_set = 24
    for capability in (1, 2):  # CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH
        if libc.prctl(drop_from_bounding_set, capability, 0, 0, 0):
            raise OSError("this root cannot give up capabilities")


@pytest.mark.skipif(os.geteuid() == 0 and sys.platform != "linux", reason="root reads everything here")
def test_a_file_that_may_not_be_read(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(MODEL_PATH.read_bytes())
    path.chmod(0)
    done = run_edge("chat", path, "-p", "hi", preexec=may_not_read_everything if os.geteuid() == 0 else None)
    assert_one_line_error(done, INPUT, "model.gguf", "ermission denied")


def test_a_context_longer_than_memory_says_need_and_have() -> None:
    kv_bytes_per_token = 8 * 2 * 4 * 32 * 4  # layers, keys and values, heads, head size, F32
    context = 2 * available_memory() // kv_bytes_per_token
    done = run_chat("-p", "hi", "--kv-type", "f32", "--context", str(context))
    assert_one_line_error(done, ROOM, "needs", "MiB", "available", "--context")


@pytest.mark.parametrize(
    "option",
    [
        "--context 0",
        "--context many",
        "--context 16777217",
        "--context 9999999999",
        "--threads 0",
        "--threads 513",
        "--batch 0",
        "--gpu-layers -1",
        "--kv-type q9",
        "--kv-type q8_0/",
        "--kv-type q8_0/q4_0/q4_0",
        "--flash-attention maybe",
        "--max-tokens 0",
        "--temperature -1",
        "--temperature nan",
        "--temperature inf",
        "--top-k -1",
        "--top-p 1.5",
        "--min-p -0.1",
        "--repeat-penalty 0",
        "--seed -1",
        "--seed 4294967296",
        "--seed 1.5",
    ],
)
def test_a_value_out_of_range(option: str) -> None:
    name = option.split()[0].lstrip("-")
    done = run_chat("-p", "hi", *option.split())
    assert_one_line_error(done, USAGE)
    assert name in done.stderr.replace("_", "-")


def test_an_option_that_does_not_exist() -> None:
    assert_one_line_error(run_chat("-p", "hi", "--nonsense"), USAGE, "--nonsense")


def test_an_empty_stop_string() -> None:
    assert_one_line_error(run_chat("-p", "hi", "--stop", ""), USAGE, "stop")


@pytest.mark.parametrize("prompt", ["", " \n"])
def test_an_empty_prompt(prompt: str) -> None:
    for done in (run_chat("-p", prompt), run_chat("-p", "-", stdin=prompt), run_chat(stdin=prompt)):
        assert_one_line_error(done, USAGE, "empty")


def test_a_prompt_longer_than_the_context() -> None:
    done = run_chat("-p", "word " * 100, "--context", "64")
    assert_one_line_error(done, ROOM, "64", "a larger --context, up to the 1024 that the model was trained for")
    assert_one_line_error(run_chat("-p", "word " * 900), ROOM, "use a shorter prompt: the model was trained for 1024")


@pytest.mark.parametrize(
    ("option", "content", "code", "words"),
    [
        ("--chat-template", "{% for m in %}", INPUT, "line 1"),
        (
            "--chat-template",
            "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
            INPUT,
            "does not end",
        ),
        ("--chat-template", "{{ raise_exception('no') }}", INPUT, "refuses"),
        ("--grammar", "root ::= (", USAGE, "grammar"),
        ("--grammar", 'other ::= "a"', USAGE, "root"),
        ("--grammar", 'root ::= root "a"', USAGE, "grammar"),
        ("--grammar", "", USAGE, "grammar"),
        ("--json-schema", "{", USAGE, "not valid JSON"),
        ("--json-schema", "[1]", USAGE, "must be a JSON object"),
        ("--json-schema", '{"type": "nonsense"}', USAGE, "nonsense"),
        ("--json-schema", '{"$ref": "#/nowhere"}', USAGE, "nowhere"),
    ],
)
def test_a_file_beside_the_model_that_is_not_valid(
    tmp_path: Path, option: str, content: str, code: int, words: str
) -> None:
    path = tmp_path / "file"
    path.write_text(content)
    assert_one_line_error(run_chat("-p", "hi", option, path), code, words)


@pytest.mark.parametrize("option", ["--chat-template", "--grammar", "--json-schema"])
def test_a_file_beside_the_model_that_cannot_be_read(tmp_path: Path, option: str) -> None:
    assert_one_line_error(run_chat("-p", "hi", option, tmp_path / "none"), INPUT, "none: No such file")
    assert_one_line_error(run_chat("-p", "hi", option, tmp_path), INPUT, "directory")
    binary = tmp_path / "binary"
    binary.write_bytes(b"\xff\xfe\x00")
    assert_one_line_error(run_chat("-p", "hi", option, binary), USAGE, "not a text file")


def test_a_schema_for_a_server_that_is_no_json(tmp_path: Path) -> None:
    schema = tmp_path / "schema"
    schema.write_text("{")
    done = edge_here("chat", "-p", "hi", "--url", "http://127.0.0.1:1", "--json-schema", schema)
    assert_one_line_error(done, USAGE, "not valid JSON")


def test_a_grammar_and_a_schema_together(tmp_path: Path) -> None:
    grammar, schema = tmp_path / "grammar", tmp_path / "schema"
    grammar.write_text(ENDLESS)
    schema.write_text("{}")
    assert_one_line_error(
        run_chat("-p", "hi", "--grammar", grammar, "--json-schema", schema), USAGE, "exclude each other"
    )


def test_json_without_a_prompt_on_a_terminal(tmp_path: Path) -> None:
    process = pexpect.spawn(EDGE[0], [*EDGE[1:], "chat", "--json"], cwd=str(ROOT), encoding="utf-8", timeout=TIMEOUT_S)
    process.expect(pexpect.EOF)
    process.wait()
    assert process.exitstatus == USAGE
    assert process.before.count("\n") == 1
    assert "--json needs a prompt" in process.before


def test_a_path_that_is_not_there_is_no_name_of_a_repository() -> None:
    assert_one_line_error(run_chat("./nothing", "-p", "hi"), INPUT, "no such file", "./nothing")


def test_a_conversation_into_a_file_is_refused(tmp_path: Path) -> None:
    """Its prompts would land in the file, and the screen stay empty."""
    terminal, stdin = pty.openpty()
    try:
        with (tmp_path / "out").open("wb") as out:
            done = subprocess.run(
                [*EDGE, "chat"], stdin=stdin, stdout=out, stderr=subprocess.PIPE, cwd=ROOT, timeout=TIMEOUT_S, text=True
            )
    finally:
        os.close(terminal)
        os.close(stdin)
    assert done.returncode == USAGE
    assert "not a terminal" in done.stderr
