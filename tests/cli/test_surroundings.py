"""Test commands in unusual environments: no home folder, a full disk, a closed pipe, another encoding."""

import json
import os
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest

from tests.support import ROOT, helpers
from tests.support.small_disk import small_disk

_LIMIT_S = 120  # only against a hang
_NO_HOME = ("HOME", "XDG_CACHE_HOME", "XDG_CONFIG_HOME", "XDG_STATE_HOME", "TMPDIR")
# A user whose number has no name. The tests' interpreter may lie in root's home, which this user may still read.
_NOBODY = (
    "setpriv", "--reuid=12345", "--regid=12345", "--clear-groups", "--bounding-set=-all,+dac_read_search",
    "--inh-caps=-all,+dac_read_search", "--ambient-caps=-all,+dac_read_search",
)  # fmt: skip


def environment(**values: str) -> dict[str, str]:
    """This process's environment without what says where files are."""
    usual = {name: value for name, value in os.environ.items() if name not in _NO_HOME}
    return {**usual, "PYTHONDONTWRITEBYTECODE": "1", **values}


def edge(
    *words: str | bytes | Path, env: Mapping[str, str], around: str = "", under: tuple[str, ...] = ()
) -> "subprocess.CompletedProcess[bytes]":
    """Run a command. around: redirections of a shell. under: a program that starts it."""
    command = [*under, "sh", "-c", f'exec "$0" -m apps.cli "$@" {around}', sys.executable, *words]
    return subprocess.run(
        command, cwd=ROOT, env=env, stdin=subprocess.DEVNULL, capture_output=True, timeout=_LIMIT_S, check=False
    )


ANSWERS = ("chat", "-p", "hi", "--max-tokens", "3")


def notes(done: "subprocess.CompletedProcess[bytes]") -> list[str]:
    """The warnings of a command."""
    return [line for line in done.stderr.decode().splitlines() if line.startswith("edge: ")]


@pytest.mark.parametrize("home", [{}, {"HOME": "relative"}, {"HOME": "/proc/nonexistent"}])
def test_a_command_without_a_home_works_with_one_warning(home: dict[str, str]) -> None:
    done = edge(*ANSWERS, env=environment(XDG_STATE_HOME="relative", XDG_CACHE_HOME="", **home), under=_NOBODY)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout) > 3
    assert len(notes(done)) == 1
    assert "nothing is stored there" in notes(done)[0]


def test_the_home_of_another_user_is_not_used(tmp_path: Path) -> None:
    """As with sudo, which may leave HOME as it was."""
    edge(*ANSWERS, env=environment(HOME=str(tmp_path)))
    assert list(tmp_path.rglob("prefix.key"))
    done = edge(*ANSWERS, env=environment(HOME=str(tmp_path)), under=_NOBODY)
    assert done.returncode == 0, done.stderr
    assert len(notes(done)) == 1


