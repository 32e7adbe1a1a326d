"""Store of batches and their files, encrypted on disk. Each belongs to the key of the API that it came with."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from edge.prefixes.keys import owner_key
from edge.serve.apis.openai_fields import new_id
from edge.serve.batches.lines import failed_line
from edge.serve.batches.sealed import SealedFolder
from edge.serve.http.errors import BadRequest, NotThere

MAX_FILES = 1000  # files and batches
MAX_BYTES = 1 << 30  # of all files
MAX_RESULT_BYTES = 64 << 20  # of one batch
LASTS_S = 30 * 86400  # that a file or an ended batch stays
WINDOW_S = 86400  # in which a batch is to be answered
_FILE, _BATCH = "file-", "batch_"


@dataclass(frozen=True)
class StoredFile:
    """A file: what was uploaded, or what a batch made."""

    id: str
    owner: str  # digest of the key of the API; empty: of no key
    filename: str
    purpose: str
    bytes: int
    created_at: int  # seconds since 1970
    expires_at: int

    def to_json(self) -> dict[str, Any]:
        """Return the file as OpenAI's API has it."""
        return {**_public(self), "object": "file", "status": "processed", "status_details": None}


@dataclass
class Batch:
    """A batch, and how far it is."""

    id: str
    owner: str
    namespace: str  # of the prefix cache
    endpoint: str
    input_file_id: str
    metadata: dict[str, str] | None
    created_at: int
    expires_at: int
    lasts_s: int  # that its output files stay
    total: int
    status: str = "validating"
    times: dict[str, int] = field(default_factory=dict)  # "in_progress_at" and the like
    failed: int = 0
    output_file_id: str | None = None
    error_file_id: str | None = None
    done: dict[int, bool] = field(default_factory=dict)  # lines with a result, and whether they were answered
    n_records: int = 1  # of its file
    result_bytes: int = 0

    @property
    def is_cancelled(self) -> bool:
        """True if it was cancelled, whether it has ended or not."""
        return "cancelling_at" in self.times

    @property
    def is_expired(self) -> bool:
        """True if its time was over before all was answered, whether it has ended or not."""
        return "expired_at" in self.times

    @property
    def ended(self) -> bool:
        """True if nothing more will be answered."""
        return self.status in ("completed", "expired", "cancelled", "failed")

    def to_json(self) -> dict[str, Any]:
        """Return the batch as OpenAI's API has it."""
        values = _public(self)
        for own in ("namespace", "lasts_s", "done", "n_records", "result_bytes", "times", "total", "failed"):
            del values[own]
        counts = {"total": self.total, "completed": len(self.done) - self.failed, "failed": self.failed}
        moments = ("in_progress", "finalizing", "completed", "failed", "expired", "cancelling", "cancelled")
        times = {f"{name}_at": self.times.get(f"{name}_at") for name in moments}
        return {
            **values,
            "object": "batch",
            "completion_window": "24h",
            "errors": None,
            "request_counts": counts,
            **times,
        }


def _public(stored: StoredFile | Batch) -> dict[str, Any]:
    return {key: value for key, value in vars(stored).items() if key != "owner"}


