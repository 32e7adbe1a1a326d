"""A file of the size that is asked for, with the least damage: measures, chooses types, quantizes, and measures again.

What was measured of a model is kept in the cache folder, so that another size of it takes no longer than quantizing.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Container, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from devices.files import write_whole
from devices.paths import cache_folder
from devices.probe import default_threads
from edge import calibrate, sensitivity
from edge.accounts import beside_weights
from edge.divergence import Floats
from edge.engine_options import EngineOptions, resolve
from edge.errors import SizeTooSmall
from edge.evaluate import evaluate
from edge.ggml import PINNED_VERSION
from edge.kernel_speed import KINDS, known_kernels, slow_kinds
from edge.llama import ContextSizes
from edge.quantize import NEED_IMPORTANCE, Outcome, file_bytes, header_bytes, quantize, types_of
from partition.model import ModelShape
from quant.fit import Choice, Fit, fit
from quant.gguf_file import GgufFile
from quant.gguf_writer import NewTensor
from quant.imatrix import read_imatrix
from quant.mixes import MIXES, Mix, mix_by_name
from quant.sensitivity import Sensitivity
from quant.types import TYPES, TensorType

Progress = Callable[[str, int, int], None]  # what is being done, steps done of it, steps in all

_CALIBRATION_CHUNKS = 32
_MIB = 1 << 20


@dataclass(frozen=True)
class FitOptions:
    """What a person may set."""

    imatrix: Path | None = None  # an importance matrix; None: one is made of the text
    kinds: tuple[TensorType, ...] = ()  # to choose among; none: KINDS
    fast: bool = False  # without those that decode slower on this device than a larger one, unless the size needs them
    within_s: float = 600.0  # for measuring, the first time
    threads: int | None = None


@dataclass(frozen=True)
class Fitted:
    """A file that was made to fit."""

    outcome: Outcome
    expected_divergence: float  # nats a token: the sum of what each tensor's type costs
    measured_divergence: float  # of the file, on the same text
    gap: float  # the expected one is at most this part above the least possible
    slow: Mapping[str, str]  # types it has though a larger one, the value, decodes faster here


def fit_file(
    file: GgufFile, out: Path, budget: int, text: str, options: FitOptions, progress: Progress = lambda *_: None
) -> Fitted:
    """Write a model to `out` in a file of at most `budget` bytes, whose predictions on `text` differ least from it.

    SizeTooSmall, with the least size that can be, where that is larger. TextError where the text is too short; what
    `quantize` and Engine raise.
    """
    free = _free(file)
    reserved = _reserved(file, free)
    covered = read_imatrix(options.imatrix).of(file) if options.imatrix else calibrate.covered(file)
    slow = slow_kinds(known_kernels(options.threads or default_threads()))
    candidates = _choose_kinds(file, free, covered, reserved, budget, options, slow)
    folder = _folder(file, text, options.imatrix)
    imatrix = options.imatrix or _imatrix(file, text, folder / "imatrix.gguf", options, progress)
    importance = read_imatrix(imatrix).of(file)
    found = _sensitivity(file, text, candidates, importance, folder, options, progress)
    chosen = fit(_table(file, candidates, found), budget, reserved)
    outcome = quantize(
        file,
        out,
        _mix(chosen),
        types={name: choice.type for name, choice in chosen.choices.items()},
        imatrix=imatrix,
        threads=options.threads,
        progress=lambda done, total, _: progress("Quantizing", done, total),
    )
    used = {choice.type.name for choice in chosen.choices.values()}
    slow = {kind: larger for kind, larger in slow.items() if kind in used}
    return Fitted(outcome, chosen.damage, _measured(file, out, text, options, progress), chosen.gap, slow)


def _mix(chosen: Fit) -> Mix:
    """The mix whose name the file is to bear: of the type that most of it has. It decides nothing, because every tensor
    that may change is given its type."""
    n_bytes = Counter[str]()
    for choice in chosen.choices.values():
        if choice.type.block > 1:
            n_bytes[choice.type.name] += choice.n_bytes
    return mix_by_name(n_bytes.most_common(1)[0][0]) if n_bytes else MIXES["q8_0"]


def file_within(file: GgufFile, memory: int, context: int | None, kv_type: str) -> tuple[int, dict[str, int]]:
    """(bytes of a file that a process of `memory` bytes can hold whole, bytes by part of what else it holds).

    SizeTooSmall where nothing is left. What a dry run of the model raises.
    """
    shape = ModelShape.from_gguf(file)
    options = EngineOptions(context=context, kv_type=kv_type)
    n_context, _, kv = resolve(options, shape)
    batch = min(options.rows, n_context)
    parts = beside_weights(file, shape, ContextSizes(n_context, kv, batch=batch), memory)
    left = memory - sum(parts.values())
    if left <= 0:
        words = ", ".join(f"{name} {n / _MIB:,.0f}" for name, n in parts.items())
        raise SizeTooSmall(
            f"nothing of {memory / _MIB:,.0f} MiB is left for weights: {words} MiB; use a smaller --context or"
            " --kv-type"
        )
    return left + header_bytes(file), parts


def _folder(file: GgufFile, text: str, imatrix: Path | None) -> Path:
    """Where what is measured of a model, on a text, is kept."""
    stamps = {str(path.resolve()): file.stamp(path) for path in file.paths}
    digests = [hashlib.sha256(text.encode()).hexdigest()]
    if imatrix is not None:
        digests.append(hashlib.sha256(imatrix.read_bytes()).hexdigest())
    key = json.dumps([PINNED_VERSION, stamps, digests])
    folder = cache_folder() / "quantize" / hashlib.sha256(key.encode()).hexdigest()[:32]
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    return folder


def _imatrix(file: GgufFile, text: str, path: Path, options: FitOptions, progress: Progress) -> Path:
    """The file of the importance matrix of a text; made where it is not there."""
    if not path.exists():
        calibrate.collect(
            file.path,
            text,
            EngineOptions(threads=options.threads),
            most=_CALIBRATION_CHUNKS,
            progress=lambda done, total: progress("Calibrating", done, total),
        ).write(path)
    return path


def _free(file: GgufFile) -> list[str]:
    """The tensors that llama.cpp's quantizer changes: those to which it gives another type in one of two mixes."""
    changed = [types_of(file, MIXES[name]).types for name in ("q4_1", "q5_1")]
    return [name for name, tensor in file.tensors.items() if any(types[name] != tensor.type for types in changed)]


