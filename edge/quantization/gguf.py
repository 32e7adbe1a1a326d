"""Quantizes a GGUF file with llama.cpp's quantizer in a child process.

The file appears under its name only when it is complete. Ctrl-C, an error, or the end of this process ends the child.
"""

from __future__ import annotations

import json
import signal
import subprocess
import tempfile
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field, replace
from itertools import takewhile
from pathlib import Path
from typing import IO, Any

from devices.files import temporary_beside, usable
from devices.paths import cache_folder
from devices.probe import default_threads
from devices.processes.interpreter import module_command
from edge.errors import EngineError
from edge.models.local_slices import OwnSlices
from edge.tasks import SILENT, Steps
from partition.model.file import ModelFile
from quant.errors import ModelFileError
from quant.gguf.elastic import is_elastic
from quant.gguf.file import GgufFile
from quant.gguf.writer import NewTensor, encoded, header
from quant.mixes import NEED_IMPORTANCE, Mix, mix_by_name
from quant.types import TensorType, type_by_name
from quant.whole_file import check_room

Progress = Callable[[int, int, str], None]  # arguments: bytes of the source done, bytes in total, current tensor

_END_S = 5.0  # seconds that the process may take to end after its standard input was closed
_NEVER_NEED_IT = ("token_embd.weight", "output.weight", "per_layer_token_embd.weight")
_SPLIT = "split."


@dataclass(frozen=True)
class BlockMismatch:
    """A tensor whose rows do not fill blocks of the mix's type, so that the quantizer used another type."""

    tensor: str
    columns: int
    requested: str
    used: str


@dataclass(frozen=True)
class Outcome:
    """Types and size of a quantized model."""

    types: Mapping[str, TensorType] = field(repr=False)  # type of each tensor
    n_bytes: int  # size of the file
    misfits: tuple[BlockMismatch, ...]


def types_of(
    file: GgufFile, mix: Mix, types: Mapping[str, TensorType] | None = None, imatrix: Path | None = None
) -> Outcome:
    """Return the types that llama.cpp would use, without writing a file. Raises the EngineErrors of `quantize`."""
    with closing(types_of_each([(file, mix)], types, imatrix)) as outcomes:
        return next(outcomes)


def types_of_each(
    jobs: Sequence[tuple[GgufFile, Mix]], types: Mapping[str, TensorType] | None = None, imatrix: Path | None = None
) -> Generator[Outcome, None, None]:
    """Yield the result of `types_of` for each job in turn. One child process does all jobs and ends with the
    generator."""
    types = types or {}
    with _child(jobs, types, imatrix, None, default_threads()) as events:
        for file, mix in jobs:
            yield _outcome(file, mix, types, takewhile(lambda event: "quantized" not in event, events))


def _outcome(file: GgufFile, mix: Mix, types: Mapping[str, TensorType], events: Iterator[dict[str, Any]]) -> Outcome:
    """Return the outcome of a mix from the events of the child process."""
    reported: dict[str, TensorType] = {}
    misfits: list[BlockMismatch] = []
    for event in events:
        if "type" in event:
            reported[event["tensor"]] = type_by_name(event["type"])
        elif "misfit" in event:
            misfits.append(BlockMismatch(event["misfit"], event["columns"], event["requested"], ""))
        elif "instead" in event and misfits:  # this line follows the line of the mismatch
            misfits[-1] = replace(misfits[-1], used=event["instead"])
    all_types = {name: reported.get(name, tensor.type) for name, tensor in file.tensors.items()}
    known_misfits = {misfit.tensor for misfit in misfits}
    for name, tensor in file.tensors.items():  # llama.cpp does not report mismatches of the output matrix
        if name in reported and name not in known_misfits and not types and tensor.shape[0] % mix.type.block:
            misfits.append(BlockMismatch(name, tensor.shape[0], mix.type.name, reported[name].name))
    return Outcome(all_types, file_bytes(file, all_types), tuple(misfits))


def quantize(
    file: ModelFile,
    out: Path,
    mix: Mix,
    *,
    types: Mapping[str, TensorType] | None = None,
    imatrix: Path | None = None,
    threads: int | None = None,
    progress: Progress | None = None,
) -> Outcome:
    """Write `file` to `out` in a mix, and return the outcome.

    types: types of tensors that differ from the mix
    imatrix: file with an importance matrix

    Raises EngineError with llama.cpp's reason. Raises ModelFileError if the result is not a model, and OSError if the
    disk is full.
    """
    outcome = types_of(file, mix, types, imatrix)
    for name, kind in (types or {}).items():
        if outcome.types[name] != kind:
            raise EngineError(f"llama.cpp would make {name} {outcome.types[name].name}, not {kind.name} as was chosen")
    if imatrix is None:
        _check_needs_none(outcome, mix)
    check_room(out, outcome.n_bytes)
    sizes = {name: tensor.n_bytes for name, tensor in file.tensors.items()}
    total, done, last = sum(sizes.values()), 0, ""
    with temporary_beside(out) as temporary:
        try:
            with _child([(file, mix)], types or {}, imatrix, temporary, threads or default_threads()) as events:
                for event in events:
                    if "number" in event:
                        done, last = done + sizes.get(last, 0), event["tensor"]
                        if progress:
                            progress(done, total, last)
        except EngineError:
            # The process removes the file if it can.
            written_bytes = temporary.stat().st_size if temporary.exists() else 0
            # A full disk is the usual cause, which llama.cpp does not report.
            check_room(out, outcome.n_bytes - written_bytes)
            raise
        written = GgufFile.open(temporary)
        if {name: t.type for name, t in written.tensors.items()} != outcome.types:
            raise EngineError("llama.cpp wrote other types than it had announced; please report it")
        temporary.replace(out)
    if progress:
        progress(total, total, "")
    return Outcome(outcome.types, out.stat().st_size, outcome.misfits)


