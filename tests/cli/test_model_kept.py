"""Test that `edge model list` and `cache` show saved files, and that `edge model rm` and `cache --clear` delete only
the named ones.
"""

import json
import os
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from apps.cli import main
from edge.models.slice_store import SliceStore
from edge.prefixes.group import seal
from edge.prefixes.store import DEFAULT_BYTES, PrefixStore, default_folder

DIGEST = "ab" * 32


class Caches:
    """The hub's cache and this program's, with two models, a split one, a slice, a quantized and a laid-out one."""

    def __init__(self, home: Path) -> None:
        self.hub, self.own = home / "hub", home / "edge"
        self.blob = self.fetched("someone/tiny", "v1", "tiny-q4_0.gguf", 100)
        self.fetched("someone/tiny", "v1", "tiny-q8_0.gguf", 200)
        (self.hub / "models--someone--tiny/snapshots/v2").mkdir()
        (self.hub / "models--someone--tiny/snapshots/v2/tiny-q4_0.gguf").symlink_to(self.blob)
        for i in (1, 2):
            self.fetched("other/big", "v1", f"sub/big-0000{i}-of-00002.gguf", 1000)
        self.fetched("other/big", "v1", "config.json", 5)
        self.write(f"own-slices/{DIGEST}.slice", 30)
        self.write(f"slices/{DIGEST}.77.partial", 7)
        self.write("types/tiny-0123-q4_k.gguf", 40)
        self.write("laid-out/0123456789abcdef/0-50.weights", 50)

    def fetched(self, repo: str, version: str, file: str, n_bytes: int) -> Path:
        folder = self.hub / f"models--{repo.replace('/', '--')}"
        blob, name = folder / "blobs" / file.replace("/", "-"), folder / "snapshots" / version / file
        for path in (blob, name):
            path.parent.mkdir(parents=True, exist_ok=True)
        blob.write_bytes(b"x" * n_bytes)
        name.symlink_to(blob)
        return blob

    def write(self, name: str, n_bytes: int) -> None:
        (self.own / name).parent.mkdir(parents=True, exist_ok=True)
        (self.own / name).write_bytes(b"x" * n_bytes)


@pytest.fixture
def caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Caches:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    return Caches(tmp_path)


