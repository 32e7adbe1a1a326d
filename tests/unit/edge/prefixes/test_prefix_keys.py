"""Test the owner's key file: one key, private and complete; hashes identify a history and reveal nothing of it."""

import hashlib
import hmac
import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from devices.files import locked
from edge.errors import PrefixError
from edge.prefixes.keys import block_hashes, derived, owner_key
from tests.support import ROOT

KEY = bytes(range(32))
TOKENS = st.lists(st.integers(-(2**31), 2**31 - 1), max_size=40)
BLOCKS = st.integers(1, 9)


def test_a_key_is_made_once_for_this_user_alone(tmp_path: Path) -> None:
    folder = tmp_path / "state"
    key = owner_key(folder)
    assert len(key) == 32
    assert (folder / "prefix.key").read_bytes() == key == owner_key(folder)
    assert (folder / "prefix.key").stat().st_mode & 0o777 == 0o600
    assert folder.stat().st_mode & 0o777 == 0o700
    assert owner_key(tmp_path / "other") != key


def test_the_key_lies_with_this_users_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert owner_key() == (tmp_path / "edge" / "prefix.key").read_bytes()


BEGIN_TOGETHER = """
import sys
from pathlib import Path
from edge.prefixes.keys import owner_key
print("ready", flush=True)
sys.stdin.read()
print(owner_key(Path(sys.argv[1])).hex())
"""


def has_open(child: subprocess.Popen[str], file: Path) -> bool:
    """Return whether a process has a file open, as Linux lists them."""
    with suppress(FileNotFoundError):  # one is closed meanwhile
        return any(descriptor.samefile(file) for descriptor in Path(f"/proc/{child.pid}/fd").glob("*"))
    return False


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="only Linux lists the files of a process")
def test_processes_that_begin_at_once_have_one_key(tmp_path: Path) -> None:
    command = [sys.executable, "-c", BEGIN_TOGETHER, str(tmp_path / "state")]
    children = [
        subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(4)
    ]
    for child in children:
        assert child.stdout
        assert child.stdout.readline() == "ready\n"
    with locked(tmp_path / "state"):
        for child in children:
            assert child.stdin
            child.stdin.close()
        while not all(has_open(child, tmp_path / "state" / ".lock") for child in children):  # until they want it
            assert [child.poll() for child in children] == [None] * len(children)
    keys = set()
    for child in children:
        with child:
            assert child.stdout
            keys.add(child.stdout.read().strip())
    assert keys == {owner_key(tmp_path / "state").hex()}
    assert sorted(os.listdir(tmp_path / "state")) == [".lock", "prefix.key"]


@pytest.mark.parametrize(
    ("content", "mode", "problem"),
    [
        (b"", 0o600, "0 bytes"),
        (KEY[:31], 0o600, "31 bytes"),
        (KEY + b"\n", 0o600, "33 bytes"),
        (bytes(32), 0o600, "all zero"),
        (KEY, 0o640, "access for others .mode 0640"),
        (KEY, 0o602, "access for others .mode 0602"),
    ],
)
def test_a_file_that_is_no_key_is_said_to_be_none(tmp_path: Path, content: bytes, mode: int, problem: str) -> None:
    path = tmp_path / "prefix.key"
    path.write_bytes(content)
    path.chmod(mode)
    with pytest.raises(PrefixError, match=rf"prefix\.key is not .* expected .* file has .*{problem}.*; delete it"):
        owner_key(tmp_path)
    assert path.read_bytes() == content
    path.unlink()
    assert len(owner_key(tmp_path)) == 32


def test_what_is_no_file_is_no_key(tmp_path: Path) -> None:
    path = tmp_path / "prefix.key"
    os.mkfifo(path, 0o600)
    with pytest.raises(PrefixError, match="not a regular file"):
        owner_key(tmp_path)
    path.unlink()
    (tmp_path / "real").write_bytes(KEY)
    path.symlink_to(tmp_path / "real")
    with pytest.raises(PrefixError, match=r"cannot be used: .*symbolic links"):
        owner_key(tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(PrefixError, match=r"cannot be used: Not a directory; .*--prefix-cache 0"):
        owner_key(tmp_path / "file")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
def test_the_key_of_another_user_is_none(tmp_path: Path) -> None:
    owner_key(tmp_path)
    os.chown(tmp_path / "prefix.key", 12345, -1)
    with pytest.raises(PrefixError, match=r"another owner \(user 12345\)"):
        owner_key(tmp_path)


def test_derived_is_hmac_of_parts_with_their_lengths() -> None:
    def length(n: int) -> bytes:
        return n.to_bytes(8, "little")

    message = length(4) + b"name" + length(0) + length(2) + b"xy"
    assert derived(KEY, b"name", b"", b"xy") == hmac.new(KEY, message, hashlib.sha256).digest()
    assert derived(KEY, b"ab", b"c") != derived(KEY, b"a", b"bc") != derived(KEY, b"abc")


def test_links_are_what_the_page_says() -> None:
    first = derived(KEY, b"", b"\x01\0\0\0\xff\xff\xff\xff")
    second = derived(KEY, first, b"\x02\x01\0\0\x03\0\0\0")
    assert block_hashes(KEY, [1, -1, 258, 3, 4], 2) == [first, second]
    assert block_hashes(KEY, [1], 2) == block_hashes(KEY, [], 2) == []
    for block in (0, -1):
        with pytest.raises(ValueError, match="at least 1 token"):
            block_hashes(KEY, [1, 2], block)


@given(TOKENS, TOKENS, TOKENS, BLOCKS)
def test_prompts_share_the_links_of_the_blocks_that_they_begin_with(
    start: list[int], a: list[int], b: list[int], block: int
) -> None:
    first, other = start + a, start + b
    both = [block_hashes(KEY, tokens, block) for tokens in (first, other)]
    assert [len(chain) for chain in both] == [len(first) // block, len(other) // block]
    assert all(len(block_hash) == 32 for chain in both for block_hash in chain)
    for end in range(1, min(map(len, both)) + 1):
        assert (both[0][end - 1] == both[1][end - 1]) == (first[: end * block] == other[: end * block])


@given(TOKENS, BLOCKS, st.integers(0, 31), st.integers(0, 7))
def test_another_key_has_other_hashes(tokens: list[int], block: int, byte: int, bit: int) -> None:
    other = bytearray(KEY)
    other[byte] ^= 1 << bit
    assert not set(block_hashes(KEY, tokens, block)) & set(block_hashes(bytes(other), tokens, block))


@given(TOKENS, BLOCKS)
def test_no_two_links_of_a_prompt_are_alike(tokens: list[int], block: int) -> None:
    chain = block_hashes(KEY, tokens, block)
    assert len(set(chain)) == len(chain)