def file_bytes(file: GgufFile, types: Mapping[str, TensorType]) -> int:
    """Return the bytes of the model's file if its tensors have these types."""
    tensors = [NewTensor(name, tensor.shape, types[name]) for name, tensor in file.tensors.items()]
    return header_bytes(file) + sum(tensor.n_bytes + tensor.padding for tensor in tensors)


def header_bytes(file: GgufFile) -> int:
    """Return the bytes of the model's file before its first tensor."""
    pairs = {key: file.raw_value(key) for key in file.metadata if not key.startswith(_SPLIT)}
    pairs |= {key: encoded("u32", 0) for key in ("general.quantization_version", "general.file_type")}
    return len(header(pairs, [NewTensor(name, tensor.shape, tensor.type) for name, tensor in file.tensors.items()]))


def _check_needs_none(outcome: Outcome, mix: Mix) -> None:
    """Raise EngineError if a tensor's type requires an importance matrix. llama.cpp refuses these types, too."""
    refused = (*NEED_IMPORTANCE, "q2_k") if mix.name == "q2_k_s" else NEED_IMPORTANCE
    for name, kind in outcome.types.items():
        if kind.name in refused and name not in _NEVER_NEED_IT:
            raise EngineError(
                f"{mix.name} gives {name} the type {kind.name}, which needs an importance matrix; make one with edge"
                " imatrix MODEL TEXT and give its file as imatrix"
            )


@contextmanager
def _child(
    jobs: Sequence[tuple[GgufFile, Mix]],
    types: Mapping[str, TensorType],
    imatrix: Path | None,
    target: Path | None,
    threads: int,
) -> Iterator[Iterator[dict[str, Any]]]:
    """Yield the events of a process that quantizes each file to its mix. The process ends with the block."""
    for file, _ in jobs:
        if is_elastic(file):
            raise EngineError(
                f"{file.path.name} holds several sizes of a model; quantize the model that it was made from"
            )
    job = {
        "sources": [(str(file.path), mix.id) for file, mix in jobs],
        "target": str(target or ""),
        "types": {name: kind.id for name, kind in types.items()},
        "imatrix": str(imatrix) if imatrix else None,
        "threads": threads,
        "dry": target is None,
    }
    with tempfile.TemporaryFile() as stderr:
        process = subprocess.Popen(
            module_command("edge.quantization.gguf_child"),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stderr,
            start_new_session=True,
        )  # in its own session Ctrl-C reaches only this process, which then ends the child
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            with suppress(BrokenPipeError):
                process.stdin.write(json.dumps(job).encode() + b"\n")
                process.stdin.flush()
            yield _events(process, stderr)
        finally:
            with suppress(BrokenPipeError):
                process.stdin.close()
            try:
                process.wait(_END_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            process.stdout.close()


def _events(process: subprocess.Popen[bytes], stderr: IO[bytes]) -> Iterator[dict[str, Any]]:
    """Yield the events before "complete". Raises EngineError if the process fails or ends without "complete"."""
    assert process.stdout is not None
    for line in process.stdout:
        event: dict[str, Any] = json.loads(line)
        if "error" in event:
            kind = ModelFileError if event["kind"] == "ModelFileError" else EngineError
            raise kind(f"llama.cpp cannot quantize it: {event['error']}" if kind is EngineError else event["error"])
        if "complete" in event:
            process.wait()
            return
        yield event
    code = process.wait()
    stderr.seek(0)
    lines = stderr.read().decode(errors="replace").split("\n")
    hint = " (out of memory is the usual cause)" if code == -signal.SIGKILL else ""
    raise EngineError(f"the quantizer's process ended with code {code}{hint}: {' | '.join(lines[-4:]).strip()}")


def model_in_type(file: ModelFile, type_: str, steps: Steps = SILENT) -> ModelFile:
    """Return the model quantized to a type, from the user's cache. Quantize the model if its file is missing."""
    path, mix = file.path, mix_by_name(type_)
    digest = OwnSlices().model_digest(path)
    folder = usable(cache_folder() / "types")
    target = folder / f"{path.stem}-{digest[:12]}-{mix.name}.gguf"
    if not target.exists():
        with steps.step(f"Quantizing {path.name} to {type_}", file.size_bytes) as show:
            quantize(file, target, mix, progress=show)
    return ModelFile.open(target)
