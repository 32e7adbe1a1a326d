"""Models from the Hugging Face hub, with the cache, login and environment variables of the hub's own library.

A model is written OWNER/NAME:FILE, or in another form of `edge.models.addresses`. FILE is a file name, a pattern
("*q4_k_m*") or a part of a name ("q4_k_m"). It may be omitted if the repository has only one model. The library
restarts an interrupted download from the beginning. This module therefore fetches the bytes into a partial file, which
the next attempt continues, and then moves the file into the library's cache.
"""

import errno
import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from fnmatch import fnmatch
from functools import cache, partial
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from edge import log
from edge.errors import HubError
from edge.models.addresses import NEWEST, Address, checked_digest, checked_repo, checked_revision, is_inside
from edge.models.file_kinds import is_gguf, kind_by_name, models_among, parts, use_of
from edge.models.wheels import Progress
from quant.gguf.file import GgufFile
from quant.text import bytes_text

T = TypeVar("T")

_UNREACHABLE = "the hub cannot be reached, and the model is not in the cache; check the network, or name a file"
_LISTED = 20  # maximum number of file names in an error
_TIMEOUT_S = 10.0  # timeout for an answer of the hub
_HTTP_LIMIT_BYTES = 50_000_000_000  # larger files are only available through the hub's own protocol


def cached(address: Address) -> Path:
    """Return the path of the model if the cache has all of it. Raises HubError otherwise."""
    cache = _cache()
    names = _chosen(address, _cached_names(address.repo, cache, address.revision))
    return _cached(address, names, cache)


def pull(address: Address, cache_dir: str | os.PathLike[str] | None = None, progress: Progress | None = None) -> Path:
    """Return the path of a model (part 1 if it is split), after fetching it unless the newest version is in the cache.

    A projector or importance matrix is fetched only by its complete name. Without a network, a cached version is used.

    cache_dir: cache folder; None: the library's own cache
    progress: called with bytes done and bytes in total

    Raises HubError with one line: no such repository or file, no access, no network, or no disk space. Raises
    ModelFileError if the file is not a usable GGUF file.
    """
    cache, access = Path(cache_dir) if cache_dir else _cache(), _Access(address.repo)
    if is_gguf(address.file) and not _is_pattern(address.file):
        names = parts(address.file)
    else:
        names = _chosen(address, _names(address, cache, access))
    paths = _download(address, names, cache, access, progress)
    GgufFile.open(paths[0])
    return paths[0]


class _Access:
    """Requests to the hub about one repository, with the saved token at first.

    If the hub refuses the token, requests continue without it, because an expired token makes the hub refuse public
    files, too.
    """

    def __init__(self, repo: str) -> None:
        self._repo = repo
        self.token: bool | None = None  # value for the library's `token` parameters; False: use no token

    def ask(self, request: Callable[[bool | None], T]) -> T:
        """Return the result of `request`, which is called with the token."""
        from huggingface_hub import get_token
        from huggingface_hub.errors import HfHubHTTPError

        try:
            return request(self.token)
        except HfHubHTTPError as refused:
            status = None if refused.response is None else refused.response.status_code
            if self.token is False or status not in (401, 403) or not get_token():
                raise
            try:
                answer = request(False)
            except Exception:
                raise refused from None
        self.token = False
        _say_token_is_refused(self._repo)
        return answer


@cache
def _say_token_is_refused(repo: str) -> None:
    log.warning(
        f"the hub refuses the saved token for {repo}, which is public: it is fetched without the token; renew it with"
        " `hf auth login`, or remove it with `hf auth logout` or from HF_TOKEN"
    )


def _download(
    address: Address, names: list[str], cache: Path, access: _Access, progress: Progress | None
) -> list[Path]:
    """Return the local paths of the files. Missing files are fetched."""
    from huggingface_hub import hf_hub_download, hf_hub_url
    from huggingface_hub.errors import EntryNotFoundError

    repo, revision = address.repo, address.revision
    entries = []
    try:
        for name in names:
            url = hf_hub_url(repo, name, revision=revision)
            entries.append(access.ask(partial(_metadata, url)))
    except EntryNotFoundError as exc:
        missing, there = names[len(entries)], _names(address, cache, access)
        if set(names) & set(there):
            raise HubError(f"{repo} lacks {missing}, a part of a split model of {len(names)} files") from exc
        raise HubError(f"{repo} has no file {missing}; it has {_listing(there)}") from exc
    except Exception as exc:  # network errors differ between versions of the library
        try:
            return [_cached(address, [name], cache) for name in names]
        except HubError:
            raise _explained(repo, exc) from exc
    total = sum(metadata.size or 0 for metadata in entries)
    done = 0

    def report(here: int) -> None:
        if progress:
            progress(done + here, total)

    try:
        for name, metadata in zip(names, entries, strict=True):
            _fetch(repo, name, metadata, cache, report, access.token)
            done += metadata.size or 0
        with _quiet_bars():
            return [
                Path(hf_hub_download(repo, name, cache_dir=cache, revision=revision, token=access.token))
                for name in names
            ]
    except Exception as exc:
        raise _explained(repo, exc, "the download broke off; the same command continues it") from exc


