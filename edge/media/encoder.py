"""The encoder of a model's pictures and sounds: a process of its own, and what came of the last ones."""

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

WAIT_S = 600.0  # for an answer: a large picture takes a slow device minutes
MOST_HELD = 256 << 20  # bytes of embeddings that are kept for later turns

RawMedia = tuple[dict[str, Any], bytes]  # an answer of `edge.media.child`, and the bytes that follow it


class EncoderEnded(MediaError):
    """The process that encodes ended during a file: the system ended it, or the file did."""


class EncodingDevice(Protocol):
    """Another device that encodes."""

    def encode(self, data: bytes) -> RawMedia | None:
        """Return what a file becomes; None while the device is lost, or where its process ended during this file.
        MediaError where the file cannot be used."""


@dataclass(frozen=True)
class Media:
    """A picture or sound as a part of a prompt."""

    tokens: tuple[int, ...]  # ids of rows, and of tokens that the model has around them
    rows: tuple[EmbeddingRows, ...]


class MediaEncoder(Closing):
    """Encodes files of pictures and sounds for one model. Any thread may use it, one at a time is encoded."""

    def __init__(
        self,
        model: Path,
        projector: Path,
        *,
        threads: int = 1,
        use_gpu: bool = True,
        device: EncodingDevice | None = None,
    ) -> None:
        """model: the text model's file, of which sizes and vocabulary are read. device: encodes in place of this one,
        which does it where that is lost, and loads nothing before. MediaError or ModelFileError where the projector is
        damaged, or of another model."""
        file = open_projector(projector)
        self.path, self._identity = projector, identity(file)
        self._settings = {"model": str(model), "projector": str(projector), "threads": threads, "use_gpu": use_gpu}
        self._device = device
        self._encoding, self._lock = threading.Lock(), threading.Lock()  # one file at a time; around what is next
        self._cached: OrderedDict[bytes, Media] = OrderedDict()  # by the hash of the file, and the namespace
        self._process: subprocess.Popen[bytes] | None = None
        if device is None:
            self._start()

    def encode(self, data: bytes, namespace: str = "") -> Media:
        """Return what a file becomes. namespace: of those who may notice by speed that another had the same file.
        MediaError where it cannot be used."""
        if len(data) > MOST_BYTES:
            raise MediaError(f"a picture or sound has up to {bytes_text(MOST_BYTES)}, this one {bytes_text(len(data))}")
        name = hashlib.sha256(data).digest() + namespace.encode()
        if (media := self._used(name)) is None:
            with self._encoding:
                if (media := self._used(name)) is None:  # else who was before this one had the same file
                    media = self._encoded(data)
                    self._hold(name, media)
        return media

    def encode_raw(self, data: bytes) -> RawMedia:
        """Return what a file becomes, as the process says it. For one thread at a time. MediaError."""
        if self._device is not None and (raw := self._device.encode(data)) is not None:
            self.close()  # it was lost, and is there again: no memory is held here
            return raw
        if self._process is not None and self._process.poll() is not None:  # while nothing was encoded
            self.close()
        if self._process is None:
            self._start()
        return self._ask({"bytes": len(data)}, data)

    def close(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()
            with suppress(OSError):  # what it was not sent any more
                self._stream.close()
            self._socket.close()

    @property
    def pid(self) -> int | None:
        """Id of the process; None where the last file ended it, or another device encodes."""
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
                start_new_session=True,  # Ctrl-C must end the parent alone
            )
        self._socket.settimeout(WAIT_S)
        self._stream = self._socket.makefile("rwb")
        try:
            self._ask({**self._settings})
        except MediaError as error:
            self.close()
            raise MediaError(f"{self.path.name}: {error}") from None

    def _used(self, name: bytes) -> Media | None:
        """Return what a file became, if that is held; it is then the last to be dropped."""
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
        """Return an answer, and the bytes that follow it. MediaError; EncoderEnded. The process is ended where it did
        not answer."""
        try:
            self._stream.write(json.dumps(message).encode() + b"\n" + data)
            self._stream.flush()
            line = self._stream.readline()
            answer = json.loads(line) if line else None
            rest = self._stream.read(answer["bytes"]) if answer else b""
        except TimeoutError:
            self.close()
            raise MediaError(f"the process that encodes gave no answer in {WAIT_S:g} s") from None
        except (OSError, ValueError):  # it ended, perhaps within a line
            answer = None
        except BaseException:
            self.close()  # this answer was not read: the next file would take it for its own
            raise
        if answer is None or len(rest) != answer["bytes"]:
            raise EncoderEnded(f"it cannot be encoded: the process for that {self._ending()}")
        if "error" in answer:
            raise MediaError(answer["error"])
        return answer, rest

    def _ending(self) -> str:
        process = self._process
        self.close()
        if process is None:  # by another thread
            return "was ended here"
        code = process.returncode
        if code == -signal.SIGPROF:
            return "took more processor time than decoding may take"
        return f"was ended by signal {-code}" if code < 0 else f"ended with exit code {code}"


def _size(media: Media) -> int:
    return sum(rows.embeddings.nbytes for rows in media.rows)
