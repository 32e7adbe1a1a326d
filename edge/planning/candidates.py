"""Candidates: published models in their published types, as outline files on this device's disk."""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from edge.errors import CatalogError
from edge.models.catalog import KnownModel
from edge.models.mix_types import types_in_mix
from edge.models.synth import write_outline
from edge.quantization.gguf import types_of_each
from edge.tasks import SILENT, Steps
from partition.model.file import ModelFile
from partition.model.model import ModelShape
from partition.plan.tensor import Limits
from partition.slices.gguf_slice import limits
from quant.errors import ModelFileError
from quant.mixes import Mix, mix_by_name
from quant.types import TensorType


@dataclass(frozen=True)
class Candidate:
    """Published model in one type, with its outline. Planners and profilers use the outline like a model file."""

    model: KnownModel
    mix: Mix
    file: ModelFile

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the outline's header, which identifies the outline because the outline has no weights."""
        with self.file.path.open("rb") as file:
            return hashlib.sha256(file.read(self.file.header_bytes(self.file.path))).hexdigest()

    @property
    def shape(self) -> ModelShape:
        return self.file.shape

    @cached_property
    def limits(self) -> Limits:
        return limits(self.file)

    @property
    def name(self) -> str:
        """Model name and type for display."""
        return f"{self.model.name} {self.mix.name}"


@contextmanager
def candidates(
    models: Sequence[KnownModel], types: Sequence[str] = (), steps: Steps = SILENT
) -> Iterator[list[Candidate]]:
    """Yield each model that has a shape, in each of its types. Their outline files exist until the end of the block.

    types: types to use instead of the published ones.
    Raises UnknownTypeError for an unknown type, CatalogError for a shape that llama.cpp would not load, and EngineError
    for a type that llama.cpp's quantizer refuses.
    """
    mixes = {name: mix_by_name(name) for name in types}
    shaped = [model for model in models if model.shape is not None]
    with tempfile.TemporaryDirectory(prefix="edge-advise-") as folder:
        with steps.step("Reading the catalog"):
            in_all_types = _candidates(shaped, mixes.values(), Path(folder))
        yield in_all_types


def _candidates(models: Sequence[KnownModel], mixes: Collection[Mix], folder: Path) -> list[Candidate]:
    jobs = [(model, mix) for model in models for mix in mixes or map(mix_by_name, model.types)]
    all_types = [types_in_mix(model.shape, mix) if model.shape else None for model, mix in jobs]
    unknown = [job for job, types in zip(jobs, all_types, strict=True) if types is None]
    names = dict.fromkeys(model for model, _ in unknown)
    wholes = {model.name: _outline(model, None, folder / f"{i}.gguf") for i, model in enumerate(names)}
    with closing(types_of_each([(wholes[model.name], mix) for model, mix in unknown])) as outcomes:
        known = [dict(next(outcomes).types) if types is None else types for types in all_types]
    return [
        Candidate(model, mix, _outline(model, types, folder / f"{n}-{mix.name}.gguf"))
        for n, ((model, mix), types) in enumerate(zip(jobs, known, strict=True))
    ]


def _outline(model: KnownModel, types: Mapping[str, TensorType] | None, path: Path) -> ModelFile:
    """Write the outline of a model. Raises CatalogError if llama.cpp would not load such a model."""
    assert model.shape is not None
    try:
        return write_outline(path, model.shape, model.name, types)
    except ModelFileError as error:
        raise CatalogError(f"llama.cpp cannot load the shape of {model.name}: {error}") from None
