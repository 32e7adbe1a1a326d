"""The plans of a language model, of one file or of several types made of it."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from apps.commands.options import UsageError

if TYPE_CHECKING:
    from devices.cluster_file import Cluster
    from edge.cluster.fleet import Fleet
    from edge.planning.space import LlmSpace

_CONTEXT, _CONCURRENCY, _PROMPT = 4096, 4, 128
_ANSWER = 64  # tokens that are to have room after a prompt
_A_REQUEST = 16  # tokens that each of several requests needs at least


def llm_spaces(
    args: argparse.Namespace,
    path: Path,
    cluster: Cluster,
    fleet: Fleet | None,
    notes: Sequence[str],
    types: Sequence[str],
) -> list[LlmSpace]:
    """A space for the file, or one for each type. The errors of reading, quantizing and measuring."""
    from quant.mixes import mix_by_name

    _check_room(args)
    for type_ in types:
        mix_by_name(type_)  # before any of them is made
    if not types:
        return [_space(args, path, cluster, fleet, notes, None)]
    return [_space(args, of_type(path, type_), cluster, fleet, notes, type_) for type_ in types]


def _check_room(args: argparse.Namespace) -> None:
    """UsageError where the context that was asked for has no room for the work."""
    if args.context is None:
        return
    prompt, requests = args.prompt_tokens or _PROMPT, args.concurrency or _CONCURRENCY
    for need, what in (
        (prompt + _ANSWER, f"a prompt of {prompt} tokens and {_ANSWER} more (--prompt-tokens)"),
        (requests * _A_REQUEST, f"{requests} requests of {_A_REQUEST} tokens (--concurrency)"),
    ):
        if need > args.context:
            raise UsageError(f"--context {args.context} is too small: {what} need {need} tokens")


def of_type(path: Path, type_: str) -> Path:
    """The model quantized to a type, in this user's cache; made where it is not there."""
    from apps.show.progress import progress
    from devices.paths import cache_folder
    from edge.quantization.gguf import quantize
    from edge.slices.local import OwnSlices
    from quant.gguf.file import GgufFile
    from quant.mixes import mix_by_name

    file, mix = GgufFile.open(path), mix_by_name(type_)
    digest = OwnSlices().model_digest(path)
    folder = cache_folder() / "types"
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / f"{path.stem}-{digest[:12]}-{mix.name}.gguf"
    if not target.exists():
        with progress(f"Quantizing {path.name} to {type_}", file.size_bytes) as bar:
            quantize(file, target, mix, progress=bar.update)
    return target


def _space(
    args: argparse.Namespace,
    path: Path,
    cluster: Cluster,
    fleet: Fleet | None,
    notes: Sequence[str],
    type_: str | None,
) -> LlmSpace:
    from apps.show.progress import progress
    from edge.cluster.deployment import Exchange
    from edge.planning.arrange import work_of
    from edge.planning.profile import llm_speeds
    from edge.planning.space import LlmSpace
    from edge.slices.local import OwnSlices
    from partition.model.check import check_loadable
    from partition.model.model import ModelShape
    from quant.gguf.file import GgufFile

    file = GgufFile.open(path)
    check_loadable(file)
    shape = ModelShape.from_gguf(file)
    work = work_of(
        file,
        context=args.context or min(shape.context_length or _CONTEXT, _CONTEXT),
        concurrency=args.concurrency or _CONCURRENCY,
        prompt=args.prompt_tokens or _PROMPT,
        kv_type=args.kv_type or "f16",
        wire=args.wire or "f32",
    )
    with progress(f"Reading {path.name}") as bar:
        digest = OwnSlices().model_digest(path, bar.update)
    with progress("Measuring devices", unit="steps") as bar:
        known = llm_speeds(
            cluster,
            fleet,
            notes,
            file,
            digest,
            threads=args.threads,
            memory=args.memory,
            transport=args.transport or "auto",
            fresh=args.fresh,
            on_step=bar.update,
        )
    exchange = Exchange(args.transport or "auto", wire=args.wire or "f32")
    return LlmSpace(
        path, file, digest, work, known, threads=args.threads, memory=args.memory, exchange=exchange, type_=type_
    )