def _metadata(url: str, token: bool | None) -> Any:
    from huggingface_hub import get_hf_file_metadata

    return get_hf_file_metadata(url, token=token, timeout=_TIMEOUT_S)


def _fetch(
    repo: str, name: str, metadata: Any, cache: Path, report: Callable[[int], None], token: bool | None = None
) -> None:
    """Put the file among the cache's blobs. A partial file of an earlier attempt is continued."""
    from huggingface_hub import hf_hub_url
    from huggingface_hub.file_download import http_get
    from huggingface_hub.utils import WeakFileLock, build_hf_headers

    etag = checked_digest(metadata.etag)
    blob = _folder(repo, cache) / "blobs" / etag
    if blob.exists() or not metadata.size:
        return
    blob.parent.mkdir(parents=True, exist_ok=True)
    partial = blob.with_name(f"{etag}.partial")
    lock = cache / ".locks" / _folder(repo, cache).name / f"{etag}.lock"  # the library uses the same lock
    lock.parent.mkdir(parents=True, exist_ok=True)
    with WeakFileLock(lock):
        if blob.exists():  # another process has fetched it meanwhile
            return
        with partial.open("ab") as out:
            here = out.tell()
            if here > metadata.size:
                here = out.seek(out.truncate(0))  # the file position then counts the received bytes
            free = shutil.disk_usage(blob.parent).free
            if free < metadata.size - here:
                raise HubError(
                    f"no room for {name} in {cache}: {bytes_text(metadata.size - here)} needed,"
                    f" {bytes_text(free)} free; free some, or set HF_HOME to a larger disk"
                ) from OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            if metadata.size > _HTTP_LIMIT_BYTES:
                return  # the library fetches it
            url = hf_hub_url(repo, name, revision=checked_digest(metadata.commit_hash))
            counted = _Counted(out, report)
            with _quiet_bars():
                while here < metadata.size:
                    try:
                        headers = build_hf_headers(token=token)
                        http_get(url, counted, resume_size=here, headers=headers, expected_size=metadata.size)
                    except Exception:
                        if out.tell() <= here:  # retry as long as some bytes arrive
                            raise
                    here = out.tell()
        partial.replace(blob)


class _Counted:
    """A file that reports the number of bytes written."""

    def __init__(self, file: BinaryIO, report: Callable[[int], None]) -> None:
        self._file = file
        self._report = report

    def write(self, data: bytes) -> int:
        """Write, and report the bytes in the file."""
        n = self._file.write(data)
        self._report(self._file.tell())
        return n

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


def _names(address: Address, cache: Path, access: _Access) -> list[str]:
    """Return the files of a repository from the hub, or its cached files if the hub is unreachable."""
    from huggingface_hub import HfApi

    repo, revision = address.repo, address.revision
    try:
        info = access.ask(lambda token: HfApi().model_info(repo, revision=revision, timeout=_TIMEOUT_S, token=token))
        return [sibling.rfilename for sibling in info.siblings or () if is_inside(sibling.rfilename)]
    except Exception as exc:
        cached = _cached_names(repo, cache, revision)
        if not cached:
            raise _explained(repo, exc) from exc
        return cached


def _chosen(address: Address, names: list[str]) -> list[str]:
    """Return the parts of the model that an address means. Raises HubError, with a list, if several or none match."""
    repo, part, models = address.repo, address.file, models_among(names)
    if part in names and (kind := kind_by_name(part)):
        raise HubError(f"{repo}: {use_of(kind, part)}")
    if not models:
        raise HubError(f"{repo} has no .gguf files of models; look for a repository that has GGUF in its name")
    if part in names and is_gguf(part):
        return parts(part)
    pattern = part.lower() if _is_pattern(part) else f"*{part.lower()}*"
    fitting = [name for name in models if fnmatch(name.lower(), pattern)]
    exact = [name for name in fitting if part.lower() in re.split(r"[./-]", name.lower())]
    for matches in (fitting, exact):
        if len(matches) == 1:
            return parts(matches[0])
    like = f" like {part!r}" if part else ""
    raise HubError(f"{repo} has {len(fitting) or 'no'} files{like}; name one of them: {_listing(fitting or names)}")