def _choose_kinds(
    file: GgufFile,
    free: Sequence[str],
    covered: Container[str],
    reserved: int,
    budget: int,
    options: FitOptions,
    slow: Container[str],
) -> dict[str, list[TensorType]]:
    """The types that each tensor may have. SizeTooSmall where even the smallest of them are too large.

    covered: tensors that the importance matrix has. slow: types that are slow here.
    """
    kinds = options.kinds or tuple(TYPES[name] for name in KINDS)

    def candidates(kinds: Sequence[TensorType]) -> dict[str, list[TensorType]]:
        return {name: _candidates(file, name, kinds, name in covered) for name in free}

    every = candidates(kinds)
    least = _least(file, every, reserved)
    if least > budget:
        raise SizeTooSmall(
            f"{file.path.name} cannot be smaller than {least}B ({least / _MIB:,.1f} MiB) with the types to choose"
            f" among; {budget}B ({budget / _MIB:,.1f} MiB) were asked for. Name smaller types with --types, or take a"
            " smaller model"
        )
    if not options.fast:
        return every
    fast = candidates([kind for kind in kinds if kind.name not in slow])
    return fast if _least(file, fast, reserved) <= budget else every


def _candidates(file: GgufFile, name: str, kinds: Sequence[TensorType], has_importance: bool) -> list[TensorType]:
    """The types that a tensor may have: at most as wide as it is, of whole blocks. Its own is among them."""
    tensor = file.tensors[name]
    wide = [TYPES["f16"]] if tensor.type.name == "f32" else []
    return [tensor.type] + [
        kind
        for kind in (*kinds, *wide)
        if kind.bits_per_weight < tensor.type.bits_per_weight
        and tensor.shape[0] % kind.block == 0
        and (has_importance or kind.name not in NEED_IMPORTANCE)
    ]


def _table(
    file: GgufFile, candidates: Mapping[str, Sequence[TensorType]], found: Sensitivity
) -> dict[str, list[Choice]]:
    return {
        name: [Choice(kind, _bytes(file, name, kind), found.damage(name, kind.name)) for kind in kinds]
        for name, kinds in candidates.items()
    }


def _reserved(file: GgufFile, free: Sequence[str]) -> int:
    """Bytes of a file that do not depend on the choice."""
    whole = file_bytes(file, {name: tensor.type for name, tensor in file.tensors.items()})
    return whole - sum(_bytes(file, name, file.tensors[name].type) for name in free)


def _bytes(file: GgufFile, name: str, kind: TensorType) -> int:
    tensor = NewTensor(name, file.tensors[name].shape, kind)
    return tensor.n_bytes + tensor.padding


def _least(file: GgufFile, candidates: Mapping[str, Sequence[TensorType]], reserved: int) -> int:
    """Bytes of the smallest file."""
    return reserved + sum(min(_bytes(file, name, kind) for kind in kinds) for name, kinds in candidates.items())


def _sensitivity(
    file: GgufFile,
    text: str,
    candidates: Mapping[str, Sequence[TensorType]],
    importance: Mapping[str, Floats],
    folder: Path,
    options: FitOptions,
    progress: Progress,
) -> Sensitivity:
    """What was measured before, if it has all these types, or is now."""
    path = folder / "sensitivity.json"
    with suppress(OSError, ValueError):
        known = Sensitivity.from_json(json.loads(path.read_bytes()))
        if all(
            {kind.name for kind in kinds} <= known.errors.get(name, {}).keys() for name, kinds in candidates.items()
        ):
            return known
    found = sensitivity.measure(
        file,
        text,
        candidates,
        importance,
        within_s=options.within_s,
        threads=options.threads,
        progress=lambda done, total: progress("Measuring", done, total),
    )
    write_whole(path, json.dumps(found.to_json()).encode())
    return found


def _measured(file: GgufFile, out: Path, text: str, options: FitOptions, progress: Progress) -> float:
    """Mean divergence of what was written, nats a token."""
    results = evaluate(
        file.path,
        [out],
        text,
        EngineOptions(threads=options.threads),
        most=sensitivity.MOST_CHUNKS,
        progress=lambda done, total: progress("Checking", done, total),
    )
    return results[1].summary.mean_divergence
