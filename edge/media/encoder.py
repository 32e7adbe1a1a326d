"""Encoder of a model's pictures and sounds: a child process, and a cache of recent results."""

from __future__ import annotations

import hashlib
import json
import signal
import socket
import subprocess
import threading
from collections import OrderedDict
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from devices.processes.interpreter import module_command
from edge.closing import Closing
from edge.errors import MediaError
from edge.media.decoding import MOST_BYTES
from edge.media.media import EmbeddingRows, interned
from edge.media.projector import identity, open_projector
from quant.text import bytes_text

WAIT_S = 600.0  # timeout of an answer, because a large picture takes minutes on a slow device
MOST_HELD = 256 << 20  # limit of cached embeddings in bytes

RawMedia = tuple[dict[str, Any], bytes]  # an answer of `edge.media.child`, and the bytes after it


class EncoderEnded(MediaError):
    """The encoding process ended during a file. Either the system or the file caused it."""


class EncodingDevice(Protocol):
    """Interface of another device that encodes."""

    def encode(self, data: bytes) -> RawMedia | None:
        """Return the encoded file. Return None while the device is lost, or if its process ended during this file.

        Raises MediaError if the file cannot be used.
        """


@dataclass(frozen=True)
class Media:
    """An encoded picture or sound, as part of a prompt."""

    tokens: tuple[int, ...]  # IDs of rows, and of the model's tokens around them
    rows: tuple[EmbeddingRows, ...]


class MediaEncoder(Closing):
    """Encodes picture and sound files for one model. Several threads may use it; files are encoded one at a time."""

    def __init__(
        self,
        model: Path,
        projector: Path,
        *,
        threads: int = 1,
        use_gpu: bool = True,
        device: EncodingDevice | None = None,
    ) -> None:
        """Start the encoding process, unless another device encodes.

        model: file of the text model, for its sizes and vocabulary
        device: device that encodes instead of this one; if it is lost, this device starts a process and encodes

        Raises MediaError or ModelFileError if the projector is damaged or belongs to another model.
        """
        file = open_projector(projector)
        self.path, self._identity = projector, identity(file)
        self._settings = {"model": str(model), "projector": str(projector), "threads": threads, "use_gpu": use_gpu}
        self._device = device
        self._encoding, self._lock = threading.Lock(), threading.Lock()  # one file at a time; guards the cache
        self._cached: OrderedDict[bytes, Media] = OrderedDict()  # by the file's hash and namespace
        self._process: subprocess.Popen[bytes] | None = None
        if device is None:
            self._start()

    def encode(self, data: bytes, namespace: str = "") -> Media:
        """Return the encoded file, possibly from the cache.

        namespace: users who may notice by timing that one of them sent the same file before

        Raises MediaError if the file cannot be used.
        """
        if len(data) > MOST_BYTES:
            raise MediaError(
                f"a picture or sound has up to {bytes_text(MOST_BYTES)}, this one has {bytes_text(len(data))}"
            )
        name = hashlib.sha256(data).digest() + namespace.encode()
        if (media := self._used(name)) is None:
            with self._encoding:
                if (media := self._used(name)) is None:  # another thread may have encoded the same file meanwhile
                    media = self._encoded(data)
                    self._hold(name, media)
        return media

    def encode_raw(self, data: bytes) -> RawMedia:
        """Return the encoded file in the form of the child process. Only one thread may call this. Raises
        MediaError."""
        if self._device is not None and (raw := self._device.encode(data)) is not None:
            self.close()  # the device has returned, so the process here is not needed
            return raw
        if self._process is not None and self._process.poll() is not None:  # the process ended between files
            self.close()
        if self._process is None:
            self._start()
        return self._ask({"bytes": len(data)}, data)

    def close(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()
            with suppress(OSError):  # data that was never sent
                self._stream.close()
            self._socket.close()

    @property
    def pid(self) -> int | None:
        """ID of the process; None if it has ended or another device encodes."""
        return None if self._process is None else self._process.pid

    def _start(self) -> None:
        self._socket, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                module_command("edge.media.child", "--control", str(theirs.fileno())),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # Ctrl-C must reach only the parent
            )
        self._socket.settimeout(WAIT_S)
        self._stream = self._socket.makefile("rwb")
        try:
            self._ask({**self._settings})
        except MediaError as error:
            self.close()
            raise MediaError(f"{self.path.name}: {error}") from None

    def _used(self, name: bytes) -> Media | None:
        """Return a cached result, which becomes the last to be dropped; None if it is not cached."""
        with self._lock:
            if name in self._cached:
                self._cached.move_to_end(name)
            return self._cached.get(name)

    def _hold(self, name: bytes, media: Media) -> None:
        with self._lock:
            self._cached[name] = media
            while len(self._cached) > 1 and sum(map(_size, self._cached.values())) > MOST_HELD:
                self._cached.popitem(last=False)

    def _encoded(self, data: bytes) -> Media:
        answer, rest = self.encode_raw(data)
        tokens: list[int] = []
        rows: list[EmbeddingRows] = []
        offset = 0
        for number, chunk in enumerate(answer["chunks"]):
            tokens += chunk.get("tokens", ())
            if "shape" in chunk:
                n, width = chunk["shape"]
                embeddings = np.frombuffer(rest, np.float32, n * width, offset).reshape(n, width)
                offset += embeddings.nbytes
                offsets = None
                if chunk["sections"]:
                    offsets = np.frombuffer(rest, np.int32, 3 * n, offset).reshape(3, n)
                    offset += offsets.nbytes
                digest = self._identity + bytes.fromhex(answer["digest"]) + str(number).encode()
                own = EmbeddingRows(digest, embeddings, offsets, chunk["positions"], causal=chunk["causal"])
                rows.append(interned(own))
                tokens += rows[-1].ids
        return Media(tuple(tokens), tuple(rows))

    def _ask(self, message: dict[str, Any], data: bytes = b"") -> RawMedia:
        """Send a message. Return the answer and the bytes after it.

        Raises MediaError, or EncoderEnded if the process ended. If it did not answer, it is ended.
        """
        try:
            self._stream.write(json.dumps(message).encode() + b"\n" + data)
            self._stream.flush()
            line = self._stream.readline()
            answer = json.loads(line) if line else None
            rest = self._stream.read(answer["bytes"]) if answer else b""
        except TimeoutError:
            self.close()
            raise MediaError(f"the process that encodes gave no answer in {WAIT_S:g} s") from None
        except (OSError, ValueError):  # the process ended, possibly within a line
            answer = None
        except BaseException:
            self.close()  # otherwise the next file would get this answer
            raise
        if answer is None or len(rest) != answer["bytes"]:
            raise EncoderEnded(f"it cannot be encoded: the process for that {self._ending()}")
        if "error" in answer:
            raise MediaError(answer["error"])
        return answer, rest

    def _ending(self) -> str:
        process = self._process
        self.close()
        if process is None:  # another thread ended it
            return "was ended here"
        code = process.returncode
        if code == -signal.SIGPROF:
            return "took more processor time than decoding may take"
        return f"was ended by signal {-code}" if code < 0 else f"ended with exit code {code}"


def _size(media: Media) -> int:
    return sum(rows.embeddings.nbytes for rows in media.rows)
