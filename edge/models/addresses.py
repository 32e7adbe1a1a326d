"""Addresses of models on the Hugging Face hub: read, and checked before any part of one becomes a path.

An address is OWNER/NAME:FILE, hf.co/OWNER/NAME:FILE, or an address that a browser shows. Libraries differ in what they
refuse, so nothing here relies on theirs.
"""

from __future__ import annotations

import os
import re
from pathlib import PurePosixPath
from typing import NamedTuple
from urllib.parse import unquote, urlsplit

from edge.errors import HubError

NEWEST = "main"  # the revision that an address without one means
_FORM = "OWNER/NAME:FILE.gguf"
_REPO = re.compile(r"(?!.*(?:--|\.\.))[A-Za-z0-9_][\w.-]{0,95}/[A-Za-z0-9_][\w.-]{0,95}", re.ASCII)
_REVISION = re.compile(r"(?!.*(?:\.\.|//))[A-Za-z0-9_][\w./+-]{0,199}(?<![/.])", re.ASCII)
_DIGEST = re.compile(r"[A-Za-z0-9_][\w.-]{0,199}", re.ASCII)
_MOST_BYTES = 255  # of one name in a path
_MOST_FILE = 1000  # characters of a path in a repository
_SITES = ("huggingface.co", "www.huggingface.co", "hf.co", "www.hf.co")
_SCHEMES = ("http://", "https://", "hf://")
_PAGES = ("blob", "resolve", "raw", "tree")  # of a repository, in addresses of a browser


class Address(NamedTuple):
    """A model on the hub. Each part is checked."""

    repo: str  # OWNER/NAME
    file: str = ""  # a file, a pattern or a part of a file's name; empty: the only model
    revision: str = NEWEST


def parse(spec: str) -> Address:
    """Return the address that a text names. HubError, with the part that is wrong."""
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
    """Return whether a text can name a model on the hub, and is not the path of a file."""
    if _is_of_site(text):  # also a wrong one, so that people read what is wrong with it
        return True
    if text.lower().endswith(".gguf") and ":" not in text:
        return False
    try:
        parse(text)
    except HubError:
        return False
    return True


def checked_repo(repo: str, spec: str | None = None) -> str:
    """Return OWNER/NAME if it can be one, as part of a path. HubError otherwise, about `spec` if that is given."""
    if not _REPO.fullmatch(repo) or any(part.endswith((".", "-", ".git")) for part in repo.split("/")):
        raise _no_address(repo if spec is None else spec)
    return repo


def checked_revision(revision: str) -> str:
    """Return a branch, tag or commit if it can be one. HubError otherwise."""
    if not _REVISION.fullmatch(revision) or any(part.startswith(".") for part in revision.split("/")):
        raise HubError(f"{revision[:100]!r} is no revision of a repository; needed is a branch, a tag or a commit")
    return revision


def checked_file(file: str) -> str:
    """Return the path of a file in its repository, or a pattern, if it cannot lead out of it. HubError otherwise."""
    parts = file.split("/")
    is_usual = 0 < len(file) <= _MOST_FILE and file.isprintable() and not any(c in file for c in "\\:")
    if not is_usual or any(part in ("", ".", "..") or len(part.encode()) > _MOST_BYTES for part in parts):
        raise HubError(
            f"{file[:100]!r} is no file of a repository; needed is the path of a file in it, such as model-q4_k_m.gguf"
        )
    return file


def checked_digest(digest: str | None) -> str:
    """Return a digest or commit that a hub names its files by, if it is one name. HubError otherwise."""
    if digest is None or not _DIGEST.fullmatch(digest):
        raise HubError(f"the hub names a file by {str(digest)[:100]!r}, which is no digest; nothing is written")
    return digest


def is_inside(name: str) -> bool:
    """Return whether a name that a hub or a cache lists is one that `checked_file` accepts."""
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
    """Return the names of the hub: its own, and that of the mirror which HF_ENDPOINT names."""
    mirror = urlsplit(os.environ.get("HF_ENDPOINT", "")).netloc.lower()
    return (*_SITES, mirror) if mirror else _SITES


def _split(spec: str) -> tuple[str, str]:
    """Return the site that an address begins with, "hf:" for that scheme, and what follows. Without a site: all."""
    if not _is_of_site(spec):
        return "", spec
    scheme, colon, rest = spec.partition("://")
    if scheme.lower() == "hf" and colon:
        return "hf:", rest.strip("/")
    site, _, path = re.split(r"[?#]", rest if colon else spec, maxsplit=1)[0].partition("/")
    if site.lower() not in _sites():
        raise HubError(f"{spec[:200]!r} is not on the Hugging Face hub; needed is {_FORM}, or a file that is here")
    return site, path.strip("/").removeprefix("models/")


def _no_address(spec: str) -> HubError:
    return HubError(f"{spec[:200]!r} is not of the form {_FORM}, and no address of a model on huggingface.co")
