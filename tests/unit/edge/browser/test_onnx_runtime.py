"""Test fetching onnxruntime-web: once, by digest, from the registry that npm's variable names."""

import base64
import hashlib
import io
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from edge.browser import onnx_runtime
from edge.browser.onnx_runtime import FILES, VERSION, fetch, runtime_folder
from edge.errors import HubError
from tests.support.index_stand_in import Index

NAME = f"files/onnxruntime-web/-/onnxruntime-web-{VERSION}.tgz"


def package() -> bytes:
    """Return a package with small files under the names of the real ones, and with others."""
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w:gz") as archive:
        for name in (*FILES, "ort.all.mjs", "../../escaped"):
            content = f"content of {name}".encode()
            entry = tarfile.TarInfo(f"package/dist/{name}")
            entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content))
    return data.getvalue()


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Index]:
    """A registry on loopback that has the package, and an empty cache."""
    data, index = package(), Index()
    index.files[NAME.removeprefix("files/")] = data
    monkeypatch.setattr(onnx_runtime, "N_BYTES", len(data))
    monkeypatch.setattr(onnx_runtime, "SHA512", base64.b64encode(hashlib.sha512(data).digest()).decode())
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with index.serving():
        monkeypatch.setenv("npm_config_registry", index.url.replace("/simple", "/files/"))
        yield index


def left_behind(tmp_path: Path) -> list[str]:
    return sorted(path.name for path in (tmp_path / "cache").rglob("*") if path.is_file())


def test_files_are_fetched_once(registry: Index, tmp_path: Path) -> None:
    fractions = list[float]()
    fetch(fractions.append)
    assert fractions[-1] == 1.0
    for name in FILES:
        assert (runtime_folder() / name).read_text() == f"content of {name}"
    assert left_behind(tmp_path) == sorted(FILES)
    fetch()
    assert registry.paths == [f"/{NAME}"]


@pytest.mark.parametrize("change", [lambda data: data[:-1], lambda data: data + b"x", lambda data: b"", bytes.swapcase])
def test_another_digest_is_refused(registry: Index, tmp_path: Path, change: object) -> None:
    name = NAME.removeprefix("files/")
    original = registry.files[name]
    registry.files[name] = change(original)  # type: ignore[operator]
    with pytest.raises(HubError, match=r"\Aonnxruntime-web .* has the SHA-512 .*; try again\Z"):
        fetch()
    assert left_behind(tmp_path) == []
    registry.files[name] = original
    fetch()


@pytest.mark.parametrize("address", ["http://127.0.0.1:9", "https://127.0.0.1:9/x/", "http://"])
def test_registry_that_is_not_reachable(
    registry: Index, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, address: str
) -> None:
    monkeypatch.setenv("npm_config_registry", address)
    with pytest.raises(HubError, match=r"\Aonnxruntime-web .* could not be fetched from http.* no ONNX stages\Z"):
        fetch()
    assert left_behind(tmp_path) == []


def test_registry_that_is_no_address(registry: Index, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("npm_config_registry", "file:///etc")
    with pytest.raises(HubError, match="npm_config_registry is 'file:///etc'; an address that begins with https://"):
        fetch()