def _is_pattern(text: str) -> bool:
    return any(c in text for c in "*?[")


def _listing(names: list[str]) -> str:
    models = models_among(names)
    others = {kind: use_of(kind, name) for name in sorted(names) if is_gguf(name) and (kind := kind_by_name(name))}
    more = f" and {len(models) - _LISTED} more" if len(models) > _LISTED else ""
    return "; ".join([(", ".join(models[:_LISTED]) or "no .gguf files of models") + more, *others.values()])


def _cache() -> Path:
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE)


def _folder(repo: str, cache: Path) -> Path:
    """Return the folder of a repository in the library's cache."""
    return cache / f"models--{repo.replace('/', '--')}"


def cached_repositories() -> list[tuple[str, Path]]:
    """Return (OWNER/NAME, folder) of all model repositories in the library's cache."""
    repositories = []
    for path in sorted(_cache().glob("models--*--*")):
        with suppress(HubError):
            repositories.append((checked_repo("/".join(path.name.split("--", 2)[1:])), path))
    return repositories


def cached_models() -> dict[str, Path]:
    """Return the complete models in the cache, in their newest cached versions.

    The keys are "OWNER/NAME:FILE" and the values are paths of the (first) files.
    """
    cache, models = _cache(), dict[str, Path]()
    for repo, _ in cached_repositories():
        names = _cached_names(repo, cache)
        for name in models_among(names):
            if set(parts(name)) <= set(names):
                models[f"{repo}:{name}"] = _snapshot(repo, cache) / name
    return models


def _snapshot(repo: str, cache: Path, revision: str = NEWEST) -> Path:
    """Return the folder of a repository's newest cached version.

    Raises OSError if there is none, and HubError if the cache is damaged.
    """
    folder = _folder(repo, cache)
    try:
        commit = (folder / "refs" / checked_revision(revision)).read_text(encoding="ascii").strip()
    except FileNotFoundError:
        commit = revision  # a commit is not listed by name
    except UnicodeDecodeError:
        commit = ""
    return folder / "snapshots" / checked_digest(commit)


def _cached_names(repo: str, cache: Path, revision: str = NEWEST) -> list[str]:
    """Return the cached files of a repository's newest cached version."""
    try:
        snapshot = _snapshot(repo, cache, revision)
    except (OSError, HubError):
        return []
    return [
        path.relative_to(snapshot).as_posix() for path in snapshot.rglob("*") if is_gguf(path.name) and path.exists()
    ]


def _cached(address: Address, names: list[str], cache: Path) -> Path:
    """Return the path of the first file if the cache has all files. Raises HubError otherwise."""
    try:
        snapshot = _snapshot(address.repo, cache, address.revision)
    except OSError:
        snapshot = cache / "none"
    for name in names:
        if not (snapshot / name).exists():
            raise HubError(f"{address.repo}:{name} is not in the cache {cache}")
    return snapshot / names[0]


@contextmanager
def _quiet_bars() -> Iterator[None]:
    """Hide the library's own progress bars inside the block."""
    from huggingface_hub.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    if are_progress_bars_disabled():
        yield
        return
    disable_progress_bars()
    try:
        yield
    finally:
        enable_progress_bars()


def _explained(repo: str, error: Exception, otherwise: str = "") -> HubError:
    """Translate the library's error into one line with the need, the problem and the remedy."""
    from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, HFValidationError, RepositoryNotFoundError

    if isinstance(error, HubError):
        return error
    if isinstance(error, GatedRepoError):
        return HubError(
            f"{repo} is gated: accept its terms at https://huggingface.co/{repo}, then log in"
            " with `hf auth login` or HF_TOKEN"
        )
    if isinstance(error, RepositoryNotFoundError):
        return HubError(f"no repository {repo} on the hub; if it is private, log in with `hf auth login` or HF_TOKEN")
    if isinstance(error, HFValidationError):
        return HubError(f"{repo} is not a repository name; it should be OWNER/NAME")
    if isinstance(error, HfHubHTTPError) and error.response is not None:
        status = error.response.status_code
        refused = "; log in with `hf auth login` or HF_TOKEN: a saved token may have expired"
        hint = refused if status in (401, 403) else "; try again later"
        return HubError(f"the hub answered {status} for {repo}{hint}")
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        return HubError(f"the disk is full; free some for {repo}, or set HF_HOME to a larger disk")
    first = (str(error).strip() or type(error).__name__).splitlines()[0]
    return HubError(f"{repo}: {otherwise or _UNREACHABLE} ({first})")
