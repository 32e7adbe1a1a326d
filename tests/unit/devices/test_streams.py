"""Test standard streams that are closed, full, unread, or of another encoding: a process continues after any output."""

import fcntl
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import ROOT

_BEGIN = "import os, sys; from devices.streams import *; protect_streams(); "
_LIMIT_S = 60  # only against a hang
_SMALL_PIPE = 4096
_SET_PIPE_SIZE = getattr(fcntl, "F_SETPIPE_SZ", 1031)


def run(
    code: str, *, stderr: int = subprocess.PIPE, stdout: int = subprocess.PIPE, around: str = "", **env: str
) -> "subprocess.CompletedProcess[bytes]":
    """Run a program that begins with protected streams. around: redirections of a shell, such as "2>&-"."""
    command = ["sh", "-c", f'exec "$0" "$@" {around}', sys.executable, "-c", _BEGIN + code]
    return subprocess.run(
        command, cwd=ROOT, env={**os.environ, **env}, stdout=stdout, stderr=stderr, timeout=_LIMIT_S, check=False
    )


@pytest.mark.parametrize("around", ["2>/dev/full", "2>&-", "2</dev/null"])
def test_lines_that_cannot_be_written_do_not_stop_the_process(around: str) -> None:
    done = run("print('x' * 9000, file=sys.stderr); sys.stderr.flush(); print('went on')", around=around)
    assert (done.returncode, done.stdout) == (0, b"went on\n")


def test_a_pipe_that_nobody_reads_drops_lines_and_tells_how_many(tmp_path: Path) -> None:
    """The process writes more than the pipe and the queue hold. The pipe is read only once that is done."""
    reader, writer = os.pipe()
    fcntl.fcntl(writer, _SET_PIPE_SIZE, _SMALL_PIPE)
    code = (
        "[print('x' * 99, file=sys.stderr) for _ in range(5000)]; print('went on', flush=True); sys.stdin.read();"
        "print('last', file=sys.stderr)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", _BEGIN + code],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=writer,
    ) as process:
        os.close(writer)
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stdout.readline() == b"went on\n"
        with os.fdopen(reader, "rb") as pipe:
            process.stdin.close()
            lines = pipe.read().splitlines()
    dropped = [line for line in lines if b"were dropped here" in line]
    assert len(dropped) == 1
    assert int(dropped[0].split()[1]) + lines.count(b"x" * 99) + lines.count(b"last") == 5001
    assert process.returncode == 0


def test_the_reader_of_the_same_pipe_is_not_made_non_blocking() -> None:
    reader, writer = os.pipe()
    done = run("print('x', file=sys.stderr)", stderr=writer)
    assert done.returncode == 0
    assert os.get_blocking(writer)
    for end in (reader, writer):
        os.close(end)


def test_lines_of_both_streams_keep_their_order() -> None:
    code = "[(print('e', i, file=sys.stderr), print('o', i, flush=True)) for i in range(100)]"
    done = run(code, around="2>&1")
    assert done.stdout.decode().split("\n")[:-1] == [f"{kind} {i}" for i in range(100) for kind in "eo"]


def test_a_forked_child_writes_lines_of_its_own() -> None:
    code = (
        "print('parent', file=sys.stderr); pid = os.fork(); print('both', file=sys.stderr); pid and os.waitpid(pid, 0)"
    )
    assert sorted(run(code).stderr.splitlines()) == [b"both", b"both", b"parent"]


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_files_do_not_get_the_numbers_of_closed_streams(closed: str, tmp_path: Path) -> None:
    code = f"file = open({str(tmp_path / 'f')!r}, 'w'); file.write(str(file.fileno())); file.close()"
    assert run(code, around=closed).returncode == 0
    assert int((tmp_path / "f").read_text()) > 2


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&-", "<&- >&- 2>&-"])
def test_programs_get_open_streams_from_a_process_whose_own_were_closed(closed: str, tmp_path: Path) -> None:
    look = "import os; [os.fstat(number) for number in range(3)]"
    code = (
        f"import subprocess; code = subprocess.run([sys.executable, '-c', {look!r}]).returncode;"
        f" open({str(tmp_path / 'f')!r}, 'w').write(str(code))"
    )
    assert run(code, around=closed).returncode == 0
    assert (tmp_path / "f").read_text() == "0"


@pytest.mark.parametrize(("around", "number"), [(">/dev/full", 28), (">&-", 9)])
def test_output_that_cannot_be_written_is_an_error_that_names_it(around: str, number: int) -> None:
    code = (
        "import json\ntry: print('x', flush=True)\nexcept OSError as error:"
        " sys.stderr.write(json.dumps([error.errno, error.filename])); give_up_output()"
    )
    done = run(code, around=around)
    assert json.loads(done.stderr) == [number, "standard output"]
    assert done.returncode == 0


def test_output_that_another_program_made_non_blocking_is_waited_for() -> None:
    reader, writer = os.pipe()
    fcntl.fcntl(writer, _SET_PIPE_SIZE, _SMALL_PIPE)
    os.set_blocking(writer, False)
    with subprocess.Popen(
        [sys.executable, "-c", _BEGIN + "sys.stdout.write('x' * 100_000)"], cwd=ROOT, stdout=writer
    ) as process:
        os.close(writer)
        with os.fdopen(reader, "rb") as pipe:
            assert pipe.read() == b"x" * 100_000
    assert process.returncode == 0


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "cp1252", "utf-8"])
def test_no_character_is_an_error(encoding: str) -> None:
    code = "[print('\\u00e9\\u4e2d\\U0001f600 \\ud800', file=stream) for stream in (sys.stdout, sys.stderr)]"
    done = run(code, PYTHONIOENCODING=encoding)
    assert done.returncode == 0
    assert done.stdout == "\u00e9\u4e2d\U0001f600 ?\n".encode(encoding, "replace")
    assert b"\\ud800" in done.stderr


def test_bytes_of_a_file_name_that_are_no_text_reach_a_pipe_as_they_are() -> None:
    assert run("print('a\\udcffb')").stdout == b"a\xffb\n"


def test_a_server_says_where_it_listens_although_nobody_reads() -> None:
    code = "output_as_log(); print('listening', flush=True); print('went on', file=sys.stderr)"
    assert run(code, around=">/dev/full").stderr == b"went on\n"
    assert run(code).stdout == b"listening\n"


def test_only_the_first_note_of_a_subject_is_printed_and_by_commands_alone() -> None:
    code = "note_once('disk', 'a\\x1b'); note_once('disk', 'b'); note_once('other', 'c')"
    assert run(code).stderr == b"edge: a \nedge: c\n"
    assert run(f"protect_streams(is_command=False); {code}").stderr == b""
