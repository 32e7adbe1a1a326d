"""Chat templates that models ship, from the source archive of llama-cpp-python on PyPI: fetched once, checked by its
digest, and kept in the cache of the person. Only templates are taken out of it.
"""

from __future__ import annotations

import subprocess
import sys
import tarfile
import tempfile
from importlib.metadata import version
from pathlib import Path

from tests.real.weights import CACHE, FETCH_TIMEOUT_S

VERSION, _SHA256 = "0.3.36", "832db0699007f1be95a7e41ef12e88926b02ba836461e36a36372db2760c1a2e"
_FOLDER = CACHE / f"llama-cpp-python-{VERSION}-templates"
_MEMBERS = "/vendor/llama.cpp/models/templates/"


def templates() -> dict[str, str]:
    """Return the source of each template by the name of its file. OSError where they cannot be fetched."""
    assert version("llama-cpp-python") == VERSION, "take the digest of the version that is installed"
    if not _FOLDER.exists():
        _fetch()
    return {path.stem: path.read_text(encoding="utf-8") for path in sorted(_FOLDER.iterdir())}


def _fetch() -> None:
    """Take the templates out of the archive, all or none of them."""
    _FOLDER.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=_FOLDER.parent) as text:
        folder = Path(text)
        # pip checks the digest before it reads the archive.
        (folder / "needs.txt").write_text(f"llama-cpp-python=={VERSION} --hash=sha256:{_SHA256}\n")
        command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--quiet", "--no-deps"]
        command += ["--no-binary", "llama-cpp-python", "--require-hashes", "-r", str(folder / "needs.txt"), "-d", text]
        done = subprocess.run(command, capture_output=True, text=True, timeout=FETCH_TIMEOUT_S, check=False)
        archives = list(folder.glob("*.tar.gz"))
        if done.returncode or len(archives) != 1:
            raise OSError(f"the templates could not be fetched: {done.stderr.strip()[-500:]}")
        files = folder / "files"
        files.mkdir()
        with tarfile.open(archives[0]) as archive:
            for member in archive:
                source = archive.extractfile(member) if _MEMBERS in member.name and member.isfile() else None
                if source is not None and member.name.endswith(".jinja"):
                    (files / Path(member.name).name).write_bytes(source.read())
        try:
            files.rename(_FOLDER)
        except OSError:  # another process was first
            if not _FOLDER.is_dir():
                raise