@pytest.mark.parametrize("options", ["size=8k", "size=8k,ro"], ids=["full", "read-only"])
def test_a_command_works_on_a_disk_that_takes_nothing(options: str, tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", options) as disk:
        with suppress(OSError):
            (disk / "all that there is room for").write_bytes(bytes(1 << 20))
        done = edge(*ANSWERS, env=environment(HOME=str(disk)))
    assert done.returncode == 0, done.stderr
    assert len(notes(done)) == 1


def test_without_a_folder_for_temporary_files_a_command_works(tmp_path: Path) -> None:
    done = edge(*ANSWERS, env=environment(HOME=str(tmp_path), TMPDIR="/nonexistent"))
    assert (done.returncode, notes(done)) == (0, []), done.stderr


@pytest.mark.parametrize("encoding", ["ascii", "cp1252"])
def test_a_model_whose_name_is_no_text_is_used_in_any_encoding(encoding: str, tmp_path: Path) -> None:
    from edge.models.demo import MODEL_PATH

    name = os.fsencode(tmp_path) + b"/caf\xe9-\xe4\xb8\xad\xff.gguf"
    os.symlink(MODEL_PATH, name)
    env = environment(HOME=str(tmp_path), PYTHONIOENCODING=encoding, LC_ALL="C")
    for words in (("model", "info", name), ("model", "info", name, "--json"), ("chat", name, *ANSWERS[1:])):
        done = edge(*words, env=env)
        assert done.returncode == 0, done.stderr
    missing = edge("chat", b"\xff\xe9.gguf", "-p", b"\xff \xe4\xb8\xad", env=env)
    assert b"Error" not in missing.stderr
    assert len(missing.stderr.splitlines()) == 1


@pytest.mark.parametrize("encoding", ["ascii", "utf-8"])
def test_a_prompt_that_is_no_text_is_answered(encoding: str, tmp_path: Path) -> None:
    env = environment(HOME=str(tmp_path), PYTHONIOENCODING=encoding)
    options = ("--system", b"\xff", "--stop", b"\xfe\xff", "--resume", "talk")
    for more in ((), ("--json",)):
        done = edge("chat", "-p", b"caf\xe9 \xff \xe4\xb8\xad", "--max-tokens", "3", *options, *more, env=env)
        assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["text"]


@pytest.mark.parametrize("words", [("--help",), ("--version",), ("model", "info"), ("model", "info", "--json")])
def test_standard_output_that_cannot_be_written_is_one_line(words: tuple[str, ...], tmp_path: Path) -> None:
    env = environment(HOME=str(tmp_path))
    for around, code, why in ((">/dev/full", 4, b"No space left"), (">&-", 3, b"Bad file descriptor")):
        done = edge(*words, env=env, around=around)
        assert done.returncode == code
        assert len(done.stderr.splitlines()) == 1
        assert b"standard output: " + why in done.stderr


def test_a_reader_that_leaves_ends_a_command_silently(tmp_path: Path) -> None:
    done = edge("--help", env=environment(HOME=str(tmp_path)), around="| true")
    assert done.stderr == b""


@pytest.mark.parametrize("around", ["<&-", "2>&-", "2>/dev/full", "<&- 2>&-"])
def test_closed_and_full_streams_do_not_change_the_answer(around: str, tmp_path: Path) -> None:
    env = environment(HOME=str(tmp_path))
    assert edge(*ANSWERS, env=env, around=around).stdout == edge(*ANSWERS, env=env).stdout


@contextmanager
def full_pipe() -> Iterator[int]:
    """Yield the end of a pipe that takes nothing more, and is not read."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    with suppress(BlockingIOError):
        while True:
            os.write(writer, bytes(4096))
    os.set_blocking(writer, True)  # as its other writers have it
    yield writer
    os.close(reader)
    os.close(writer)


@contextmanager
def unheard(kind: str) -> Iterator[int]:
    """Yield a standard error that nobody reads."""
    if kind == "full pipe":
        with full_pipe() as writer:
            yield writer
    else:
        with open("/dev/full", "wb") as full:
            yield full.fileno()


@contextmanager
def running(words: Sequence[str], stderr: int, env: Mapping[str, str]) -> "Iterator[subprocess.Popen[bytes]]":
    command = [sys.executable, "-m", "apps.cli", *words]
    with subprocess.Popen(
        command, cwd=ROOT, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=stderr
    ) as process:
        try:
            yield process
        finally:
            process.terminate()
            process.wait(_LIMIT_S)


def listens(port: int) -> bool:
    with suppress(ConnectionRefusedError), socket.create_connection(("127.0.0.1", port)):
        return True
    return False


def ask(url: str) -> str:
    messages = [{"role": "user", "content": "hi"}]
    body = json.dumps({"model": "edge-demo-q8_0", "messages": messages, "max_tokens": 3, "temperature": 0}).encode()
    request = urllib.request.Request(f"{url}/v1/chat/completions", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=_LIMIT_S) as response:
        return str(json.loads(response.read())["choices"][0]["message"]["content"])


@pytest.mark.parametrize("kind", ["full pipe", "full disk"])
def test_a_server_whose_log_nobody_reads_restarts_its_engine(kind: str, tmp_path: Path) -> None:
    env = environment(HOME=str(tmp_path), EDGE_API_KEY="")
    with unheard(kind) as stderr, running(("serve", "--port", "0"), stderr, env) as process:
        assert process.stdout is not None
        url = process.stdout.readline().decode().split()[-1]
        before = ask(url)
        for _ in range(2):
            children = psutil.Process(process.pid).children()
            engine = next(child for child in children if "edge.serve.engine.child" in child.cmdline())
            engine.kill()
            assert ask(url) == before
            process.send_signal(signal.SIGUSR1)
        assert ask(url) == before


def test_a_worker_whose_log_nobody_reads_serves_and_ends(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    env = environment(HOME=str(tmp_path))
    words = ("worker", "--listen", f"127.0.0.1:{port}", "--threads", "1")
    with full_pipe() as stderr, running(words, stderr, env) as process:
        helpers.until(lambda: listens(port), "the worker listens")
        done = helpers.run_edge(*ANSWERS, "--workers", f"127.0.0.1:{port}", env=env, only_env=True)
        assert done.returncode == 0, done.stderr
        process.terminate()
        assert process.wait(_LIMIT_S) == 0


@pytest.mark.parametrize("words", [ANSWERS, ("cluster", "list")], ids=["chat", "cluster"])
def test_a_home_that_this_user_may_not_enter_is_no_home(words: tuple[str, ...], tmp_path: Path) -> None:
    """A root without its rights, as in a container: it cannot enter another user's folder."""
    home = tmp_path / "home"
    home.mkdir(mode=0o700)
    os.chown(home, 12345, 12345)
    done = edge(*words, env=environment(HOME=str(home)), under=("setpriv", "--bounding-set=-all", "--inh-caps=-all"))
    assert b"Error" not in done.stderr
    assert len(notes(done)) == (words is ANSWERS)  # the list of members needs no folder to be written
    assert done.returncode == (0 if words is ANSWERS else 3), done.stderr
