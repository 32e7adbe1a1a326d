"""Models from the Hugging Face hub, through its own library: its cache, its login, its environment variables.

A model there is written OWNER/NAME:FILE. FILE is a file name, a pattern ("*q4_k_m*") or a part of one ("q4_k_m"), and
may be left out where there is only one model. The library starts a broken download from the beginning, so the bytes are
fetched here, into a partial file that the next attempt continues, and then handed to the library's cache.
"""

import errno
import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, BinaryIO

from edge.errors import HubError
from edge.models.wheels import Progress
from quant.gguf.file import GgufFile
from quant.text import bytes_text

_SPEC = re.compile(r"(?P<repo>\w[\w.-]*/\w[\w.-]*?)(:(?P<file>.*))?")
_SPLIT = re.compile(r"(?P<start>.*)-\d{5}-of-(?P<count>\d{5})\.gguf")
_LISTED = 20  # file names an error message shows
_TIMEOUT_S = 10.0  # for an answer of the hub
_HTTP_LIMIT_BYTES = 50_000_000_000  # the hub has larger files only through a protocol of its own


def parse(spec: str) -> tuple[str, str]:
    """The repository and the file of "OWNER/NAME:FILE"; the file may be empty. HubError for anything else."""
    match = _SPEC.fullmatch(spec)
    if not match:
        raise HubError(f"{spec!r} is not of the form OWNER/NAME:FILE.gguf")
    return match["repo"], match["file"] or ""


def is_spec(text: str) -> bool:
    """Return whether `text` can name a model on the hub, and is not the path of a file."""
    return bool(_SPEC.fullmatch(text)) and (not text.endswith(".gguf") or ":" in text)


def cached(repo: str, file: str) -> Path:
    """The model that `pull` would fetch, where the cache has all of it; HubError otherwise."""
    return _cached(repo, _chosen(repo, file, _cached_names(repo, _cache())), _cache())


def pull(
    repo: str, file: str = "", cache_dir: str | os.PathLike[str] | None = None, progress: Progress | None = None
) -> Path:
    """Fetch a model (all parts of a split one) unless the newest version is in the cache; its path (of part 1).

    Without a network the cached version is good enough. `cache_dir` is the library's own cache where not given.
    HubError, one line: no such repository or file, no access, no network and not cached, no room. ModelFileError when
    what came is not a usable GGUF.
    """
    cache = Path(cache_dir) if cache_dir else _cache()
    if file.endswith(".gguf") and not _is_pattern(file):
        names = parts(file)
    else:
        names = _chosen(repo, file, _names(repo, cache))
    paths = _download(repo, names, cache, progress)
    GgufFile.open(paths[0])
    return paths[0]


def _download(repo: str, names: list[str], cache: Path, progress: Progress | None) -> list[Path]:
    """The local paths of the files, fetched where they are not there."""
    from huggingface_hub import get_hf_file_metadata, hf_hub_download, hf_hub_url
    from huggingface_hub.errors import EntryNotFoundError

    try:
        entries = [get_hf_file_metadata(hf_hub_url(repo, name), timeout=_TIMEOUT_S) for name in names]
    except EntryNotFoundError as exc:
        raise HubError(f"{repo} has no file {names[0]}; it has {_listing(_names(repo, cache))}") from exc
    except Exception as exc:  # what a network raises differs between versions of the library
        try:
            return [_cached(repo, [name], cache) for name in names]
        except HubError:
            raise _explained(repo, exc) from exc
    total = sum(metadata.size or 0 for metadata in entries)
    done = 0

    def report(here: int) -> None:
        if progress:
            progress(done + here, total)

    try:
        for name, metadata in zip(names, entries, strict=True):
            _fetch(repo, name, metadata, cache, report)
            done += metadata.size or 0
        with _quiet_bars():
            return [Path(hf_hub_download(repo, name, cache_dir=cache)) for name in names]
    except Exception as exc:
        raise _explained(repo, exc, "the download broke off; the same command continues it") from exc


def _fetch(repo: str, name: str, metadata: Any, cache: Path, report: Callable[[int], None]) -> None:
    """Put the file among the cache's blobs, continuing what an earlier attempt left."""
    from huggingface_hub import hf_hub_url
    from huggingface_hub.file_download import http_get
    from huggingface_hub.utils import WeakFileLock, build_hf_headers

    blob = _folder(repo, cache) / "blobs" / metadata.etag
    if blob.exists() or not metadata.size:
        return
    blob.parent.mkdir(parents=True, exist_ok=True)
    partial = blob.with_name(f"{metadata.etag}.partial")
    lock = cache / ".locks" / _folder(repo, cache).name / f"{metadata.etag}.lock"  # the library's own
    lock.parent.mkdir(parents=True, exist_ok=True)
    with WeakFileLock(lock):
        if blob.exists():  # another process was fetching it
            return
        with partial.open("ab") as out:
            here = out.tell()
            if here > metadata.size:
                here = out.seek(out.truncate(0))  # where it was written to last tells what has come
            free = shutil.disk_usage(blob.parent).free
            if free < metadata.size - here:
                raise HubError(
                    f"no room for {name} in {cache}: {bytes_text(metadata.size - here)} needed,"
                    f" {bytes_text(free)} free; free some, or set HF_HOME to a larger disk"
                ) from OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            if metadata.size > _HTTP_LIMIT_BYTES:
                return  # left to the library
            url = hf_hub_url(repo, name, revision=metadata.commit_hash)
            counted = _Counted(out, report)
            with _quiet_bars():
                while here < metadata.size:
                    try:
                        headers = build_hf_headers()
                        http_get(url, counted, resume_size=here, headers=headers, expected_size=metadata.size)
                    except Exception:
                        if out.tell() <= here:  # try again for as long as something arrives
                            raise
                    here = out.tell()
        partial.replace(blob)


