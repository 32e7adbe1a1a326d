"""Files of one model in several types, and the divergence of each type's predictions from the model's.

A type is a type name of llama.cpp's quantizer, or a GGUF file, such as one fitted to a size. The file for a type name
is created once. Divergence is also measured once, because this mean over a text hardly depends on the device.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Collection, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

from devices.remembered import Remembered, key_of
from edge.llama.library import PINNED_VERSION
from edge.llm.options import EngineOptions
from edge.models.local_slices import OwnSlices
from edge.models.paths import model_path
from edge.quantization.divergence import CHUNK_TOKENS
from edge.quantization.evaluate import evaluate
from edge.quantization.gguf import Outcome, model_in_type, types_of_each
from edge.quantization.text_file import BUNDLED, read_text
from edge.tasks import SILENT, Steps
from partition.errors import PlanError
from partition.model.file import ModelFile
from quant.mixes import Mix, is_type_file, mix_by_name

CHUNKS = 4  # chunks of the bundled text; of another text, all are used
_REMEMBERED = "divergences"


@dataclass(frozen=True)
class TypeFile:
    """One type of a model, and its file."""

    name: str
    file: ModelFile
    note: str = ""  # text about tensors with another type
    divergence: float | None = None  # mean divergence from the model in nats per token; None: not measured


def divergence_text(
    types: Collection[str], axes: Collection[str], most: float | None, text: Path | None
) -> Path | None:
    """Return the text to measure divergence on, or None if divergence is not needed.

    most: limit of the divergence.
    text: text from the user; None: the bundled text.
    Raises PlanError if there is a divergence objective, a limit or a text, but no types to compare.
    """
    if "divergence" not in axes and most is None and text is None:
        return None
    if not types:
        raise PlanError("divergence compares types of the weights, and none are named; name some, such as q8_0,q4_k_m")
    return text or BUNDLED


def type_files(
    model: ModelFile, types: Sequence[str], text: Path | None, options: EngineOptions, steps: Steps = SILENT
) -> list[TypeFile]:
    """Return the file of each type of a model, creating missing files.

    text: text to measure divergence on; None: not measured.
    options: threads and memory for measuring.
    Raises UnknownTypeError if a type is unknown, and PlanError if a type is named twice or the model cannot have it.
    Both are raised before any file is created. Also raises TextError, and the errors of quantizing and evaluating.
    """
    words = read_text(text) if text is not None else None
    mixes = {type_: mix_by_name(type_) for type_ in types if not is_type_file(type_)}
    files = {type_: ModelFile.open(model_path(type_)) for type_ in types if is_type_file(type_)}
    names = [mixes[type_].name if type_ in mixes else files[type_].path.stem for type_ in types]
    for name, count in Counter(names).items():
        if count > 1:
            raise PlanError(
                f"types has {count} entries called {name}; use each name once, and rename files with equal names"
            )
    outcomes = _outcomes(model, list(mixes.values()))
    same = {name: tensor.type for name, tensor in model.tensors.items()}
    quantized_files = []
    for type_, name in zip(types, names, strict=True):
        if type_ in files:
            quantized_files.append(TypeFile(name, files[type_]))
            continue
        outcome = outcomes[name]
        note = f"{name}: {misfits}" if (misfits := _misfits(outcome, mixes[type_])) else ""
        quantized_files.append(
            TypeFile(name, model if outcome.types == same else model_in_type(model, name, steps), note)
        )
    if words is None:
        return quantized_files
    return _measured(model, quantized_files, words, CHUNKS if text == BUNDLED else None, options, steps)


def _outcomes(model: ModelFile, mixes: Sequence[Mix]) -> dict[str, Outcome]:
    """Return the tensor types of each mix by name. Raises PlanError for a mix that the model cannot have."""
    for mix in mixes:
        if mix.needs_importance:
            raise PlanError(
                f"the type {mix.name} needs an importance matrix; make its file with edge quantize and --imatrix, and"
                " name that file in types"
            )
    if not mixes:
        return {}
    with closing(types_of_each([(model, mix) for mix in mixes])) as outcomes:
        by_name = {mix.name: outcome for mix, outcome in zip(mixes, outcomes, strict=True)}
    for mix in mixes:
        if mix.type not in by_name[mix.name].types.values():
            why = (
                _misfits(by_name[mix.name], mix) or f"llama.cpp would give none of its tensors the type {mix.type.name}"
            )
            raise PlanError(f"{model.path.name} cannot have the type {mix.name}: {why}; name another one")
    return by_name


def _misfits(outcome: Outcome, mix: Mix) -> str:
    """Describe the tensors whose rows do not divide into blocks of the mix's main type, or return "" if there are
    none."""
    misfits = [misfit for misfit in outcome.misfits if misfit.requested == mix.type.name]
    if not misfits:
        return ""
    used = Counter(misfit.used for misfit in misfits if misfit.used).most_common(1)
    instead = f", mostly {used[0][0]}" if used else ""
    return (
        f"rows of {len(misfits)} of its {len(outcome.types)} tensors do not divide into blocks of that type, so"
        f" they have another one{instead}"
    )


def _measured(
    model: ModelFile, files: Sequence[TypeFile], text: str, most: int | None, options: EngineOptions, steps: Steps
) -> list[TypeFile]:
    """Return the files with their divergence, cached or measured on the first `most` chunks of a text."""
    remembered, slices = Remembered(_REMEMBERED), OwnSlices()
    with steps.step(f"Reading {model.path.name}") as show:
        paths = (model.path, *(file.file.path for file in files))
        digests = {path: slices.model_digest(path, show) for path in paths}
    on = [hashlib.sha256(text.encode()).hexdigest(), str(CHUNK_TOKENS), str(most), PINNED_VERSION]
    keys = {file.name: key_of([digests[model.path], digests[file.file.path], *on]) for file in files}
    values: dict[str, float] = {}
    for file in files:
        known = remembered.get(keys[file.name], math.inf)
        if digests[file.file.path] == digests[model.path]:
            values[file.name] = 0.0
        elif known is not None:
            values[file.name] = float(known[0])
    new = [file for file in files if file.name not in values]
    if new:
        with steps.step("Measuring divergence", unit="chunks") as show:
            results = evaluate(model, [file.file for file in new], text, options, most=most, progress=show)
        for file, result in zip(new, results[1:], strict=True):
            values[file.name] = result.summary.mean_divergence
            remembered.put(keys[file.name], values[file.name])
    return [replace(f, divergence=values[f.name] if math.isfinite(values[f.name]) else None) for f in files]