def sizes(capsys: pytest.CaptureFixture[str]) -> dict[str, int]:
    """Bytes by name, as the command says."""
    capsys.readouterr()
    assert main(["model", "list", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["size_bytes"] == sum(model["size_bytes"] for model in said["models"])
    return {model["name"]: model["size_bytes"] for model in said["models"]}


ALL = {
    "other/big:sub/big-00001-of-00002.gguf": 2000,
    "someone/tiny:tiny-q4_0.gguf": 100,  # one file under two names
    "someone/tiny:tiny-q8_0.gguf": 200,
    "tiny-0123-q4_k.gguf": 40,
    "own-slices/abababababab": 30,
    "slices/abababababab.partial": 7,
    "laid-out/0123456789ab": 50,
}


def test_all_that_is_kept_is_listed(caches: Caches, capsys: pytest.CaptureFixture[str]) -> None:
    assert sizes(capsys) == ALL
    os.utime(caches.own / "types/tiny-0123-q4_k.gguf", (0, 0))
    assert main(["model", "list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["name", "kind", "size", "used"]
    line = next(line for line in lines if line.startswith("tiny-0123"))
    assert "quantized" in line
    assert "40 B" in line
    assert line.endswith("d ago")
    assert "2.37 KiB" in lines[-1]


@pytest.mark.parametrize(
    ("name", "gone"),
    [
        ("someone/tiny:tiny-q4_0.gguf", ["someone/tiny:tiny-q4_0.gguf"]),
        ("someone/tiny:Q8_0", ["someone/tiny:tiny-q8_0.gguf"]),
        ("someone/tiny", ["someone/tiny:tiny-q4_0.gguf", "someone/tiny:tiny-q8_0.gguf"]),
        ("other/big", ["other/big:sub/big-00001-of-00002.gguf"]),
        *((name, [name]) for name in list(ALL)[3:]),
    ],
)
def test_what_is_named_is_removed_and_nothing_else(
    caches: Caches, capsys: pytest.CaptureFixture[str], name: str, gone: list[str]
) -> None:
    assert main(["model", "rm", name, "--yes"]) == 0
    assert sizes(capsys) == {first: n for first, n in ALL.items() if first not in gone}
    assert caches.blob.exists() == ("someone/tiny:tiny-q4_0.gguf" not in gone)
    assert (caches.hub / "models--other--big/blobs/config.json").exists()


def test_nothing_is_removed_without_a_yes(
    caches: Caches, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["model", "rm", "other/big"]) == 2
    assert "add --yes" in capsys.readouterr().err
    monkeypatch.setattr("sys.stdin", Terminal("n\n"))
    assert main(["model", "rm", "other/big"]) == 0
    assert "Remove other/big:sub/big-00001-of-00002.gguf (1.95 KiB)?" in capsys.readouterr().err
    assert sizes(capsys) == ALL
    monkeypatch.setattr("sys.stdin", Terminal("y\n"))
    assert main(["model", "rm", "other/big"]) == 0
    assert "other/big:sub/big-00001-of-00002.gguf" not in sizes(capsys)


def test_what_is_in_use_or_not_there_is_refused(caches: Caches, capsys: pytest.CaptureFixture[str]) -> None:
    with SliceStore(caches.own / "own-slices", 1000).use(DIGEST):
        assert main(["model", "rm", "own-slices/abababababab", "--yes"]) != 0
    assert "in use" in capsys.readouterr().err
    assert main(["model", "rm", "nobody/none", "--yes"]) != 0
    assert "edge model list shows them" in capsys.readouterr().err
    assert sizes(capsys) == ALL


def cache(capsys: pytest.CaptureFixture[str], *options: str) -> dict[str, object]:
    """Return the command's account of the prefix cache."""
    capsys.readouterr()
    assert main(["model", "cache", "--json", *options]) == 0
    values = json.loads(capsys.readouterr().out)
    assert set(values) == {"path", "size_bytes", "limit_bytes", "blocks", "used_at_s", "freed_bytes"}
    assert (values["path"], values["limit_bytes"]) == (str(default_folder()), DEFAULT_BYTES)
    return {key: values[key] for key in ("size_bytes", "blocks", "used_at_s", "freed_bytes")}


def test_kept_prompts_are_shown_and_cleared(caches: Caches, capsys: pytest.CaptureFixture[str]) -> None:
    nothing = {"size_bytes": 0, "blocks": 0, "used_at_s": None, "freed_bytes": 0}
    assert cache(capsys) == cache(capsys, "--clear") == nothing
    assert main(["model", "cache"]) == 0
    assert capsys.readouterr().out.split() == f"prompts stored in {caches.own}/prefixes".split() + (
        "size 0 B, at most 2.00 GiB blocks 0 used never".split()
    )
    store = PrefixStore(caches.own / "prefixes", DEFAULT_BYTES)
    for n in range(400):  # three blocks in each
        names = [b"%032d" % (3 * n + i) for i in range(3)]
        assert store.write(names[0], seal(AESGCM(bytes(32)), names, bytes(64)))
    assert store.write(b"%032d" % 1200, bytes(64))  # no file of blocks
    for n, file in enumerate(store.files()):
        os.utime(file.path, (1000 + n, 1000 + n))
    n_bytes = 400 * (24 + 3 * 32 + 64 + 16) + 64
    assert cache(capsys) == {"size_bytes": n_bytes, "blocks": 1200, "used_at_s": 1400.0, "freed_bytes": 0}
    assert main(["model", "cache"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split() for line in lines[1:3]] == ["size 78.2 KiB, at most 2.00 GiB".split(), ["blocks", "1,200"]]
    assert lines[3].endswith("d ago")
    assert main(["model", "cache", "--clear"]) == 0
    said = capsys.readouterr().out
    assert said == f"removed 1,200 blocks of prompts from {store.folder}: 78.2 KiB\n"
    assert store.files() == []
    assert store.write(bytes(32), bytes(100))
    assert cache(capsys, "--clear") == {**nothing, "freed_bytes": 100}
    assert sizes(capsys) == ALL  # models are another matter


def test_kept_prompts_that_cannot_be_seen_are_an_error(caches: Caches, capsys: pytest.CaptureFixture[str]) -> None:
    caches.write("prefixes", 5)
    for options in ((), ("--clear",), ("--json",)):
        assert main(["model", "cache", *options]) == 3
        captured = capsys.readouterr()
        assert captured.out == ""
        assert captured.err.startswith(
            f"edge model: {caches.own}/prefixes cannot be read: Not a directory; check its owner"
        )
        assert captured.err.count("\n") == 1


class Terminal:
    """Somebody who types one line."""

    def __init__(self, line: str) -> None:
        self.readline = lambda: line

    def isatty(self) -> bool:
        return True
