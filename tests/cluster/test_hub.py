"""Test `edge model pull` against a local replacement for the hub: downloads, resumed downloads, offline use, and
errors.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import BinaryIO

import pytest

from edge.errors import HubError
from edge.models import hub, synth
from edge.models.addresses import Address
from edge.models.paths import model_path
from quant.errors import ModelFileError
from tests.support import ROOT
from tests.support.helpers import run_edge, until
from tests.support.hub_stand_in import TOKEN, Hub

REPO = "someone/tiny-GGUF"
CHUNK = 10 << 20  # the library writes a download in pieces of 10 MiB


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A model in a few kilobytes."""
    path = tmp_path_factory.mktemp("hub") / "tiny.gguf"
    synth.synthesize(path, synth.shape("llama", layers=1, embd=64, ff=64, heads=2, vocab=300), "q8_0")
    return path.read_bytes()


@pytest.fixture(scope="module")
def big_model(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A model that arrives in three pieces."""
    path = tmp_path_factory.mktemp("hub") / "big.gguf"
    shape = synth.shape("llama", layers=1, embd=512, ff=512, heads=4, vocab=10_000, tied=True)
    synth.synthesize(path, shape, "f32")
    data = path.read_bytes()
    assert 2 * CHUNK < len(data) < 4 * CHUNK
    return data


@pytest.fixture
def stand_in() -> Iterator[Hub]:
    hub = Hub()
    with hub.serving():
        yield hub


class Client:
    """`edge model` with a cache of its own, talking to the stand-in."""

    def __init__(self, stand_in: Hub, home: Path) -> None:
        self.cache = home / "hub"
        saved = {k: v for k, v in os.environ.items() if not k.startswith("HF_") and "proxy" not in k.lower()}
        self.env = saved | {"HF_ENDPOINT": stand_in.url, "HF_HOME": str(home), "HF_HUB_DISABLE_XET": "1"}

    def start(self, *args: str) -> "subprocess.Popen[str]":
        command = [sys.executable, "-m", "apps.cli", "model", *args]
        pipe = subprocess.PIPE
        return subprocess.Popen(command, cwd=ROOT, env=self.env, stdout=pipe, stderr=pipe, text=True)

    def run(self, *args: str) -> "subprocess.CompletedProcess[str]":
        return run_edge("model", *args, env=self.env, only_env=True)

    def pulled(self, spec: str) -> Path:
        """The path it prints."""
        done = self.run("pull", spec)
        assert done.returncode == 0, done.stderr
        return Path(done.stdout.splitlines()[-1])

    def refused(self, spec: str, code: int = 6) -> str:
        """Its one line of complaint."""
        done = self.run("pull", spec)
        assert (done.returncode, done.stdout) == (code, ""), done.stderr
        lines = done.stderr.splitlines()
        assert len(lines) == 1, done.stderr
        assert lines[0].startswith("edge model: ")
        return lines[0]


@pytest.fixture
def client(stand_in: Hub, tmp_path: Path) -> Client:
    return Client(stand_in, tmp_path)


def test_pull_downloads_once(stand_in: Hub, client: Client, model: bytes) -> None:
    stand_in.repos[REPO] = {"tiny.gguf": model}
    path = client.pulled(f"{REPO}:tiny.gguf")
    assert path.read_bytes() == model
    assert path.is_relative_to(client.cache)
    assert client.pulled(f"{REPO}:tiny.gguf") == path
    assert stand_in.ranges == [""]


def test_pull_json(stand_in: Hub, client: Client, model: bytes) -> None:
    stand_in.repos[REPO] = {"tiny.gguf": model}
    done = client.run("pull", f"{REPO}:tiny.gguf", "--json")
    result = json.loads(done.stdout)
    assert Path(result["path"]).name == "tiny.gguf"
    assert 0 < result["size_bytes"] <= len(model)


def test_pull_fetches_the_new_version(stand_in: Hub, client: Client, model: bytes) -> None:
    stand_in.repos[REPO] = {"tiny.gguf": b"GGUF, but not much of it"}
    client.refused(f"{REPO}:tiny.gguf", code=3)
    stand_in.repos[REPO]["tiny.gguf"] = model
    assert client.pulled(f"{REPO}:tiny.gguf").read_bytes() == model


def test_a_cut_connection_is_resumed(stand_in: Hub, client: Client, big_model: bytes) -> None:
    stand_in.repos[REPO] = {"big.gguf": big_model}
    stand_in.cut_after = CHUNK + 1000
    assert client.pulled(f"{REPO}:big.gguf").read_bytes() == big_model
    assert stand_in.ranges == ["", f"bytes={CHUNK}-"]


def test_a_killed_download_is_continued(stand_in: Hub, client: Client, big_model: bytes) -> None:
    stand_in.repos[REPO] = {"big.gguf": big_model}
    stand_in.stall_after = CHUNK + 1000
    with client.start("pull", f"{REPO}:big.gguf") as process:
        until(lambda: any(part.stat().st_size >= CHUNK for part in client.cache.rglob("*.partial")), "a chunk is kept")
        assert process.poll() is None
        process.kill()
    assert not list(client.cache.rglob("big.gguf"))
    assert client.pulled(f"{REPO}:big.gguf").read_bytes() == big_model
    assert stand_in.ranges == ["", f"bytes={CHUNK}-"]


def test_a_partial_file_that_is_too_long_is_begun_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And is not taken for the model where nothing of that comes."""
    blobs = tmp_path / "models--someone--tiny" / "blobs"
    blobs.mkdir(parents=True)
    (blobs / "digest.partial").write_bytes(bytes(20))

    def cut(*_: object, **options: object) -> None:
        raise OSError(f"cut, to go on from {options['resume_size']}")

    monkeypatch.setattr("huggingface_hub.file_download.http_get", cut)
    metadata = SimpleNamespace(etag="digest", size=10, commit_hash="newest")
    with pytest.raises(OSError, match="from 0"):
        hub._fetch("someone/tiny", "tiny.gguf", metadata, tmp_path, lambda here: None)
    assert not (blobs / "digest").exists()


@pytest.mark.parametrize("n_bytes", [9, 10])
def test_a_partial_file_is_continued_and_a_whole_one_needs_no_byte(
    n_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    blobs = tmp_path / "models--someone--tiny" / "blobs"
    blobs.mkdir(parents=True)
    (blobs / "digest.partial").write_bytes(b"0123456789"[:n_bytes])
    resume_sizes: list[int] = []

    def get(url: str, file: BinaryIO, *, resume_size: int, **_: object) -> None:
        resume_sizes.append(resume_size)
        file.write(b"0123456789"[resume_size:])

    monkeypatch.setattr("huggingface_hub.file_download.http_get", get)
    metadata = SimpleNamespace(etag="digest", size=10, commit_hash="newest")
    hub._fetch("someone/tiny", "tiny.gguf", metadata, tmp_path, lambda here: None)
    assert (blobs / "digest").read_bytes() == b"0123456789"
    assert not (blobs / "digest.partial").exists()
    assert resume_sizes == [9] * (n_bytes < 10)


def test_without_the_hub_the_cache_answers(tmp_path: Path, model: bytes) -> None:
    stand_in = Hub()
    stand_in.repos[REPO] = {"tiny-q8_0.gguf": model}
    with stand_in.serving():
        client = Client(stand_in, tmp_path)
        path = client.pulled(f"{REPO}:tiny-q8_0.gguf")
    assert client.pulled(f"{REPO}:tiny-q8_0.gguf") == path
    assert client.pulled(f"{REPO}:q8_0") == path
    assert client.run("info", f"{REPO}:q8_0").returncode == 0
    assert "cannot be reached" in client.refused(f"{REPO}:other.gguf")
    client.env["HF_HUB_OFFLINE"] = "1"
    assert client.pulled(f"{REPO}:tiny-q8_0.gguf") == path
    assert "cannot be reached" in client.refused("someone/else:q8_0")


def test_info_fetches_what_is_not_there(stand_in: Hub, client: Client, model: bytes) -> None:
    stand_in.repos[REPO] = {"tiny.gguf": model}
    done = client.run("info", f"{REPO}:tiny.gguf", "--json")
    assert json.loads(done.stdout)["architecture"] == "llama", done.stderr


@pytest.mark.parametrize("file", ["q4_0", "*Q4_0*", "m-q4_0-00001-of-00002.gguf", "m-q4_0-00002-of-00002.gguf"])
def test_all_parts_of_a_split_model_come(stand_in: Hub, client: Client, tmp_path: Path, file: str) -> None:
    parts = _split_model(tmp_path)
    stand_in.repos[REPO] = {**parts, "m-q8_0.gguf": b"", "README.md": b""}
    path = client.pulled(f"{REPO}:{file}")
    assert path.name == "m-q4_0-00001-of-00002.gguf"
    assert sorted(p.name for p in path.parent.iterdir()) == sorted(parts)


def test_several_files_are_listed(stand_in: Hub, client: Client, model: bytes) -> None:
    stand_in.repos[REPO] = {"m.Q4_K_M.gguf": model, "m.Q4_K_S.gguf": model, "m.Q8_0.gguf": model, "README.md": b""}
    everything = "m.Q4_K_M.gguf, m.Q4_K_S.gguf, m.Q8_0.gguf"
    assert client.refused(REPO).endswith(f"has 3 files; name one of them: {everything}")
    assert client.refused(f"{REPO}:q4").endswith(
        "has 2 files like 'q4'; name one of them: m.Q4_K_M.gguf, m.Q4_K_S.gguf"
    )
    assert client.refused(f"{REPO}:q5").endswith(f"has no files like 'q5'; name one of them: {everything}")
    assert client.refused(f"{REPO}:m.Q5_0.gguf").endswith(f"has no file m.Q5_0.gguf; it has {everything}")
    assert client.pulled(f"{REPO}:q4_k_m").name == "m.Q4_K_M.gguf"


def test_no_models_there(stand_in: Hub, client: Client) -> None:
    stand_in.repos[REPO] = {"model.safetensors": b"", "README.md": b""}
    assert "has no .gguf files" in client.refused(REPO)


def test_no_such_repository(client: Client) -> None:
    for spec in ("no/where:x.gguf", "no/where:q4_0", "no/where"):
        assert "no repository no/where" in client.refused(spec)


def test_a_gated_repository_needs_a_token(stand_in: Hub, client: Client, model: bytes) -> None:
    stand_in.repos[REPO] = {"tiny.gguf": model}
    stand_in.gated.add(REPO)
    for spec in (f"{REPO}:tiny.gguf", REPO):
        assert "is gated" in client.refused(spec)
        assert "hf auth login" in client.refused(spec)
    client.env["HF_TOKEN"] = TOKEN
    assert client.pulled(REPO).read_bytes() == model


def test_no_room(stand_in: Hub, client: Client, model: bytes) -> None:
    stand_in.repos[REPO] = {"tiny.gguf": model}
    stand_in.announced["tiny.gguf"] = 1 << 50
    line = client.refused(f"{REPO}:tiny.gguf")
    assert "no room for tiny.gguf" in line
    assert "1024 TiB needed" in line


def test_a_file_that_is_no_model(stand_in: Hub, client: Client) -> None:
    stand_in.repos[REPO] = {"tiny.gguf": b"<html>"}
    assert "tiny.gguf" in client.refused(f"{REPO}:tiny.gguf", code=3)


def test_a_token_that_has_expired_does_not_keep_from_public_files(stand_in: Hub, client: Client, model: bytes) -> None:
    stand_in.repos[REPO] = {"tiny.gguf": model}
    client.env["HF_TOKEN"] = "hf_expired"
    for spec in (f"{REPO}:tiny.gguf", REPO):
        done = client.run("pull", spec)
        assert done.returncode == 0, done.stderr
        assert done.stderr.count("refuses the saved token") == 1
    assert set(stand_in.tokens) == {"Bearer hf_expired", ""}
    stand_in.repos["someone/gated"] = {"tiny.gguf": model}
    stand_in.gated.add("someone/gated")
    assert "token may have expired" in client.refused("someone/gated:tiny.gguf")


@pytest.mark.parametrize(
    "address",
    [
        f"https://huggingface.co/{REPO}",
        f"https://huggingface.co/{REPO}/blob/main/tiny-Q8_0.gguf",
        f"https://huggingface.co/{REPO}/resolve/main/tiny-Q8_0.gguf?download=true",
        f"http://www.huggingface.co/{REPO}/tree/main/",
        f"hf.co/{REPO}:Q8_0",
        f"huggingface.co/{REPO}:latest",
        f"hf://{REPO}/tiny-Q8_0.gguf",
    ],
)
def test_addresses_of_a_browser_name_the_same_model(stand_in: Hub, client: Client, model: bytes, address: str) -> None:
    stand_in.repos[REPO] = {"tiny-Q8_0.gguf": model, "mmproj-tiny-F16.gguf": b"", "imatrix.gguf": b""}
    done = client.run("info", address, "--json")
    assert json.loads(done.stdout)["architecture"] == "llama", done.stderr


def test_projectors_and_importance_matrices_are_not_the_model(stand_in: Hub, client: Client, model: bytes) -> None:
    others = ["mmproj-tiny-F16.gguf", "tiny.mmproj-q8_0.gguf", "imatrix_unsloth.gguf", "tiny.imatrix.gguf"]
    stand_in.repos[REPO] = {**dict.fromkeys(others, model), "tiny-IQ4_XS-imatrix.gguf": model}
    assert client.pulled(REPO).name == "tiny-IQ4_XS-imatrix.gguf"
    assert client.pulled(f"{REPO}:mmproj-tiny-F16.gguf").name == "mmproj-tiny-F16.gguf"  # somebody wants just this
    for name in others:
        done = client.run("info", f"{REPO}:{name}")
        assert (done.returncode, "--mmproj" in done.stderr or "--imatrix" in done.stderr) == (6, True), done.stderr
    del stand_in.repos[REPO]["tiny-IQ4_XS-imatrix.gguf"]
    assert "tiny.mmproj-q8_0.gguf is a projector" in client.refused(f"{REPO}:tiny.gguf")
    assert "has no .gguf files of models" in client.refused("someone/tiny-GGUF:q4")


def test_a_missing_part_is_named(stand_in: Hub, client: Client, tmp_path: Path) -> None:
    parts = _split_model(tmp_path)
    for name in sorted(parts):
        stand_in.repos[REPO] = {other: data for other, data in parts.items() if other != name}
        for spec in (REPO, *(f"{REPO}:{part}" for part in parts)):
            assert f"lacks {name}, a part of a split model of 2 files" in client.refused(spec)


def test_a_model_in_letters_of_another_case_is_a_model(stand_in: Hub, client: Client, model: bytes) -> None:
    stand_in.repos[REPO] = {"Tiny-Q8_0.GGUF": model}
    assert client.pulled(f"{REPO}:q8_0").name == "Tiny-Q8_0.GGUF"
    assert client.pulled(f"{REPO}:Tiny-Q8_0.GGUF").name == "Tiny-Q8_0.GGUF"
    assert REPO in client.run("list").stdout


def test_another_revision_is_fetched_and_found_again(stand_in: Hub, client: Client, model: bytes) -> None:
    stand_in.repos[REPO] = {"tiny.gguf": model}
    address = f"https://huggingface.co/{REPO}/blob/v1.0/tiny.gguf"
    assert client.pulled(address).read_bytes() == model
    client.env["HF_HUB_OFFLINE"] = "1"
    assert client.run("info", address).returncode == 0
    assert client.run("info", f"{REPO}:tiny.gguf").returncode == 6  # this version was not fetched


def test_a_hub_that_names_files_outside_of_the_cache_writes_nothing(
    stand_in: Hub, client: Client, model: bytes
) -> None:
    stand_in.repos[REPO] = {"tiny.gguf": model}
    stand_in.etag = "../../../../written"
    assert "is not a digest; nothing is written" in client.refused(f"{REPO}:tiny.gguf")
    stand_in.etag = None
    stand_in.repos[REPO] = {"../../tiny.gguf": model}
    assert "has no .gguf files of models" in client.refused(REPO)
    assert not [path for path in client.cache.parent.rglob("*") if path.is_file() and path.suffix not in (".lock", "")]


@pytest.mark.parametrize("ref", ["..", "../../../..", "/etc", "", "a\nb", "\xff"])
def test_a_cache_that_points_out_of_itself_has_no_models(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ref: str
) -> None:
    folder = tmp_path / "hub" / "models--someone--tiny"
    (folder / "refs").mkdir(parents=True)
    (folder / "snapshots" / "v1").mkdir(parents=True)
    (tmp_path / "outside.gguf").touch()
    (tmp_path / "hub" / "models--..--..").mkdir()
    (folder / "refs" / "main").write_bytes(ref.encode("latin-1"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    assert hub.cached_models() == {}
    assert [repo for repo, _ in hub.cached_repositories()] == ["someone/tiny"]
    with pytest.raises(HubError):
        hub.cached(Address("someone/tiny", "outside.gguf"))


def test_resolve_prefers_local_files(tmp_path: Path) -> None:
    path = tmp_path / "a.gguf"
    path.touch()
    assert model_path(str(path)) == path
    with pytest.raises(ModelFileError, match="no such file"):
        model_path(str(tmp_path / "b.gguf"))


def _split_model(folder: Path) -> dict[str, bytes]:
    """A model in two files, as llama.cpp's splitter makes them."""
    import gguf
    import numpy as np

    writer = gguf.GGUFWriter(folder / "m-q4_0.gguf", "llama", split_max_tensors=1)
    for name in ("token_embd.weight", "output_norm.weight"):
        writer.add_tensor(name, np.ones(32, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return {path.name: path.read_bytes() for path in folder.glob("m-q4_0-*.gguf")}
