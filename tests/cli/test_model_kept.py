"""`edge model list` shows what is kept of models, and `edge model rm` removes just what is named."""

import json
import os
from pathlib import Path

import pytest

from apps.cli import main
from edge.slices.store import SliceStore

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
        self.made(f"own-slices/{DIGEST}.slice", 30)
        self.made(f"slices/{DIGEST}.77.partial", 7)
        self.made("types/tiny-0123-q4_k.gguf", 40)
        self.made("laid-out/0123456789abcdef/0-50.weights", 50)

    def fetched(self, repo: str, version: str, file: str, n_bytes: int) -> Path:
        folder = self.hub / f"models--{repo.replace('/', '--')}"
        blob, name = folder / "blobs" / file.replace("/", "-"), folder / "snapshots" / version / file
        for path in (blob, name):
            path.parent.mkdir(parents=True, exist_ok=True)
        blob.write_bytes(b"x" * n_bytes)
        name.symlink_to(blob)
        return blob

    def made(self, name: str, n_bytes: int) -> None:
        (self.own / name).parent.mkdir(parents=True, exist_ok=True)
        (self.own / name).write_bytes(b"x" * n_bytes)


@pytest.fixture
def caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Caches:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("edge.models.hub._cache", lambda: tmp_path / "hub")
    return Caches(tmp_path)


def sizes(capsys: pytest.CaptureFixture[str]) -> dict[str, int]:
    """Bytes by name, as the command says."""
    capsys.readouterr()
    assert main(["model", "list", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["size_bytes"] == sum(one["size_bytes"] for one in said["models"])
    return {one["name"]: one["size_bytes"] for one in said["models"]}


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
    assert line.endswith("days ago")
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
    assert sizes(capsys) == {one: n for one, n in ALL.items() if one not in gone}
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
    assert "edge model list shows it" in capsys.readouterr().err
    assert sizes(capsys) == ALL


class Terminal:
    """Somebody who types one line."""

    def __init__(self, line: str) -> None:
        self.readline = lambda: line

    def isatty(self) -> bool:
        return True
