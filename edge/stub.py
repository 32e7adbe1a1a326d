"""A model's header without its weights, for llama.cpp to load: the weights come later, from us.

llama.cpp wants files as long as their headers say, and then maps them and touches all of that. So the stub is long, but
empty behind the header; and once llama.cpp has checked its length, it is cut short: a mapping's pages behind the end of
its file cannot be touched, and Linux then leaves off at the first.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from devices.files import removed_at_end
from edge import llama
from edge.errors import EngineError
from edge.ggml_weights import OwnMemory
from quant.gguf_file import GgufFile

_CHECKED = "loaded meta data with"  # what llama.cpp says when it has read and checked all headers


def load_stub(file: GgufFile) -> tuple[llama.Model, OwnMemory]:
    """The model of `file` in llama.cpp, and its weights, of which none has memory yet. EngineError where llama.cpp
    refuses it, or the folder for temporary files does."""
    own = OwnMemory()
    with _stub(file) as (path, shorten):

        def listen(line: str) -> None:
            if _CHECKED in line:
                shorten()

        try:
            with llama.heard_log(listen):
                return llama.Model(path, repack=False, own=own), own
        except EngineError as error:
            raise EngineError(str(error).replace(str(path), str(file.path))) from None


@contextmanager
def _stub(file: GgufFile) -> Iterator[tuple[Path, Callable[[], None]]]:
    """(path, function that cuts the files behind their headers)."""
    with tempfile.TemporaryDirectory(prefix="edge-stub-") as folder, removed_at_end(Path(folder)):
        headers: dict[Path, int] = {}
        for path in file.paths:
            copy, n_bytes = Path(folder, path.name), file.header_bytes(path)
            try:
                with open(path, "rb") as whole, open(copy, "wb") as out:
                    out.write(whole.read(n_bytes))
                    out.truncate(file.stamp(path)[0])
            except OSError as error:
                raise EngineError(
                    f"a copy of the header of {path.name}, {n_bytes} bytes and the rest empty, cannot be made in"
                    f" {folder}: {error.strerror}; name another folder with TMPDIR"
                ) from error
            headers[copy] = n_bytes

        def shorten() -> None:
            while headers:
                os.truncate(*headers.popitem())

        yield Path(folder, file.path.name), shorten
