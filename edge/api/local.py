"""Functions for one device: load a model, and quantize one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from edge.arguments import checked, named
from edge.llm.engine import Engine
from edge.llm.model import Model
from edge.llm.options import EngineOptions
from edge.models.paths import PathLike, model_path
from edge.quantization.fit import FitOptions, fit_file
from edge.quantization.gguf import Outcome
from edge.quantization.gguf import quantize as to_mix
from edge.quantization.text_file import BUNDLED, read_text
from edge.speculate.factory import drafts, model_with, with_draft_and_cache
from edge.units import as_bytes, memory_options
from partition.model.file import ModelFile
from quant.mixes import mix_by_name


@checked
def load(
    model: PathLike | None = None,
    *,
    memory: int | str | None = None,
    gpu_memory: int | str | None = None,
    prefix_cache: int | str = 0,
    draft: PathLike = "off",
    draft_worker: str | None = None,
    reproducible: bool = False,
    **options: Any,
) -> Model:
    """Load a language model on this device.

    model: a GGUF file, a known name, or REPO:FILE of the hub, which is fetched if it is not cached; None: the bundled
    model.
    memory: maximum of the whole process, in bytes or as a text such as "3GiB"; weights that do not fit are read from
    disk again and again. A range such as "1.2GiB..4GiB" follows the free memory, with fewer bits if the file has
    several sizes (`prefer`: "speed" or "quality").
    gpu_memory: maximum of GPU memory; layers that do not fit pass through two buffers there.
    prefix_cache: disk space for computed prompts, in bytes or as a text, so that they survive a restart.
    draft: source of drafted tokens: "ngram", "mtp", the file of a smaller model, "self", "auto" or "off".
    draft_worker: HOST or HOST:PORT of a worker that runs the drafting model.
    reproducible: the same program gets the same tokens each time on this device, at some cost of speed. Answers need a
    seed or a temperature of 0.
    options: other fields of EngineOptions: context, sequences, threads, ...

    Raises ModelFileError, NotEnoughMemory, EngineError, HubError; with a worker also WorkerError, TransportError,
    and ValueError if no drafting model is named.
    """
    budgets = {"gpu_memory": named("gpu_memory", as_bytes, gpu_memory), **named("memory", memory_options, memory)}
    disk_bytes = named("prefix_cache", as_bytes, prefix_cache)
    own = EngineOptions(**{**budgets, **options})
    file = ModelFile.open(model_path(model))
    drafting = drafts(draft, file, worker=draft_worker)
    own = with_draft_and_cache(own, drafting, prefix_cache=disk_bytes, reproducible=reproducible)
    engine = Engine(file, own)
    return model_with(drafting, engine, engine.close)


@checked
def quantize(
    source: PathLike,
    out: PathLike,
    *,
    size: int | str | None = None,
    type: str | None = None,
    imatrix: PathLike | None = None,
    threads: int | None = None,
) -> Outcome:
    """Write a GGUF file with fewer bits to `out`.

    Give either a size or a type.
    size: bytes, or a text such as "1900MiB"; the file within it with the least damage.
    type: a type of llama.cpp such as "q4_k_m".
    imatrix: file of an importance matrix.
    Raises ValueError unless exactly one of size and type is given, SizeTooSmall, ModelFileError, EngineError.
    """
    if (size is None) == (type is None):
        raise ValueError("give either a size or a type")
    EngineOptions(threads=threads)  # checks the number
    file = ModelFile.open(model_path(source))
    matrix = Path(imatrix) if imatrix is not None else None
    if type is not None:
        return to_mix(file, Path(out), mix_by_name(type), imatrix=matrix, threads=threads)
    budget = named("size", as_bytes, size)
    assert budget is not None
    return fit_file(file, Path(out), budget, read_text(BUNDLED), FitOptions(matrix, threads=threads)).outcome
