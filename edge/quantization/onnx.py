"""Quantizes an ONNX model to weights of 8 or 4 bits with ONNX Runtime's own tools.

The output file appears under its name only when it is complete, runs, and has been compared with the float model.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from devices.files import removed_at_end
from devices.probe import default_threads
from edge.errors import EngineError
from edge.onnx import file as onnx_file
from edge.onnx.runtime import quiet_tools, refusals, session
from edge.onnx.samples import Input, Samples, inputs_of, open_dims, random_feeds
from edge.quantization import onnx_tools
from edge.quantization.onnx_compare import Comparison, OutputError, compare, differ
from edge.quantization.onnx_float32 import has_halves
from quant.errors import ModelFileError, UnknownTypeError
from quant.text import number_text
from quant.whole_file import check_room

Progress = Callable[[int, int], None]  # arguments: steps done, steps in total

TYPES = ("int8", "int4")
BLOCK_SIZES = (16, 32, 64, 128, 256)  # values that share a scale in int4
DEFAULT_BLOCK_SIZE = 32  # 16 has less error but needs a fifth more room; all others have more error

_FAR = 0.25  # relative error of an output above which a warning is shown
_STEPS = 4
_COPIES = 5  # simultaneous copies of the weights on the disk while the tools run
_RANDOM_SAMPLES = 8  # random samples for the comparison, if the caller has none
_COMPARED = 32  # maximum number of the caller's samples in the comparison
# Sizes of open axes in random samples, tried in this order. They suit a small picture or a short sound.
_OPEN_SIZES = (64, 256, 512, 1)


@dataclass(frozen=True)
class Quantized:
    """A quantized model and its figures."""

    method: str  # "dynamic", "static" or "weights"
    block_size: int | None  # values that share a scale, for int4 only
    source_bytes: int
    size_bytes: int  # bytes of OUT and its data file
    data_file: Path | None  # separate file of weights next to OUT
    weights_quantized: int  # quantized tensors, without vectors
    weights_left: int  # float tensors, without vectors
    samples_made_up: bool
    open_dims: dict[str, tuple[str, ...]]  # open dimensions by input
    open_size: int | None  # size of trailing open axes in random samples; other open axes were 1
    comparison: Comparison | None
    not_compared: str | None  # reason why there is no comparison
    threads: int

    @property
    def notes(self) -> list[str]:
        """Notes for a reader of the figures, one sentence each."""
        notes, compared = [], self.comparison
        if compared and compared.slower:
            notes.append(
                "The quantized model is slower than the float one on this device:"
                f" {number_text(compared.quantized_ms)} ms instead of {number_text(compared.float_ms)}."
                + (
                    " With calibration samples ranges are fixed, which is often faster."
                    if self.method == "dynamic"
                    else ""
                )
            )
        if self.samples_made_up and compared:
            notes.append("Made-up samples are random; give real calibration samples for an error that counts.")
            if self.open_dims:
                dims = "; ".join(f"{name}: {', '.join(dims)}" for name, dims in self.open_dims.items())
                end = "" if self.open_size == 1 else f"{self.open_size} at the end of an input, otherwise "
                notes.append(f"Dimensions that the model leaves open were {end}1 in them ({dims}).")
        if compared and (far := [output for output in compared.outputs if (output.relative_l2 or 0) > _FAR]):
            worst = max(far, key=lambda output: output.relative_l2 or 0)
            notes.append(
                f"Output {worst.name!r} is off by {worst.relative_l2:.0%} of its size: check the quantized model on"
                " real inputs before it is used, or keep the float model."
            )
        if self.not_compared:
            notes.append(f"Not compared: {self.not_compared}.")
        if compared and any(output.max_abs is None for output in compared.outputs):
            notes.append(
                "An output without figures has another shape after quantization, or is not all finite numbers."
            )
        return notes

    def to_json(self) -> dict[str, Any]:
        """Return plain values in the format of docs/cli/quantize.md."""
        compared = self.comparison
        return {
            "data_path": str(self.data_file) if self.data_file else None,
            "method": self.method,
            "block_size": self.block_size,
            "source_bytes": self.source_bytes,
            "size_bytes": self.size_bytes,
            "weights_quantized": self.weights_quantized,
            "weights_left": self.weights_left,
            "samples": compared.samples if compared else 0,
            "samples_made_up": self.samples_made_up,
            "open_dimensions": {name: list(dims) for name, dims in self.open_dims.items()},
            "open_size": self.open_size,
            "outputs": [_output_json(output) for output in compared.outputs] if compared else [],
            "not_compared": self.not_compared,
            "threads": self.threads,
            "float_ms": compared.float_ms if compared else None,
            "quantized_ms": compared.quantized_ms if compared else None,
            "speed_ratio": compared.float_ms / compared.quantized_ms if compared else None,
            "rounds": compared.rounds if compared else 0,
            "notes": self.notes,
        }


def quantize(
    source: Path,
    target: Path,
    type_name: str,
    calibration: Path | None = None,
    block_size: int | None = None,
    threads: int | None = None,
    progress: Progress | None = None,
) -> Quantized:
    """Write the model in `source` to `target` in `type_name`, and compare both. An existing `target` is replaced.

    int8 quantizes weights. With calibration samples it also fixes the ranges of activations (static); without samples
    every run determines the ranges (dynamic). int4 quantizes weights of matrix products and tables, in blocks.

    calibration: samples in the format of `Samples`; None: random samples are used for the comparison

    Raises UnknownTypeError for another type, and ModelFileError if the source or a sample is unusable. Raises
    EngineError if ONNX Runtime refuses the model, or if nothing in it can be quantized this way. Raises OSError if
    reading or writing fails. After any error `target` is unchanged.
    """
    if type_name not in TYPES:
        raise UnknownTypeError(f"unknown ONNX type {type_name!r}; known: {', '.join(TYPES)}")
    threads = threads or default_threads()
    done = progress or (lambda n, total: None)
    file = onnx_file.load(source)
    data = target.with_name(f"{target.name}.data")
    weight_files = {path.resolve() for path in file.data_files}
    for path in (target, data):
        if path.resolve() in weight_files:
            raise ModelFileError(f"{path} holds weights of {source}; name another file to write")
    check_room(target, _COPIES * file.weight_bytes + file.size_bytes)
    working = TemporaryDirectory(".part", f".{target.name}.", target.absolute().parent, ignore_cleanup_errors=True)
    with removed_at_end(folder := Path(working.name)), working:
        (folder / "made").mkdir()
        new_file = folder / "made" / target.name
        staged = folder / "the-model.onnx"
        onnx_file.save(file, staged)
        halves = type_name == "int8" and has_halves(file.model)
        file.model.Clear()  # frees memory for the tools
        reference = session(staged, threads, str(source))
        inputs, samples = _samples(reference, calibration)
        done(1, _STEPS)
        with quiet_tools(folder), refusals(f"quantize {source}", folder):
            prepared = onnx_tools.prepare(
                staged, file.external, eight_bits=type_name == "int8", fixed=type_name == "int8" and samples is not None
            )
            done(2, _STEPS)
            if type_name == "int4":
                method = "weights"
                onnx_tools.int4(prepared, new_file, file.external, block_size or DEFAULT_BLOCK_SIZE)
            elif samples is None:
                method = "dynamic"
                onnx_tools.dynamic(prepared, new_file, file.external)
            else:
                method = "static"
                onnx_tools.static(prepared, new_file, file.external, samples)
            onnx_tools.put_in_order(new_file)
            quantized, left = onnx_tools.count_weights(prepared, new_file)
            if halves:
                onnx_tools.store_left_weights(new_file, file.external)
        done(3, _STEPS)
        if not quantized:
            raise EngineError(_nothing(source, method, onnx_tools.has_branches(prepared)))
        after = session(new_file, threads, f"the quantized {source.name}")
        comparison, open_size, reason = _compared(reference, after, inputs, samples)
        written = new_file.with_name(data.name)
        size = sum(path.stat().st_size for path in (new_file, written) if path.exists())
        data_file = data if written.exists() else None
        if data_file:
            written.chmod(new_file.stat().st_mode)  # the onnx package restricts the file to this user
            os.replace(written, data)  # the data file comes first because the model refers to it
        os.replace(new_file, target)
        done(4, _STEPS)
    return Quantized(
        method=method,
        block_size=(block_size or DEFAULT_BLOCK_SIZE) if type_name == "int4" else None,
        source_bytes=file.size_bytes,
        size_bytes=size,
        data_file=data_file,
        weights_quantized=quantized,
        weights_left=left,
        samples_made_up=samples is None,
        open_dims=dict(open_dims(inputs)),
        open_size=open_size,
        comparison=comparison,
        not_compared=reason,
        threads=threads,
    )


def _samples(reference: Any, calibration: Path | None) -> tuple[tuple[Input, ...], Samples | None]:
    """Return the model's inputs and the caller's samples. The first sample is read, so that bad samples fail early."""
    if calibration is None:
        try:
            return inputs_of(reference), None
        except ModelFileError:
            return (), None  # such a model can be quantized but not compared
    inputs = inputs_of(reference)
    samples = Samples(calibration, inputs)
    next(iter(samples))
    return inputs, samples


def _compared(
    reference: Any, quantized: Any, inputs: tuple[Input, ...], samples: Samples | None
) -> tuple[Comparison | None, int | None, str | None]:
    """Return the comparison, the size of open axes in random samples, and the reason if there is no comparison.

    Raises EngineError if the float model runs and the quantized model does not.
    """
    if samples is not None:
        return compare(reference, quantized, islice(samples, _COMPARED)), None, None
    if not inputs:
        return None, None, "the model takes no tensors of numbers"
    size, reason = _open_size(reference, inputs)
    if size is None:
        return None, None, reason
    return compare(reference, quantized, random_feeds(with_open(inputs, size), _RANDOM_SAMPLES)), size, None


def _open_size(reference: Any, inputs: tuple[Input, ...]) -> tuple[int | None, str | None]:
    """Return a size for open axes and None, or None and a reason.

    The result is the first of _OPEN_SIZES with which different random inputs give the float model different outputs.
    If there is none, it is the first size with which the model runs. If the model runs with no size, return the first
    reason.
    """
    runs, reason = None, None
    for size in _OPEN_SIZES if with_open(inputs, 2) != with_open(inputs, 1) else (1,):
        feeds = list(random_feeds(with_open(inputs, size), 2))
        try:
            with refusals("run the float model on made-up inputs"):
                first, second = (reference.run(None, feed) for feed in feeds)
        except EngineError as exc:
            reason = reason or f"{exc}; give calibration samples to compare"
            continue
        runs = runs or size
        if any(differ(a, b) for a, b in zip(first, second, strict=True)):
            return size, None
    return runs, reason


def with_open(inputs: tuple[Input, ...], size: int) -> tuple[Input, ...]:
    """Return the inputs with `size` for trailing open axes, and 1 for other open axes, including the first axis."""
    sized_inputs = []
    for spec in inputs:
        last = max((i for i, dim in enumerate(spec.shape) if isinstance(dim, int)), default=0)
        shape = (d if isinstance(d, int) else size if i > max(last, 0) else 1 for i, d in enumerate(spec.shape))
        sized_inputs.append(replace(spec, shape=tuple(shape)))
    return tuple(sized_inputs)


def _output_json(output: OutputError) -> dict[str, Any]:
    return {
        "name": output.name,
        "max_abs_error": output.max_abs,
        "relative_l2_error": output.relative_l2,
        "cosine": output.cosine,
        "top1_agreement": output.top1,
    }


def _nothing(source: Path, method: str, in_branches: bool) -> str:
    if in_branches and method == "static":
        return (
            f"{source} has its weights in branches (of an If or a Loop), where ONNX Runtime fixes no ranges; leave out"
            " calibration: then ranges are found in every run, in branches too"
        )
    if method == "weights":
        return f"{source} has no matrix product or table with a constant weight, which int4 is for; use int8"
    return f"{source} has no convolution or matrix product with a constant weight in floats: nothing to quantize"