class BatchStore:
    """Files and batches of a folder. For one thread at a time."""

    def __init__(self, folder: Path, clock: Callable[[], float] = time.time, *, has_keys: bool = False) -> None:
        """clock: seconds since 1970. has_keys: several keys share the room, and each leaves as much as it
        takes."""
        self.clock, self._has_keys = clock, has_keys
        self._sealed = SealedFolder(folder, owner_key)
        self._files: dict[str, StoredFile] = {}
        self._batches: dict[str, Batch] = {}

    def load(self) -> None:
        """Read what a server before this one left. OSError, PrefixError."""
        for name in self._sealed.names():
            records = self._sealed.records(name)
            first = next(records, None)
            if first is None:
                continue  # broken, or of another key or version, which may come back
            if name.startswith(_FILE):
                self._files[name] = StoredFile(**json.loads(first))
            elif name.startswith(_BATCH):
                self._batches[name] = self._restored(name, [first, *records])
        self._files = dict(sorted(self._files.items(), key=lambda item: item[1].created_at))
        self._batches = dict(sorted(self._batches.items(), key=lambda item: item[1].created_at))
        self.sweep()

    def _restored(self, name: str, records: list[bytes]) -> Batch:
        """Return a batch from its records. Its file then ends with a whole one."""
        values = json.loads(records[0])
        batch = Batch(**{**values, "done": {}, "n_records": len(records)})
        for record in map(json.loads, records[1:]):
            if "line" in record:
                _note(batch, record)
            else:
                batch.status, batch.times = record["status"], record["times"]
        if not batch.ended:
            self._sealed.write(name, records)
        return batch

    def sweep(self) -> None:
        """Remove files and ended batches whose time is over."""
        now = self.clock()
        needed = {batch.input_file_id for batch in self._batches.values() if not batch.ended}
        for file in [file for file in self._files.values() if file.expires_at <= now and file.id not in needed]:
            self._remove(self._files, file.id)
        for batch in [batch for batch in self._batches.values() if batch.ended and _end(batch) + LASTS_S <= now]:
            self._remove(self._batches, batch.id)

    # --- files ---

    def add_file(self, owner: str, filename: str, purpose: str, content: bytes, lasts_s: int = LASTS_S) -> StoredFile:
        """Keep a file. BadRequest if there is no room; OSError, PrefixError."""
        self._check_room(owner, len(content))
        return self._add_file(new_id(_FILE), owner, filename, purpose, content, lasts_s)

    def _add_file(
        self, file_id: str, owner: str, filename: str, purpose: str, content: bytes, lasts_s: int
    ) -> StoredFile:
        now = int(self.clock())
        file = StoredFile(file_id, owner, filename, purpose, len(content), now, now + lasts_s)
        self._sealed.write(file.id, [json.dumps(asdict(file)).encode(), content])
        self._files[file.id] = file
        return file

    def files(self, owner: str) -> list[StoredFile]:
        """Return the files of a key, the newest first."""
        return [file for file in reversed(self._files.values()) if file.owner == owner]

    def file(self, owner: str, file_id: str) -> StoredFile:
        """Return a file. NotThere if there is none, or it is that of another key."""
        file = self._files.get(file_id)
        if file is None or file.owner != owner:
            raise NotThere(f"there is no file {file_id[:80]!r}")
        return file

    def content(self, file: StoredFile) -> bytes:
        """Return the content of a file. NotThere if it was damaged, OSError."""
        records: list[bytes] = []
        with suppress(FileNotFoundError):
            records += self._sealed.records(file.id)
        if len(records) != 2:
            raise NotThere(f"the file {file.id} was damaged on disk; upload it again")
        return records[1]

    def delete_file(self, owner: str, file_id: str) -> None:
        """Delete a file. NotThere; BadRequest if a batch needs it."""
        file = self.file(owner, file_id)
        for batch in self._batches.values():
            if batch.input_file_id == file.id and not batch.ended:
                raise BadRequest(f"{batch.id} needs this file; cancel it first", "file_id")
        self._remove(self._files, file.id)

    # --- batches ---

    def add_batch(
        self, file: StoredFile, namespace: str, endpoint: str, total: int, metadata: dict[str, str] | None, lasts_s: int
    ) -> Batch:
        """Keep a new batch of so many requests in a file. BadRequest if there is no room; OSError."""
        self._check_room(file.owner, 0)
        now = int(self.clock())
        batch = Batch(
            new_id(_BATCH), file.owner, namespace, endpoint, file.id, metadata, now, now + WINDOW_S, lasts_s, total
        )
        self._sealed.write(batch.id, [_state(batch)])
        self._batches[batch.id] = batch
        return batch

    def batches(self, owner: str | None = None) -> list[Batch]:
        """Return the batches of a key, or of all keys; the newest first."""
        return [batch for batch in reversed(self._batches.values()) if owner in (None, batch.owner)]

    def batch(self, owner: str, batch_id: str) -> Batch:
        """Return a batch. NotThere if there is none, or it is that of another key."""
        batch = self._batches.get(batch_id)
        if batch is None or batch.owner != owner:
            raise NotThere(f"there is no batch {batch_id[:80]!r}")
        return batch

    def move(self, batch: Batch, status: str) -> None:
        """Note the status of a batch, and when it came. OSError."""
        batch.status = status
        batch.times[f"{status}_at"] = int(self.clock())
        self._append(batch, {"status": status, "times": batch.times})

    def expire(self, batch: Batch) -> None:
        """Note that the time of a batch is over, before its lines say so: it has expired also where this process ends
        between them. OSError."""
        times = {**batch.times, "expired_at": int(self.clock())}
        self._append(batch, {"status": batch.status, "times": times})
        batch.times = times

    def cancel(self, batch: Batch) -> None:
        """Note that a batch is to end. BadRequest if it has ended or expired, OSError."""
        status = "expired" if batch.is_expired else batch.status
        if status not in ("validating", "in_progress", "cancelling"):
            raise BadRequest(f"{batch.id} is {status}, and cannot be cancelled any more", "batch_id")
        if batch.status != "cancelling":
            self.move(batch, "cancelling")

    def note(self, batch: Batch, line: int, text: str, *, answered: bool) -> None:
        """Keep the result of a line. OSError."""
        if batch.result_bytes + len(text) > MAX_RESULT_BYTES:
            why = f"the results of a batch have {MAX_RESULT_BYTES} bytes at most; divide it"
            answered, text = False, failed_line(json.loads(text)["custom_id"], "no_room", why)
        record = {"line": line, "answered": answered, "text": text}
        self._append(batch, record)
        _note(batch, record)

    def end(self, batch: Batch, status: str) -> None:
        """End a batch: its results become its files. OSError."""
        self.move(batch, "finalizing")
        results = [json.loads(record) for record in self._sealed.records(batch.id)]
        lines = sorted((result for result in results if "line" in result), key=lambda result: int(result["line"]))
        for answered, name in ((True, "output"), (False, "error")):
            texts = [line["text"] for line in lines if line["answered"] is answered]
            if texts:
                content = "".join(f"{text}\n" for text in texts).encode()
                # Its own id: where a process ended here before, or the disk was full, it takes the place of that file.
                file_id, filename = f"{_FILE}{batch.id.removeprefix(_BATCH)}-{name}", f"{batch.id}_{name}.jsonl"
                self._add_file(file_id, batch.owner, filename, "batch_output", content, batch.lasts_s)
                setattr(batch, f"{name}_file_id", file_id)
        times = {**batch.times, f"{status}_at": int(self.clock())}
        ended = _state(replace(batch, status=status, times=times))
        self._sealed.write(batch.id, [ended, *(_record({**line, "text": ""}) for line in lines)])
        batch.status, batch.times = status, times  # not before: who sees that it has ended never ends it again

    # --- the folder ---

    def _append(self, batch: Batch, record: dict[str, Any]) -> None:
        self._sealed.append(batch.id, batch.n_records, _record(record))
        batch.n_records += 1

    def _remove(self, stored: dict[str, Any], name: str) -> None:
        self._sealed.remove(name)
        del stored[name]

    def _check_room(self, owner: str, n_bytes: int) -> None:
        sizes = self._sealed.sizes()
        own = [*(file.id for file in self.files(owner)), *(batch.id for batch in self.batches(owner))]
        own_bytes = sum(sizes.get(name, 0) for name in own)
        n_left = MAX_FILES - len(self._files) - len(self._batches)
        n_bytes_left = MAX_BYTES - sum(sizes.values())
        if self._has_keys:
            n_left, n_bytes_left = (n_left - len(own)) // 2, (n_bytes_left - own_bytes) // 2
        if n_left < 1:
            raise BadRequest(f"{len(own)} files and batches are yours, and no more may be; delete some", "file")
        if n_bytes > n_bytes_left:
            words = f"your files have {own_bytes} bytes, and {n_bytes} more have no room; delete some"
            raise BadRequest(words, "file")


def _note(batch: Batch, record: dict[str, Any]) -> None:
    batch.done[record["line"]] = record["answered"]
    batch.failed += not record["answered"]
    batch.result_bytes += len(record["text"])


def _state(batch: Batch) -> bytes:
    return _record({**asdict(batch), "done": {}, "failed": 0, "result_bytes": 0})


def _record(value: dict[str, Any]) -> bytes:
    return json.dumps(value).encode()


def _end(batch: Batch) -> int:
    return batch.times.get(f"{batch.status}_at", batch.created_at)
