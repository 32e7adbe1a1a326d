"""Fits a model into a file of a given size with the least damage: measures, chooses types, quantizes, and checks.

Measurements are stored in the cache folder. Another size of the same model then needs only quantizing and one
comparison.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import tempfile
import time
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from devices.files import make_private, removed_at_end, temporary_beside, write_whole
from devices.paths import cache_folder
from devices.probe import default_threads
from edge.errors import SizeTooSmall
from edge.llama.library import PINNED_VERSION
from edge.llm.options import EngineOptions
from edge.llm.resolve import context_sizes
from edge.llm.states import held_bytes
from edge.quantization import imatrix as calibrate
from edge.quantization import sensitivity
from edge.quantization.divergence import CHUNK_TOKENS, Floats
from edge.quantization.evaluate import Quality, evaluate
from edge.quantization.fit_choices import (
    Condition,
    candidates,
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
from edge.quantization.pace import Pace, is_slow, measure_pace
from edge.quantization.rounds import FIRST, Damages, EarlyStopping, Table, TimePlan, is_settled, probe_order
from edge.quantization.tensor_rows import TensorRows
from edge.weights.budget import MARGIN_SHARE, other_parts
from partition.model.file import ModelFile
from quant.errors import DoesNotFit
from quant.fit import Choice, Fit, fit
from quant.gguf.file import GgufFile
from quant.gguf.imatrix import read_imatrix
from quant.sensitivity import EXACT, Sensitivity
from quant.types import TYPES, TensorType


class Progress(Protocol):
    """Callback for progress of a fit."""

    def __call__(self, stage: str, done: int, total: int, what: str = "") -> None:
        """Report that `done` of `total` steps of a stage are done. what: the current item."""


_CALIBRATION_CHUNKS = 32
# Each stage ends when this share of the time has passed. The remaining time is for writing and checking.
_CALIBRATED, _READ, _MEASURED, _WHOLE = 0.15, 0.3, 0.5, 0.6
# Sizes of whole measured files, as shares of the way from the smallest file to the unchanged model.
_ANCHORS = (0.03, 0.15)
_WRITTEN = 0.9  # share of the time in which the file is written; the remaining time is for checking it
_WRITTEN_S = 1.0  # types are not left out if the whole file can be written in one of them in this time
# Types that are slow to quantize to are left out if they have this many bits less than the mean of the file. Without
# this limit, no tensor of SmolLM2-135M and the bundled model had such a type, at 2.7 to 6.5 bits.
_BELOW = 1.5
_SECOND = 3.0  # multiple of the writing time that must be left to write and check another candidate
_CHECK = 1.0  # multiple of the writing time that must be left to check; the writing of another candidate ends there
_SHORTER = 4  # ratio of the tokens of a chunk to those of the first chunk of the check
_KEPT = "sensitivity.json"
_DOUBT = 2.0  # multiple of the least expected damage; a candidate below it may turn out to be better
_MORE = 1.5  # a new measurement is worthwhile if it has more than this multiple of the earlier time
_MIB = 1 << 20
_SPARE_MIB = 2  # tolerance because the size of a process varies


@dataclass(frozen=True)
class FitOptions:
    """Options of a fit."""

    imatrix: Path | None = None  # importance matrix; None: compute it from the text
    kinds: tuple[TensorType, ...] = ()  # types to choose from; empty: KINDS
    fast: bool = False  # exclude types that decode slower here than a larger type, unless the size requires them
    # Seconds for the whole fit. Only three steps can exceed them: measuring one type of each tensor, writing one file,
    # and checking it.
    within_s: float = 600.0
    threads: int | None = None
    clock: Callable[[], float] = time.monotonic
    say: Callable[[str], None] = lambda line: None  # called with a line for people if the time cannot suffice


@dataclass(frozen=True)
class Fitted:
    """A file that was fitted to a size."""

    outcome: Outcome
    expected_divergence: float  # nats per token: the sum of the tensors' damages, corrected by measured whole files
    measured_divergence: float  # nats per token: divergence of the written file on the same text
    gap: float  # upper bound of (expected damage / least possible damage - 1)
    # Types in the file that decode slower here than a larger type; the value names the larger type.
    slow: Mapping[str, str]
    exact: Mapping[str, str]  # narrower types that store a tensor without loss, by tensor


class _TimeIsUpError(Exception):
    """Ends a stage that is not necessary."""


def _silent(stage: str, done: int, total: int, what: str = "") -> None:
    """Report nothing."""


def fit_file(
    file: ModelFile, out: Path, budget: int, text: str, options: FitOptions, progress: Progress = _silent
) -> Fitted:
    """Write the model to `out` in at most `budget` bytes, with the least change of its predictions on `text`.

    Raises SizeTooSmall, with the least possible size, if the budget is below it. Raises TextError if the text is too
    short, and the errors of `quantize` and Engine.
    """
    plan, began = TimePlan(options.within_s, options.clock), options.clock()
    free = free_tensors(file)
    pace = Pace(options.threads or default_threads(), options.clock() - began)
    measure_pace(pace, file, free, options.clock)
    fitting = _Fitting(file, text, options, plan, progress, pace)
    if file_bytes(file, {name: tensor.type for name, tensor in file.tensors.items()}) <= budget:
        return fitting.whole(out, free)
    reserved = reserved_bytes(file, free)
    importance = read_imatrix(options.imatrix).weights_of(file) if options.imatrix else None
    covered = calibrate.covered(file) if importance is None else importance
    kinds, slow = fitting.kinds(free, covered, reserved, budget)
    every = candidates(file, free, covered, kinds)
    with _folder(file, text, options.imatrix) as folder:
        imatrix = options.imatrix or fitting.imatrix(folder / "imatrix.gguf")
        if importance is None:
            importance = read_imatrix(imatrix).weights_of(file)
        try:
            sensitivities = fitting.sensitivity(every, importance, folder, (budget, reserved))
            table = choices(file, every, sensitivities)
            chosen = fitting.fit_in_time(table, budget, reserved)
        except DoesNotFit as error:  # tensors that cannot be measured keep their types
            raise too_small(file, error.least, budget) from None
        fits = [chosen]
        widened = None
        if plan.left_s() > (1 + _SECOND) * fitting.writing_s({name: c.type for name, c in chosen.choices.items()}):
            widened = from_mix(file, table, budget, reserved, imatrix)
        if widened and widened.choices != chosen.choices and widened.damage < _DOUBT * chosen.damage:
            fits.append(widened)
        best, outcome, measured = fitting.best(out, fits, imatrix)
        expected = sensitivities.together(best.damage)
        wholes = {**dict(sensitivities.wholes), best.damage: measured}
        _keep(folder, replace(sensitivities, wholes=tuple(wholes.items())))
    used = {choice.type.name for choice in best.choices.values()}
    slow = {kind: larger for kind, larger in slow.items() if kind in used}
    exact = {
        name: choice.type.name
        for name, choice in best.choices.items()
        if choice.type.block > 1 and choice.type.id != file.tensors[name].type.id  # the chosen type is narrower
        if sensitivities.errors.get(name, {}).get(choice.type.name, 1.0) <= EXACT
    }
    return Fitted(outcome, expected, measured, chosen.gap, slow, exact)


def least_bytes(file: GgufFile, options: FitOptions) -> int:
    """Return the size in bytes of the smallest file that can be made from a model."""
    free = free_tensors(file)
    covered = read_imatrix(options.imatrix).weights_of(file) if options.imatrix else calibrate.covered(file)
    return smallest(file, candidates(file, free, covered, _kinds(options)), reserved_bytes(file, free))


def _kinds(options: FitOptions) -> tuple[TensorType, ...]:
    return options.kinds or tuple(TYPES[name] for name in KINDS)


def file_within(file: ModelFile, memory: int, engine: EngineOptions, least: int) -> tuple[int, dict[str, int]]:
    """Return (maximum bytes of a model file, bytes of each other part of the process) for a process of limited memory.

    memory: bytes that the process may have
    engine: options of the engine in that process
    least: bytes of the smallest possible file

    Raises SizeTooSmall, with the memory that would suffice, if that file does not fit. Raises the errors of a dry run
    of the model.
    """
    parts = other_parts(file, context_sizes(engine, file.shape), memory)
    parts["prefix cache"] = held_bytes(file.shape)
    left = memory - sum(parts.values())
    if left + header_bytes(file) < least:
        parts_text = ", ".join(f"{name} {n / _MIB:,.0f}" for name, n in parts.items())
        # The safety margin grows with the memory.
        without_share = memory - left - memory // MARGIN_SHARE + least - header_bytes(file)
        least_mib = math.ceil(without_share / (1 - 1 / MARGIN_SHARE) / _MIB) + _SPARE_MIB
        raise SizeTooSmall(
            f"{max(0, left) / _MIB:,.0f} of {memory / _MIB:,.0f} MiB are left for weights, beside {parts_text} MiB; the"
            f" smallest file has {least / _MIB:,.1f} MiB. Take --fit {least_mib}MiB or more, a smaller"
            " --context or --kv-type, or name smaller types with --types"
        )
    return left + header_bytes(file), parts


@contextmanager
def _folder(file: GgufFile, text: str, imatrix: Path | None) -> Iterator[Path]:
    """Yield the folder for measurements of a model on a text, or a temporary folder if the cache is not writable."""
    stamps = {str(path.resolve()): file.stamp(path) for path in file.paths}
    digests = [hashlib.sha256(text.encode()).hexdigest()]
    if imatrix is not None:
        digests.append(hashlib.sha256(imatrix.read_bytes()).hexdigest())
    key = json.dumps([PINNED_VERSION, stamps, digests])
    folder = cache_folder() / "quantize" / hashlib.sha256(key.encode()).hexdigest()[:32]
    with suppress(OSError):
        make_private(folder)
    if os.access(folder, os.W_OK):
        yield folder
        return
    with tempfile.TemporaryDirectory() as other, removed_at_end(Path(other)):
        yield Path(other)


def _keep(folder: Path, sensitivities: Sensitivity) -> None:
    """Store the measurements for the next size of the model. A full disk is ignored, because the fit can continue."""
    with suppress(OSError):
        write_whole(folder / _KEPT, json.dumps(sensitivities.to_json()).encode())


def _time_left(left_s: float) -> str:
    """Return the maximum remaining time of the measurement as text for people, with the option that limits it."""
    return f"at most {_duration(left_s)} left (--minutes)"


def _duration(seconds: float) -> str:
    """Return a time in whole minutes or seconds, rounded up, as text for people."""
    return f"{math.ceil(seconds / 60)} min" if seconds >= 90 else f"{math.ceil(seconds)} s"


@dataclass(frozen=True)
class _Fitting:
    """One fit of a model, with the text to measure on and the remaining time."""

    file: ModelFile
    text: str
    options: FitOptions
    plan: TimePlan
    progress: Progress
    pace: Pace

    def writing_s(self, types: Mapping[str, TensorType]) -> float:
        """Return the expected seconds to write a file with these types, in which unchanged tensors are copied."""
        changed = {name: kind for name, kind in types.items() if kind != self.file.tensors[name].type}
        return self.pace.file_s(sensitivity.value_counts(self.file, changed))

    def fit_in_time(self, table: Mapping[str, Sequence[Choice]], budget: int, reserved: int) -> Fit:
        """Return the best choice that can be written in the remaining time, or else the quickest one that was tried.

        Raises DoesNotFit.
        """
        chosen = fit(table, budget, reserved)
        while True:
            types = {name: choice.type for name, choice in chosen.choices.items()}
            slow = {kind for name, kind in types.items() if is_slow(kind) and kind != self.file.tensors[name].type}
            if not slow or self.writing_s(types) <= max(_WRITTEN_S, self.plan.left_s(_WRITTEN)):
                return chosen
            slowest = max(slow, key=lambda kind: self.pace.seconds({kind: 1}))
            table = {
                name: [choice for choice in row if choice.type != slowest or slowest == self.file.tensors[name].type]
                for name, row in table.items()
            }
            try:
                chosen = fit(table, budget, reserved)
            except DoesNotFit:
                return chosen

    def kinds(
        self, free: Sequence[str], covered: Container[str], reserved: int, budget: int
    ) -> tuple[Sequence[TensorType], dict[str, str]]:
        """Return (types to choose from, slow types and the larger ones that are faster here).

        If the budget allows it, types that no tensor will have are left out, and types in which writing the whole file
        takes longer than the remaining time.
        """
        options = self.options

        def narrowed(kinds: Sequence[TensorType], *conditions: Condition) -> Sequence[TensorType]:
            return choose_kinds(self.file, free, covered, reserved, budget, kinds, conditions)

        values = sum(self.file.tensors[name].n_values for name in free)
        kinds: Sequence[TensorType] = _kinds(options)
        mean_bits = min(8 * (budget - reserved) / max(1, values), max(kind.bits_per_weight for kind in kinds))
        near = {kind for kind in kinds if not is_slow(kind) or kind.bits_per_weight > mean_bits - _BELOW}
        file_s = {kind: self.pace.file_s({kind: values}) for kind in kinds}
        limits = sorted(file_s.values(), reverse=True)
        quickest = narrowed(kinds, *(lambda kind, limit=limit: file_s[kind] <= limit for limit in limits))
        needed_s, left_s = max(file_s[kind] for kind in quickest), self.plan.left_s()
        if needed_s > left_s:
            needed, left = _duration(needed_s), _duration(left_s)
            options.say(f"writing a file of this size takes about {needed}, and {left} of --minutes are left")
        most_s = max(needed_s, left_s, _WRITTEN_S)
        kinds = narrowed(kinds, near.__contains__, lambda kind: file_s[kind] <= most_s)
        slow = slow_kinds(known_kernels(options.threads or default_threads(), kinds))
        if options.fast:
            kinds = narrowed(kinds, lambda kind: kind.name not in slow)
        return kinds, slow

    def imatrix(self, path: Path) -> Path:
        """Return the path of the importance matrix of the text. Compute the matrix if the file does not exist."""
        if not path.exists():
            calibrate.collect(
                self.file,
                self.text,
                EngineOptions(threads=self.options.threads),
                most=_CALIBRATION_CHUNKS,
                within_s=self.plan.left_s(_CALIBRATED),
                clock=self.options.clock,
                progress=lambda done, total: self.progress("Calibrating", done, total),
            ).write(path)
        return path

    def sensitivity(
        self,
        candidates: Mapping[str, Sequence[TensorType]],
        importance: Mapping[str, Floats],
        folder: Path,
        size: tuple[int, int],
    ) -> Sensitivity:
        """Return the sensitivities that the choice depends on: stored measurements, completed by new ones.

        Stored measurements are used only if they took enough time, compared with the time available now.

        size: (maximum bytes of the file, bytes that do not depend on the choice)
        """
        threads = self.options.threads or default_threads()
        rows = {name: TensorRows(self.file, name, importance.get(name)) for name in candidates}
        known: Sensitivity | None = None
        with suppress(OSError, ValueError, RecursionError):
            known = Sensitivity.from_json(json.loads((folder / _KEPT).read_bytes()))
            if not known.left_s and self.options.within_s > _MORE * known.spent_s:
                known = None
        useful = {TYPES[FIRST]}.union(*candidates.values())
        if known:
            kinds = {
                name: {kind for kind in candidates[name] if kind.name not in errors}
                for name, errors in known.errors.items()
                if name in candidates
            }
        else:
            probes = {name: sensitivity.probes(rows[name]) for name in candidates}
            kinds = {n: {*candidates[n], *(useful.intersection(probes[n]) or probes[n])} for n in candidates}
        new = {name: rows[name] for name in kinds if kinds[name]}
        errors = sensitivity.measure_errors(
            new, kinds, threads, lambda *at: self.progress("Reading weights", *at), lambda: not self.plan.left_s(_READ)
        )
        if known:
            errors = {name: {**row, **errors.get(name, {})} for name, row in known.errors.items()}

        def table(damages: Damages) -> Table:
            return choices(self.file, candidates, Sensitivity(damages, errors, 0.0))

        def stopping() -> EarlyStopping:
            return EarlyStopping(table, lambda table: fit(table, *size))

        stopper = stopping()
        slowest = max(useful, key=lambda kind: self.pace.file_s({kind: 1 << 30}))

        def left_s() -> float:
            """Return the seconds left to measure and to check the file."""
            most_s = (1 - _WHOLE) * self.options.within_s
            return self.plan.left_s() - min(most_s, self.writing_s(stopper.types or dict.fromkeys(rows, slowest)))

        def whole(damages: Damages) -> list[Mapping[str, Choice]]:
            """Return choices for files of two sizes, whose measured damages correct the sums of damages."""
            costs = table(damages)
            least, most = (sum(end(c.n_bytes for c in row) for row in costs.values()) for end in (min, max))
            return [fit(costs, int(least + part * (most - least)) + 1).choices for part in _ANCHORS]

        values = sum(tensor.rows * tensor.columns for tensor in rows.values())
        possible = [kind for kind in sensitivity.PROBES if any(row.get(kind, 0) > 0 for row in errors.values())]
        order = probe_order(possible, 8 * (size[0] - size[1]) / max(1, values))
        if known and (not known.left_s or is_settled(order, known.damages, stopping().after_round)):
            result = replace(known, errors=errors)
        else:
            result = sensitivity.measure_damages(
                self.file,
                self.text,
                rows,
                errors,
                within_s=min(known.left_s if known else math.inf, self.plan.left_s(_MEASURED)),
                threads=threads,
                progress=lambda done, total, left_s: self.progress("Measuring", done, total, _time_left(left_s)),
                order=order,
                known=known.damages if known else None,
                after_round=stopper.after_round,
                whole=whole,
                whole_left_s=lambda: self.plan.left_s(_WHOLE),
                left_s=left_s,
                pace=self.pace,
                clock=self.options.clock,
            )
            result = replace(result, spent_s=known.spent_s if known else self.options.within_s)
        if known is None or result != known:
            _keep(folder, result)
        return result

    def best(self, out: Path, fits: Sequence[Fit], imatrix: Path) -> tuple[Fit, Outcome, float]:
        """Write as many of the fits as time allows, and keep the file with the least divergence.

        Return its fit, its outcome and its divergence.
        """
        with ExitStack() as stack:
            paths: list[Path] = []
            outcomes = []
            took_s = 0.0
            for chosen in fits:
                if paths and self.plan.left_s() <= _SECOND * took_s:  # both are 0 if the time was up before
                    break
                began = self.plan.left_s()
                path = stack.enter_context(temporary_beside(out, ".gguf"))
                try:
                    outcomes.append(self._write(path, chosen, imatrix, until_s=_CHECK * took_s))
                except _TimeIsUpError:
                    break
                paths.append(path)
                took_s = began - self.plan.left_s()
            measured = self._measured(paths)
            best = min(range(len(paths)), key=lambda i: measured[i])
            paths[best].replace(out)
        return fits[best], outcomes[best], measured[best]

    def whole(self, out: Path, free: Sequence[str]) -> Fitted:
        """Write the model unchanged, because a larger file would contain nothing more."""
        types = {name: self.file.tensors[name].type for name in free}
        unchanged = {n: Choice(kind, tensor_bytes(self.file, n, kind), 0.0) for n, kind in types.items()}
        return Fitted(self._write(out, Fit(unchanged, 0.0), self.options.imatrix), 0.0, 0.0, 0.0, {}, {})

    def _write(self, out: Path, chosen: Fit, imatrix: Path | None, until_s: float = 0.0) -> Outcome:
        """Write a fit with llama.cpp's quantizer.

        Raises _TimeIsUpError as soon as `until_s` seconds or fewer are left. 0: never
        """
        types = {name: choice.type for name, choice in chosen.choices.items()}

        def progress(done: int, total: int, name: str) -> None:
            self.progress("Quantizing", done, total, name)
            if until_s and self.plan.left_s() <= until_s:
                raise _TimeIsUpError

        return quantize(
            self.file,
            out,
            mix_like(chosen),
            types=types,
            imatrix=imatrix,
            threads=self.options.threads,
            progress=progress,
        )

    def _measured(self, paths: Sequence[Path]) -> list[float]:
        """Return the mean divergence of each file in nats per token.

        First, a short chunk shows how long a chunk takes. If time allows, the result is that of several whole chunks.
        """
        began = self.plan.left_s()
        results = self._check(paths, 1, CHUNK_TOKENS // _SHORTER)
        chunk_s = _SHORTER * (began - self.plan.left_s())
        most = sensitivity.most_chunks(self.file.shape.n_vocab)
        if n := min(most, int(self.plan.left_s() / max(chunk_s, 1e-9))):
            with suppress(_TimeIsUpError):
                results = self._check(paths, n, until_s=chunk_s / (1 + len(paths)))
        return [result.summary.mean_divergence for result in results[1:]]

    def _check(
        self, paths: Sequence[Path], chunks: int, chunk_tokens: int = CHUNK_TOKENS, until_s: float = 0.0
    ) -> list[Quality]:
        """Evaluate the model and the files on some chunks of the text.

        until_s: expected seconds of a chunk; 0: never stop early

        Raises _TimeIsUpError as soon as the remaining time is too short for another chunk.
        """
        before_s = self.plan.left_s()

        def progress(done: int, total: int) -> None:
            nonlocal before_s
            self.progress("Checking", done, total)
            left_s = self.plan.left_s()
            if until_s and done < total and left_s < max(until_s, before_s - left_s):
                raise _TimeIsUpError
            before_s = left_s

        options = EngineOptions(threads=self.options.threads)
        return evaluate(self.file, paths, self.text, options, chunk_tokens=chunk_tokens, most=chunks, progress=progress)
