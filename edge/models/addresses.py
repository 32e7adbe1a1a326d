"""Addresses of models on the Hugging Face hub. An address is checked before a part of it becomes part of a path.

An address is OWNER/NAME:FILE, hf.co/OWNER/NAME:FILE, or the address of a page in a browser. Hub libraries differ in the
names that they refuse, so this module does not rely on their checks.
"""

from __future__ import annotations

import os
import re
from pathlib import PurePosixPath
from typing import NamedTuple
from urllib.parse import unquote, urlsplit

from edge.errors import HubError

NEWEST = "main"  # revision of an address that names none
_FORM = "OWNER/NAME:FILE.gguf"
_REPO = re.compile(r"(?!.*(?:--|\.\.))[A-Za-z0-9_][\w.-]{0,95}/[A-Za-z0-9_][\w.-]{0,95}", re.ASCII)
_REVISION = re.compile(r"(?!.*(?:\.\.|//))[A-Za-z0-9_][\w./+-]{0,199}(?<![/.])", re.ASCII)
_DIGEST = re.compile(r"[A-Za-z0-9_][\w.-]{0,199}", re.ASCII)
_MOST_BYTES = 255  # limit of one name in a path
_MOST_FILE = 1000  # limit of characters of a path in a repository
_SITES = ("huggingface.co", "www.huggingface.co", "hf.co", "www.hf.co")
_SCHEMES = ("http://", "https://", "hf://")
_PAGES = ("blob", "resolve", "raw", "tree")  # kinds of repository pages in browser addresses


class Address(NamedTuple):
    """Address of a model on the hub. Each part is checked."""

    repo: str  # OWNER/NAME
    file: str = ""  # file, pattern or part of a file name; empty: the repository's only model
    revision: str = NEWEST


def parse(spec: str) -> Address:
    """Return the address in a text. Raises HubError, which names the wrong part."""
    site, path = _split(spec.strip())
    repo, colon, file = path.partition(":")
    revision = NEWEST
    if site and not (colon and repo.count("/") == 1):
        owner, name, *rest = [*(unquote(part) for part in path.split("/") if part), "", ""]
        if site == "hf:":
            name, _, revision = name.partition("@")
        elif any(rest):
            page, revision, *rest = rest
            if page == "tree" and any(rest):
                rest = [*filter(None, rest), "*"]
            if page not in _PAGES or not revision:
                raise _no_address(spec)
        repo, file = f"{owner}/{name}", "/".join(filter(None, rest))
    file = "" if file == "latest" else file
    return Address(checked_repo(repo, spec), checked_file(file) if file else "", checked_revision(revision or NEWEST))


def is_address(text: str) -> bool:
    """Return whether a text is an address of a model on the hub instead of the path of a file."""
    if _is_of_site(text):  # also for a malformed address, so that the user learns the mistake
        return True
    if text.lower().endswith(".gguf") and ":" not in text:
        return False
    try:
        parse(text)
    except HubError:
        return False
    return True


def checked_repo(repo: str, spec: str | None = None) -> str:
    """Return OWNER/NAME if it is valid and safe as part of a path. Raises HubError about `spec`, or about `repo`."""
    if not _REPO.fullmatch(repo) or any(part.endswith((".", "-", ".git")) for part in repo.split("/")):
        raise _no_address(repo if spec is None else spec)
    return repo


def checked_revision(revision: str) -> str:
    """Return a branch, tag or commit if it is valid. Raises HubError otherwise."""
    if not _REVISION.fullmatch(revision) or any(part.startswith(".") for part in revision.split("/")):
        raise HubError(f"{revision[:100]!r} is not a revision of a repository; expected a branch, a tag or a commit")
    return revision


def checked_file(file: str) -> str:
    """Return a file's path in its repository, or a pattern, if it cannot lead outside. Raises HubError otherwise."""
    parts = file.split("/")
    is_usual = 0 < len(file) <= _MOST_FILE and file.isprintable() and not any(c in file for c in "\\:")
    if not is_usual or any(part in ("", ".", "..") or len(part.encode()) > _MOST_BYTES for part in parts):
        raise HubError(
            f"{file[:100]!r} is not a file of a repository; expected the path of a file in it, such as"
            " model-q4_k_m.gguf"
        )
    return file


def checked_digest(digest: str | None) -> str:
    """Return the digest or commit that a hub names a file by, if it is a valid name. Raises HubError otherwise."""
    if digest is None or not _DIGEST.fullmatch(digest):
        raise HubError(f"the hub names a file by {str(digest)[:100]!r}, which is not a digest; nothing is written")
    return digest


def is_inside(name: str) -> bool:
    """Return whether `checked_file` accepts a name that a hub or a cache lists."""
    try:
        return bool(checked_file(name))
    except HubError:
        return False


def file_name(path: str) -> str:
    """Return the last part of a path in a repository."""
    return PurePosixPath(path).name


def _is_of_site(text: str) -> bool:
    return text.lower().startswith((*_SCHEMES, *(f"{site}/" for site in _sites())))


def _sites() -> tuple[str, ...]:
    """Return the host names of the hub, including the mirror in HF_ENDPOINT."""
    mirror = urlsplit(os.environ.get("HF_ENDPOINT", "")).netloc.lower()
    return (*_SITES, mirror) if mirror else _SITES


def _split(spec: str) -> tuple[str, str]:
    """Return the site at the start of an address ("hf:" for that scheme, "" if there is none) and the rest."""
    if not _is_of_site(spec):
        return "", spec
    scheme, colon, rest = spec.partition("://")
    if scheme.lower() == "hf" and colon:
        return "hf:", rest.strip("/")
    site, _, path = re.split(r"[?#]", rest if colon else spec, maxsplit=1)[0].partition("/")
    if site.lower() not in _sites():
        raise HubError(f"{spec[:200]!r} is not on the Hugging Face hub; expected {_FORM}, or a file on this device")
    return site, path.strip("/").removeprefix("models/")


def _no_address(spec: str) -> HubError:
    return HubError(f"{spec[:200]!r} is neither of the form {_FORM} nor an address of a model on huggingface.co")