class _Counted:
    """A file that reports how much has been written."""

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


def _names(repo: str, cache: Path) -> list[str]:
    """The files of a repository: the hub's list, or what is cached of it without a network."""
    from huggingface_hub import HfApi

    try:
        siblings = HfApi().model_info(repo, timeout=_TIMEOUT_S).siblings
        return [sibling.rfilename for sibling in siblings or ()]
    except Exception as exc:
        cached = _cached_names(repo, cache)
        if not cached:
            raise _explained(repo, exc) from exc
        return cached


def _chosen(repo: str, part: str, names: list[str]) -> list[str]:
    """The parts of the one model of a repository that `part` means; HubError, with the list, if not just one."""
    models = sorted({parts(name)[0] for name in names if name.endswith(".gguf")})
    if not models:
        raise HubError(f"{repo} has no .gguf files; look for a repository that has GGUF in its name")
    pattern = part.lower() if _is_pattern(part) else f"*{part.lower()}*"
    fitting = [name for name in models if fnmatch(name.lower(), pattern)]
    exact = [name for name in fitting if part.lower() in re.split(r"[.-]", name.lower())]
    for matches in (fitting, exact):
        if len(matches) == 1:
            return parts(matches[0])
    like = f" like {part!r}" if part else ""
    raise HubError(f"{repo} has {len(fitting) or 'no'} files{like}; say which: {_listing(fitting or models)}")


def parts(name: str) -> list[str]:
    """Return all parts of a split model, the first one first; any other file alone."""
    match = _SPLIT.fullmatch(name)
    if not match:
        return [name]
    return [f"{match['start']}-{i:05d}-of-{match['count']}.gguf" for i in range(1, int(match["count"]) + 1)]


def _is_pattern(text: str) -> bool:
    return any(c in text for c in "*?[")


def _listing(names: list[str]) -> str:
    models = sorted(name for name in names if name.endswith(".gguf"))
    more = f" and {len(models) - _LISTED} more" if len(models) > _LISTED else ""
    return (", ".join(models[:_LISTED]) or "no .gguf files") + more


def _cache() -> Path:
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE)


def _folder(repo: str, cache: Path) -> Path:
    """Return the folder of a repository in the library's cache."""
    return cache / f"models--{repo.replace('/', '--')}"


def cached_repositories() -> list[tuple[str, Path]]:
    """(OWNER/NAME, folder) of all models in the library's cache."""
    folders = sorted(_cache().glob("models--*--*"))
    return [("/".join(path.name.split("--", 2)[1:]), path) for path in folders]


def cached_models() -> dict[str, Path]:
    """The models in the cache that are complete, of the versions last seen: the (first) file of each, by
    "OWNER/NAME:FILE"."""
    cache, models = _cache(), dict[str, Path]()
    for repo, _ in cached_repositories():
        names = _cached_names(repo, cache)
        for name in sorted(names):
            if name == parts(name)[0] and set(parts(name)) <= set(names):
                models[f"{repo}:{name}"] = _snapshot(repo, cache) / name
    return models


def _snapshot(repo: str, cache: Path) -> Path:
    """The folder of a repository's version that was last seen. OSError if there is none."""
    folder = _folder(repo, cache)
    return folder / "snapshots" / (folder / "refs" / "main").read_text().strip()


def _cached_names(repo: str, cache: Path) -> list[str]:
    """The files of a repository that are in the cache, of the version last seen."""
    try:
        snapshot = _snapshot(repo, cache)
    except OSError:
        return []
    return [path.relative_to(snapshot).as_posix() for path in snapshot.rglob("*.gguf") if path.exists()]


def _cached(repo: str, names: list[str], cache: Path) -> Path:
    """The first of the files, all of which are in the cache; HubError otherwise."""
    from huggingface_hub import try_to_load_from_cache

    paths = [try_to_load_from_cache(repo, name, cache_dir=cache) for name in names]
    if not all(isinstance(path, str) for path in paths):
        raise HubError(f"{repo}:{names[0]} is not in the cache {cache}")
    return Path(str(paths[0]))


@contextmanager
def _quiet_bars() -> Iterator[None]:
    """No progress bars of the library's own."""
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
    """Translate the library's error into one line: what was needed, what is wrong, what to do."""
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
        hint = "; log in with `hf auth login` or HF_TOKEN" if status in (401, 403) else "; try again later"
        return HubError(f"the hub answered {status} for {repo}{hint}")
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        return HubError(f"the disk is full; free some for {repo}, or set HF_HOME to a larger disk")
    first = (str(error).strip() or type(error).__name__).splitlines()[0]
    return HubError(f"{repo}: {otherwise or 'the hub cannot be reached, and the model is not in the cache'} ({first})")
