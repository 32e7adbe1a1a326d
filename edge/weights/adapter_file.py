"""Files of LoRA adapters, checked for a model. A file that changes after its check is no longer used."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypedDict

from edge.errors import EngineError
from edge.llama import llama
from edge.models.digests import file_state
from edge.models.local_slices import OwnSlices
from edge.weights.adapter import Adapter, Scales, adapters_from
from partition.model.check_adapter import open_adapter
from partition.model.file import ModelFile
from partition.model.model import block_of


class AdapterFile:
    """File of an adapter, or of a slice of one, in the state in which it was checked for its model."""

    def __init__(self, path: Path, model: ModelFile) -> None:
        """Check the adapter at `path`. Raises ModelFileError if the file is not an adapter of this model."""
        self.path, self._state = path, _state(path)  # the state comes first, to notice changes during reading
        self.gguf, pairs = open_adapter(path, model)
        n_used = max(1, model.shape.n_experts_used)
        self.weights = {name: pair.a.n_bytes + pair.b.n_bytes for name, pair in pairs.items()}  # bytes by weight name
        self.row_bytes = 4 * max(  # maximum bytes of the adapter products for one batch row
            (
                (pair.b.shape[0] + model.tensors[name].shape[1]) * (n_used if len(pair.b.shape) > 2 else 1)
                for name, pair in pairs.items()
            ),
            default=0,
        )

    def check_unchanged(self) -> None:
        """Raise EngineError if the file has changed since the check."""
        if self._state is None or _state(self.path) != self._state:
            raise EngineError(f"the adapter {self.path} has changed since it was checked; start again")

    def digest(self) -> str:
        """Return the SHA-256 of the checked file.

        Raises EngineError if the file has changed, or SliceError if it cannot be read.
        """
        digest = OwnSlices().model_digest(self.path)
        self.check_unchanged()
        return digest

    def load(self, model: llama.Model) -> None:
        """Load the adapter into its model. Raises EngineError if the file has changed or llama.cpp refuses it."""
        self.check_unchanged()
        model.load_adapter(self.path)
        self.check_unchanged()


@dataclass(frozen=True)
class CheckedAdapter(Adapter):
    """An adapter that was checked for its model."""

    file: AdapterFile
    digest: str  # SHA-256 of the file

    @classmethod
    def all_from(cls, texts: Sequence[str], model: ModelFile) -> tuple[CheckedAdapter, ...]:
        """Return the adapters in FILE[:SCALE] texts.

        Raises ModelFileError if an adapter belongs to another model, EngineError if a file changes during the check,
        and the errors of `adapters_from`.
        """
        files = [(adapter, AdapterFile(adapter.path, model)) for adapter in adapters_from(texts)]
        return tuple(cls(adapter.path, adapter.scale, file, file.digest()) for adapter, file in files)


class AdapterSizes(TypedDict):
    """Sizes of adapters, in the fields of `ContextSizes`."""

    adapter_bytes: tuple[int, ...]  # bytes by layer, then the bytes outside of layers; empty without adapters
    adapter_row_bytes: int  # maximum bytes of the adapter products for one batch row


def adapter_sizes(files: Sequence[AdapterFile], n_layers: int) -> AdapterSizes:
    """Return the sizes of adapters for a model with this number of layers."""
    by_layer = [0] * (n_layers + 1)
    for file in files:
        for weight, n_bytes in file.weights.items():
            layer = block_of(weight)
            by_layer[n_layers if layer is None or layer >= n_layers else layer] += n_bytes
    return {
        "adapter_bytes": tuple(by_layer) if files else (),
        "adapter_row_bytes": max((file.row_bytes for file in files), default=0),
    }


def namespace_with(namespace: str, adapters: Sequence[CheckedAdapter], scales: Scales) -> str:
    """Return the namespace of a KV cache that was computed with adapters. Other computations must not share it."""
    if not scales:
        return namespace
    pairs = zip(adapters, scales, strict=True)
    used = [bytes.fromhex(adapter.digest) + struct.pack("<f", scale) for adapter, scale in pairs if scale]
    return f"{namespace}\0{hashlib.sha256(b''.join(sorted(used))).hexdigest()}"


def _state(path: Path) -> dict[str, int] | None:
    """Return attributes that change with every change of the file; None if there is no file."""
    try:
        return file_state(path.stat())
    except (OSError, ValueError):
        return None
