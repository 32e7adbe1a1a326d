"""A file of the size that is asked for, with the least damage: measures, chooses types, quantizes, and measures again.

What was measured of a model is kept in the cache folder: another size of it takes quantizing and one comparison.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from devices.files import removed_at_end, temporary_beside, write_whole
from devices.paths import cache_folder
from devices.probe import default_threads
from edge.errors import SizeTooSmall
from edge.llama.library import PINNED_VERSION
from edge.llama.llama import ContextSizes
from edge.llm.options import EngineOptions, resolve
from edge.llm.states import held_bytes
from edge.paging.budget import MARGIN_SHARE, other_parts
from edge.quantization import imatrix as calibrate
from edge.quantization import sensitivity
from edge.quantization.divergence import Floats
from edge.quantization.evaluate import Quality, evaluate
from edge.quantization.fit_choices import (
    choices,
    choose_kinds,
    free_tensors,
    from_mix,
    mix_like,
    reserved_bytes,
    smallest,
    tensor_bytes,
    too_small,
)
from edge.quantization.gguf import Outcome, file_bytes, header_bytes, quantize
from edge.quantization.kernels import KINDS, known_kernels, slow_kinds
from edge.quantization.rounds import Damages, EarlyStopping, Table, TimePlan, in_order, is_settled
from edge.quantization.tensor_rows import TensorRows
from partition.model.model import ModelShape
from quant.errors import DoesNotFit
from quant.fit import Choice, Fit, fit
from quant.gguf.file import GgufFile
from quant.gguf.imatrix import read_imatrix
from quant.sensitivity import EXACT, Sensitivity
from quant.types import TYPES, TensorType


class Progress(Protocol):
    """Told how far things are."""

    def __call__(self, stage: str, done: int, total: int, what: str = "") -> None:
        """`done` steps of `total` of a stage are done; `what` comes now."""


_CALIBRATION_CHUNKS = 32
# Parts of the time, at the end of which a stage has ended. What follows the last is for writing and checking.
_CALIBRATED, _READ, _MEASURED, _WHOLE = 0.15, 0.3, 0.5, 0.6
_ANCHORS = (0.03, 0.15)  # of the way from the smallest file to the model as it is: sizes that are measured whole
_SECOND = 3.0  # times as long as writing took, that must be left for another try and its check
_KEPT = "sensitivity.json"
_DOUBT = 2.0  # times the least expected damage: what is within, may be less in truth
_MORE = 1.5  # times as long: worth measuring again
_MIB = 1 << 20
_SPARE_MIB = 2  # a process is not always of the same size


@dataclass(frozen=True)
class FitOptions:
    """What a person may set."""

    imatrix: Path | None = None  # an importance matrix; None: one is made of the text
    kinds: tuple[TensorType, ...] = ()  # to choose among; none: KINDS
    fast: bool = False  # without those that decode slower on this device than a larger one, unless the size needs them
    within_s: float = 600.0  # for all of it
    threads: int | None = None
    clock: Callable[[], float] = time.monotonic


@dataclass(frozen=True)
class Fitted:
    """A file that was made to fit."""

    outcome: Outcome
    expected_divergence: float  # nats a token: the sum of what each tensor's type costs, times what whole files add
    measured_divergence: float  # of the file, on the same text
    gap: float  # the expected one is at most this part above the least possible
    slow: Mapping[str, str]  # types it has though a larger one, the value, decodes faster here
    exact: Mapping[str, str]  # by tensor, the type that holds it without loss, though its own is wider


def _silent(stage: str, done: int, total: int, what: str = "") -> None:
    """Nobody is told."""


def fit_file(
    file: GgufFile, out: Path, budget: int, text: str, options: FitOptions, progress: Progress = _silent
) -> Fitted:
    """Write a model to `out` in a file of at most `budget` bytes, whose predictions on `text` differ least from it.

    SizeTooSmall, with the least size that can be, where that is larger. TextError where the text is too short; what
    `quantize` and Engine raise.
    """
    plan = TimePlan(options.within_s, options.clock)
    free = free_tensors(file)
    reserved = reserved_bytes(file, free)
    slow = slow_kinds(known_kernels(options.threads or default_threads()))
    importance = read_imatrix(options.imatrix).weights_of(file) if options.imatrix else None
    covered = calibrate.covered(file) if importance is None else importance
    candidates = choose_kinds(file, free, covered, reserved, budget, _kinds(options), options.fast, slow)
    if file_bytes(file, {name: tensor.type for name, tensor in file.tensors.items()}) <= budget:
        return _whole(file, out, free, options, progress)
    with _folder(file, text, options.imatrix) as folder:
        imatrix = options.imatrix or _imatrix(file, text, folder / "imatrix.gguf", options, plan, progress)
        if importance is None:
            importance = read_imatrix(imatrix).weights_of(file)
        try:
            found = _sensitivity(
                file, text, candidates, importance, folder, (budget, reserved), options, plan, progress
            )
            table = choices(file, candidates, found)
            chosen = fit(table, budget, reserved)
        except DoesNotFit as error:  # some tensors cannot be measured, and stay as they are
            raise too_small(file, error.least, budget) from None
        tries = [chosen]
        beside = from_mix(file, table, budget, reserved, imatrix)
        if beside and beside.choices != chosen.choices and beside.damage < _DOUBT * chosen.damage:
            tries.append(beside)
        best, outcome, measured = _best(file, out, text, tries, imatrix, options, plan, progress)
        expected = found.together(best.damage)
        _keep(folder, replace(found, wholes=tuple({**dict(found.wholes), best.damage: measured}.items())))
    used = {choice.type.name for choice in best.choices.values()}
    slow = {kind: larger for kind, larger in slow.items() if kind in used}
    exact = {name: kind for name, choice in best.choices.items() if (kind := _exact(file, name, choice.type, found))}
    return Fitted(outcome, expected, measured, chosen.gap, slow, exact)


def _exact(file: GgufFile, name: str, kind: TensorType, found: Sensitivity) -> str | None:
    """The narrower type a tensor has without loss, if it has one."""
    narrower = kind.block > 1 and kind.id != file.tensors[name].type.id
    return kind.name if narrower and found.errors.get(name, {}).get(kind.name, 1.0) <= EXACT else None


def least_bytes(file: GgufFile, options: FitOptions) -> int:
    """Bytes of the smallest file that can be made of a model."""
    free = free_tensors(file)
    covered = read_imatrix(options.imatrix).weights_of(file) if options.imatrix else calibrate.covered(file)
    return smallest(file, free, covered, reserved_bytes(file, free), _kinds(options))


def _kinds(options: FitOptions) -> tuple[TensorType, ...]:
    return options.kinds or tuple(TYPES[name] for name in KINDS)


def _best(
    file: GgufFile,
    out: Path,
    text: str,
    tries: Sequence[Fit],
    imatrix: Path,
    options: FitOptions,
    plan: TimePlan,
    progress: Progress,
) -> tuple[Fit, Outcome, float]:
    """Write all that there is time for, and keep the one whose predictions differ least: (which, what was written, its
    divergence)."""
    with ExitStack() as stack:
        paths: list[Path] = []
        outcomes = []
        took_s = 0.0
        for one in tries:
            if paths and plan.left_s() < _SECOND * took_s:
                break
            began = plan.left_s()
            paths.append(stack.enter_context(temporary_beside(out, ".gguf")))
            outcomes.append(_write(file, paths[-1], one, imatrix, options, progress))
            took_s = began - plan.left_s()
        measured = _measured(file, paths, text, options, plan, progress)
        best = min(range(len(paths)), key=lambda i: measured[i])
        paths[best].replace(out)
    return tries[best], outcomes[best], measured[best]


def _whole(file: GgufFile, out: Path, free: Sequence[str], options: FitOptions, progress: Progress) -> Fitted:
    """The model as it is: a larger file would hold no more."""
    types = {name: file.tensors[name].type for name in free}
    chosen = Fit({name: Choice(kind, tensor_bytes(file, name, kind), 0.0) for name, kind in types.items()}, 0.0)
    return Fitted(_write(file, out, chosen, options.imatrix, options, progress), 0.0, 0.0, 0.0, {}, {})


def _write(
    file: GgufFile, out: Path, chosen: Fit, imatrix: Path | None, options: FitOptions, progress: Progress
) -> Outcome:
    """Have llama.cpp write what was chosen."""
    types = {name: choice.type for name, choice in chosen.choices.items()}
    return quantize(
        file,
        out,
        mix_like(chosen),
        types=types,
        imatrix=imatrix,
        threads=options.threads,
        progress=lambda done, total, name: progress("Quantizing", done, total, name),
    )


def file_within(
    file: GgufFile, memory: int, context: int | None, kv_type: str, least: int
) -> tuple[int, dict[str, int]]:
    """(bytes of a file that a process of `memory` bytes can hold whole, bytes by part of what else it holds).

    least: bytes of the smallest file there can be. SizeTooSmall, with the memory that would do, where no file of that
    size is left. What a dry run of the model raises.
    """
    shape = ModelShape.from_gguf(file)
    options = EngineOptions(context=context, kv_type=kv_type)
    n_context, _, kv = resolve(options, shape)
    batch = min(options.rows, n_context)
    parts = other_parts(file, shape, ContextSizes(n_context, kv, batch=batch), memory)
    parts["kept prompts"] = held_bytes(shape)
    left = memory - sum(parts.values())
    if left + header_bytes(file) < least:
        words = ", ".join(f"{name} {n / _MIB:,.0f}" for name, n in parts.items())
        without_share = memory - left - memory // MARGIN_SHARE + least - header_bytes(file)  # that part grows with it
        least_mib = math.ceil(without_share / (1 - 1 / MARGIN_SHARE) / _MIB) + _SPARE_MIB
        raise SizeTooSmall(
            f"{max(0, left) / _MIB:,.0f} of {memory / _MIB:,.0f} MiB are left for weights, beside {words} MiB; the"
            f" smallest file has {least / _MIB:,.1f} MiB. Take --fit {least_mib}MiB or more, a smaller"
            " --context or --kv-type, or name smaller types with --types"
        )
    return left + header_bytes(file), parts


@contextmanager
def _folder(file: GgufFile, text: str, imatrix: Path | None) -> Iterator[Path]:
    """Where what is measured of a model, on a text, is kept; a temporary one where the cache cannot be written to."""
    stamps = {str(path.resolve()): file.stamp(path) for path in file.paths}
    digests = [hashlib.sha256(text.encode()).hexdigest()]
    if imatrix is not None:
        digests.append(hashlib.sha256(imatrix.read_bytes()).hexdigest())
    key = json.dumps([PINNED_VERSION, stamps, digests])
    folder = cache_folder() / "quantize" / hashlib.sha256(key.encode()).hexdigest()[:32]
    with suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    if os.access(folder, os.W_OK):
        yield folder
        return
    with tempfile.TemporaryDirectory() as other, removed_at_end(Path(other)):
        yield Path(other)


def _imatrix(file: GgufFile, text: str, path: Path, options: FitOptions, plan: TimePlan, progress: Progress) -> Path:
    """The file of the importance matrix of a text; made where it is not there."""
    if not path.exists():
        calibrate.collect(
            file.path,
            text,
            EngineOptions(threads=options.threads),
            most=_CALIBRATION_CHUNKS,
            within_s=plan.left_s(_CALIBRATED),
            clock=options.clock,
            progress=lambda done, total: progress("Calibrating", done, total),
        ).write(path)
    return path


def _sensitivity(
    file: GgufFile,
    text: str,
    candidates: Mapping[str, Sequence[TensorType]],
    importance: Mapping[str, Floats],
    folder: Path,
    size: tuple[int, int],
    options: FitOptions,
    plan: TimePlan,
    progress: Progress,
) -> Sensitivity:
    """What was measured before, in as much time as there is now, or is measured: as much as the choice depends on.

    size: bytes that the file may have, and those of it that do not depend on the choice.
    """
    threads = options.threads or default_threads()
    rows = {name: TensorRows(file, name, importance.get(name)) for name in candidates}
    known: Sensitivity | None = None
    with suppress(OSError, ValueError):
        known = Sensitivity.from_json(json.loads((folder / _KEPT).read_bytes()))
        if not known.left_s and options.within_s > _MORE * known.spent_s:
            known = None
    kinds = {name: {*candidates[name], *(() if known else sensitivity.probes(rows[name]))} for name in candidates}
    if known:
        kinds = {n: {k for k in kinds[n] if k.name not in known.errors[n]} for n in kinds if n in known.errors}
    new = {name: rows[name] for name in kinds if kinds[name]}
    errors = sensitivity.measure_errors(
        new, kinds, threads, lambda *at: progress("Reading weights", *at), lambda: not plan.left_s(_READ)
    )
    if known:
        errors = {name: {**row, **errors.get(name, {})} for name, row in known.errors.items()}

    def table(damages: Damages) -> Table:
        return choices(file, candidates, Sensitivity(damages, errors, 0.0))

    def settling() -> EarlyStopping:
        return EarlyStopping(table, lambda table: fit(table, *size))

    def whole(damages: Damages) -> list[Mapping[str, Choice]]:
        """Choices for files of sizes that do not depend on the one that is asked for."""
        costs = table(damages)
        least, most = (sum(end(c.n_bytes for c in row) for row in costs.values()) for end in (min, max))
        return [fit(costs, int(least + part * (most - least)) + 1).choices for part in _ANCHORS]

    values = sum(one.rows * one.columns for one in rows.values())
    possible = [kind for kind in sensitivity.PROBES if any(row.get(kind, 0) > 0 for row in errors.values())]
    order = in_order(possible, 8 * (size[0] - size[1]) / max(1, values))
    if known and (not known.left_s or is_settled(order, known.damages, settling().after_round)):
        found = replace(known, errors=errors)
    else:
        found = sensitivity.measure_damages(
            file,
            text,
            rows,
            errors,
            within_s=min(known.left_s if known else math.inf, plan.left_s(_MEASURED)),
            threads=threads,
            progress=lambda done, total, left_s: progress("Measuring", done, total, _time_left(left_s)),
            order=order,
            known=known.damages if known else None,
            after_round=settling().after_round,
            whole=whole,
            whole_left_s=lambda: plan.left_s(_WHOLE),
            clock=options.clock,
        )
        found = replace(found, spent_s=known.spent_s if known else options.within_s)
    if known is None or found != known:
        _keep(folder, found)
    return found


def _keep(folder: Path, found: Sensitivity) -> None:
    """Write what was measured for the next size of the model."""
    write_whole(folder / _KEPT, json.dumps(found.to_json()).encode())


def _time_left(left_s: float) -> str:
    """For people: at most how long measuring goes on, and what decides that."""
    left = f"{math.ceil(left_s / 60)} min" if left_s >= 90 else f"{math.ceil(left_s)} s"
    return f"at most {left} left (--minutes)"


def _measured(
    file: GgufFile, paths: Sequence[Path], text: str, options: FitOptions, plan: TimePlan, progress: Progress
) -> list[float]:
    """Mean divergence of what was written, nats a token: on a chunk of the text, and where there is time, on more."""
    began, most = plan.left_s(), sensitivity.most_chunks(ModelShape.from_gguf(file).n_vocab)
    results: list[Quality] = []
    for n in (1, most):
        if results:
            n = min(most, int(plan.left_s() / max(began - plan.left_s(), 1e-9)))
        if n > 1 or not results:
            results = evaluate(
                file.path,
                paths,
                text,
                EngineOptions(threads=options.threads),
                most=n,
                progress=lambda done, total: progress("Checking", done, total),
            )
    return [result.summary.mean_divergence for result in results[1:]]
